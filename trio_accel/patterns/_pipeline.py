"""A chain of models that work at the same time, each on a different item."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast, overload

import attrs
import trio
from attrs.validators import optional

from ..actors import DeferredReply, Ref, named_options
from ..devices import AccelRef, Device
from ._checks import of_class, positive, positive_integer
from ._limits import RetryPolicy
from ._submit import CallStatistics, ItemT, Model, ResultT, Tally, TaskSubmitActor, as_callable, is_model

__all__ = ["Pipeline", "PipelineStage", "PipelineStageStatistics", "PipelineStatistics"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

_NONE_TYPE = type(None)


@named_options
@attrs.frozen
class PipelineStage(Generic[ItemT, ResultT]):
    """A model of a `Pipeline`, with its options.

    Attributes:
        model: The model. Its result is the item of the next stage.
        name: The name in statistics, traces and metrics, without a slash. By default the name of the function
            or the actor.
        workers: The maximum number of items that the model has at once. They may end in any order: the next
            stage takes them in pipeline order.
        capacity: The maximum number of items that wait between the previous stage and this one, at least 1.
            While it is reached, the workers before hold their results.
        device: Arrays of an item on another device are copied to this one first: the item itself, and arrays
            in its tuples, lists, dictionaries, attrs classes and dataclasses.
        retry: The policy for retries of the stage, including its copies; by default, none.
        deadline: The maximum seconds of an item in this stage, including retries. After that, it fails with
            `trio.TooSlowError`.
    """

    model: Model[ItemT, ResultT] = attrs.field(validator=is_model)
    name: str | None = attrs.field(default=None, kw_only=True)
    workers: int = attrs.field(default=1, kw_only=True, validator=positive_integer)
    capacity: int = attrs.field(default=1, kw_only=True, validator=positive_integer)
    device: Device | None = attrs.field(default=None, kw_only=True, validator=of_class(Device, _NONE_TYPE))
    retry: RetryPolicy | None = attrs.field(
        default=None, kw_only=True, validator=of_class(RetryPolicy, _NONE_TYPE)
    )
    deadline: float | None = attrs.field(default=None, kw_only=True, validator=optional(positive))

    def __attrs_post_init__(self) -> None:
        if self.name is not None and not _is_name(self.name):
            raise ValueError(f"PipelineStage: name must be a non-empty string without '/', got {self.name!r}")


@attrs.frozen(kw_only=True)
class PipelineStageStatistics(CallStatistics):
    """Counts of one stage; a call lasts from the stage's start on an item to its end.

    Attributes:
        name: The stage.
        waiting: The number of items that wait in front of it, because the previous stage has finished them.
        held: The number of finished items on workers that wait for room in front of the next stage.
    """

    name: str
    waiting: int
    held: int


@attrs.frozen(kw_only=True)
class PipelineStatistics(CallStatistics):
    """Counts of a `Pipeline`'s items, and of its stages. The slowest stage has waiting items.

    Attributes:
        stages: A record for each stage, in order.
    """

    stages: tuple[PipelineStageStatistics, ...]


@attrs.define(eq=False)
class _Entry:
    """An item in the pipeline.

    Attributes:
        has_begun: Whether a model has seen it.
        waiting_line: The stage that it waits for, in the queue in front of it; None before it gets there.
        works: The stage of its worker.
        woken: The lot in which it waits for a place or a worker.
    """

    has_begun: bool = False
    waiting_line: _Line | None = None
    works: _Line | None = None
    woken: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def leave(self) -> None:
        """Release its worker, if any."""
        line, self.works = self.works, None
        if line is not None:
            line.free += 1
            line.begin_next()


@attrs.define(eq=False)
class _Line:
    """A stage at work: its workers, and its items in their order.

    The first `capacity` items that have not begun may wait here (`admitted`); they have a place even before
    they arrive. So a later item never takes the place of an earlier one that arrives after it, and a line is
    never stuck. All others (`upstream`) stay with the worker of the previous stage until an item begins or
    leaves.
    """

    name: str
    call: Callable[[Any], Awaitable[Any]]
    capacity: int
    workers: int
    free: int = attrs.field(init=False)
    admitted: OrderedDict[_Entry, None] = attrs.field(factory=OrderedDict[_Entry, None])
    upstream: OrderedDict[_Entry, None] = attrs.field(factory=OrderedDict[_Entry, None])
    tally: Tally = attrs.field(factory=Tally)

    def __attrs_post_init__(self) -> None:
        self.free = self.workers

    def expect(self, entry: _Entry) -> None:
        """Add an item that will arrive, after all earlier ones."""
        (self.admitted if len(self.admitted) < self.capacity else self.upstream)[entry] = None

    def drop(self, entry: _Entry) -> None:
        """Forget an item that will not arrive, if it has not begun."""
        if entry in self.upstream:
            del self.upstream[entry]
        elif entry in self.admitted:
            self._take_out(entry)
            self.begin_next()

    def begin_next(self) -> None:
        """Give idle workers to the first items, as far as these have arrived."""
        while self.free and self.admitted and (first := next(iter(self.admitted))).waiting_line is self:
            self._take_out(first)
            self.free -= 1
            first.works = self
            first.woken.unpark_all()

    def statistics(self) -> PipelineStageStatistics:
        """Return its counts."""
        return PipelineStageStatistics(
            name=self.name,
            waiting=sum(entry.waiting_line is self for entry in self.admitted),
            held=self.workers - self.free - self.tally["in_flight"],
            **self.tally,
        )

    def _take_out(self, entry: _Entry) -> None:
        del self.admitted[entry]
        if self.upstream:
            following, _ = self.upstream.popitem(last=False)
            self.admitted[following] = None
            following.woken.unpark_all()


StageLike: TypeAlias = Model[A, B] | PipelineStage[A, B]


class Pipeline(TaskSubmitActor[ItemT, ResultT], Generic[ItemT, ResultT]):
    """Passes each item through models in order, while each model works on a different item.

    Start it with ``await system.spawn(Pipeline, load, PipelineStage(embed, device=gpu), store)``. For up to
    four stages, type checkers verify that each stage takes the results of the previous one. Send an item with
    ``Submit(item)``, or many items with `open_results`.

    **Order.** Each stage starts on the items in the order in which the pipeline got them. A reply is sent as
    soon as its item is finished.

    **Bounds.** A stage has at most `workers` items, and at most `capacity` more wait in front of it. Items
    that do not fit into the first stage wait with their callers.

    **Failure.** If a stage fails on an item, the item leaves with the unchanged error of the stage, and makes
    room. The other items continue. So a device that loses its context costs only the items in its stages, or
    none, with a `RetryPolicy` that allows it. If the caller of an item is cancelled, the item also leaves,
    and its stage is cancelled. A `NotExecutedError` means that its stage was never begun, but the stages
    before may have been.

    **Traces.** Each stage is a part of the item's call, named ``pipeline/stage``: it has a row in timelines,
    and a span below the span of the call. The time that the item has waited for it is separate.

    ``stop(drain=True)`` waits for all items. If the incarnation ends otherwise, items that a stage has seen
    fail with `ActorFailedError`. The others fail with `ActorStoppedError` or `ActorRestartingError`, because
    they were never executed. The next incarnation serves items in the mailbox. Its statistics are
    `PipelineStatistics`.

    Args:
        stages: The models, in order: each an async callable, the address of a `SubmitActor`, or a
            `PipelineStage`.

    Raises:
        ValueError: There are no stages, or two stages have the same name.
        TypeError: A stage is none of these.
    """

    @overload
    def __init__(self, first: StageLike[ItemT, ResultT], /) -> None: ...
    @overload
    def __init__(self, first: StageLike[ItemT, A], second: StageLike[A, ResultT], /) -> None: ...
    @overload
    def __init__(
        self, first: StageLike[ItemT, A], second: StageLike[A, B], third: StageLike[B, ResultT], /
    ) -> None: ...
    @overload
    def __init__(
        self,
        first: StageLike[ItemT, A],
        second: StageLike[A, B],
        third: StageLike[B, C],
        fourth: StageLike[C, ResultT],
        /,
    ) -> None: ...
    @overload
    def __init__(
        self,
        first: StageLike[ItemT, Any],
        second: StageLike[Any, Any],
        third: StageLike[Any, Any],
        fourth: StageLike[Any, Any],
        fifth: StageLike[Any, Any],
        /,
        *more_stages: StageLike[Any, Any],
    ) -> None: ...

    def __init__(self, *stages: StageLike[Any, Any]) -> None:
        if not stages:
            raise ValueError("Pipeline: there must be at least one stage")
        pipeline_stages = [_as_stage(index, model) for index, model in enumerate(stages)]
        names = _names_of(pipeline_stages)
        self._lines = [
            _Line(name, _call_of(name, stage), stage.capacity, stage.workers)
            for name, stage in zip(names, pipeline_stages, strict=True)
        ]

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Accept an item, after all earlier ones."""
        entry = _Entry()
        for line in self._lines:
            line.expect(entry)
        reply = self.start(partial(self._pass, entry, item), has_begun=lambda: entry.has_begun)
        await trio.lowlevel.checkpoint()
        return reply

    async def _pass(self, entry: _Entry, item: ItemT) -> ResultT:
        """Take an item through the stages."""
        value: Any = item
        try:
            with self._tally:
                for line in self._lines:
                    waits_since = trio.current_time()
                    while entry in line.upstream:
                        await entry.woken.park()
                    entry.leave()
                    entry.waiting_line = line
                    line.begin_next()
                    while entry.works is not line:
                        await entry.woken.park()
                    entry.has_begun = True
                    queue_time = trio.current_time() - waits_since
                    with self.context.part(line.name, queue_time=queue_time), line.tally:
                        value = await line.call(value)
        finally:
            for line in self._lines:
                line.drop(entry)
            entry.leave()
        return cast("ResultT", value)

    def statistics(self) -> PipelineStatistics:
        """Return the counts of the items, and of the stages."""
        return PipelineStatistics(**self._tally, stages=tuple([line.statistics() for line in self._lines]))


def _as_stage(index: int, model: Any) -> PipelineStage[Any, Any]:
    if isinstance(model, PipelineStage):
        return model  # pyright: ignore[reportUnknownVariableType]  # its types are lost in `model`
    if not isinstance(model, Ref) and not callable(model):
        expected = "an async callable, the address of a `SubmitActor`, or PipelineStage(model)"
        raise TypeError(f"Pipeline: stage {index} must be {expected}, got {model!r}")
    return PipelineStage(cast("Model[Any, Any]", model))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name


def _names_of(stages: Sequence[PipelineStage[Any, Any]]) -> list[str]:
    """Return the names of stages; a default name gets a number if it is taken.

    Raises:
        ValueError: Two stages were given the same name.
    """
    chosen_names = [stage.name for stage in stages if stage.name is not None]
    if len(set(chosen_names)) < len(chosen_names):
        raise ValueError(f"Pipeline: each stage must have a name of its own, got {chosen_names}")
    names: list[str] = []
    for index, stage in enumerate(stages):
        name = stage.name or _name_of(stage.model)
        while stage.name is None and name in {*chosen_names, *names}:
            name = f"{name}-{index}"
        names.append(name)
    return names


def _name_of(model: Model[Any, Any]) -> str:
    if isinstance(model, Ref):
        return model.path.rpartition("/")[2]
    # A `functools.partial` takes the name of its function.
    name: str = getattr(getattr(model, "func", model), "__name__", "")
    return name if _is_name(name) and name != "<lambda>" else type(model).__name__


def _call_of(name: str, stage: PipelineStage[Any, Any]) -> Callable[[Any], Awaitable[Any]]:
    """Return the model of a stage, wrapped with its copies, retries and deadline."""
    call = as_callable(stage.model)
    if stage.device is not None:
        call = _copying(call, stage.device)
    if stage.retry is not None:
        call = stage.retry.wrap(call)
    return call if stage.deadline is None else _limited(call, name, stage.deadline)


def _copying(call: Callable[[Any], Awaitable[Any]], device: Device) -> Callable[[Any], Awaitable[Any]]:
    async def copying(item: Any) -> Any:
        return await call(await _copied(item, device))

    return copying


def _limited(
    call: Callable[[Any], Awaitable[Any]], name: str, seconds: float
) -> Callable[[Any], Awaitable[Any]]:
    async def limited(item: Any) -> Any:
        with trio.move_on_after(seconds):
            return await call(item)
        raise trio.TooSlowError(f"stage {name!r} did not finish within {seconds:g} s")

    return limited


async def _copied(value: Any, device: Device) -> Any:  # noqa: ASYNC910  # the model is awaited next
    """Copy the arrays in a value to a device; return a value without other arrays unchanged."""
    if isinstance(value, AccelRef):
        return value if value.device is device else await value.copy_to(device)
    structure = _taken_apart(value)
    if structure is None:
        return value
    parts, put_together = structure
    copies = {key: await _copied(part, device) for key, part in parts.items()}
    return value if all(copies[key] is part for key, part in parts.items()) else put_together(copies)


_Parts: TypeAlias = dict[Any, Any]


def _taken_apart(value: Any) -> tuple[_Parts, Callable[[_Parts], Any]] | None:
    """Return the parts of a value that may be arrays, and a function that rebuilds the value from parts."""
    kind: Callable[..., Any] = value.__class__
    if kind is dict:
        return value, dict
    if kind is list or kind is tuple:
        make: Callable[[Iterable[Any]], Any] = value.__class__
        return dict(enumerate(cast("list[Any]", value))), lambda parts: make(parts.values())
    if hasattr(kind, "_asdict"):  # a named tuple
        return value._asdict(), lambda parts: value._replace(**parts)
    if attrs.has(value.__class__):
        fields = [field for field in attrs.fields(value.__class__) if field.init]
        return {field.alias: getattr(value, field.name) for field in fields}, lambda parts: attrs.evolve(
            value, **parts
        )
    if is_dataclass(kind):
        names = [field.name for field in dataclass_fields(value) if field.init]
        return {name: getattr(value, name) for name in names}, lambda parts: replace(value, **parts)
    return None
