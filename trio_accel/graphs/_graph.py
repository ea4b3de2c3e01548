"""Graphs: captured once, replayed with other arrays or in place."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import attrs

from ..backends.base import DType, name_function
from ..backends.base.contract.ops import ArraySpec, GraphSpec
from ..devices import (
    AccelRef,
    Device,
    LibraryActor,
    Operand,
    Operation,
    Planned,
    Planner,
    check_device,
    record,
)
from ..devices.front._device import opened
from ..devices.front._layout import GraphLayout, Input, dot_of, lay_out, map_refs
from ..devices.front._neighbours import joined

__all__ = ["Graph", "GraphsActor", "Replay", "capture"]

ReplyT = TypeVar("ReplyT")

_CAPTURE = "capture"
# A placeholder for the memory of intermediate results, because block ids are never 0.
_SCRATCH = 0


class GraphsActor(LibraryActor):
    """Replays graphs, on a stream of its own, with libraries of its own.

    On the CPU backend, a graph is one task for the stream's thread. On CUDA, it is a graph of the driver.
    """

    library = "graphs"

    @classmethod
    def library_of(cls, argument: str | None) -> str:
        """Return the name of the backend's library, the same for each stream."""
        return cls.library


async def capture(
    device: Device, step: Callable[..., Awaitable[ReplyT]], *arrays: AccelRef, idempotent: bool = False
) -> Graph[ReplyT]:
    """Record the operations of a step on a device, to launch them as one from then on.

    ``await step(*arrays)`` is called once, with placeholders for the given arrays. The operations that it
    requests from the device are recorded and not run: copies, fills, products, transforms, kernels, and other
    graphs. Its Python code runs only this once. The graph retains other arrays that it uses.

    Args:
        device: The device.
        step: Requests operations, one or several at a time, and returns arrays: one, or tuples, lists and
            dictionaries of them, or None.
        arrays: Its arguments. `Graph.replay` works on these.
        idempotent: Whether a replay may run again after a loss of its context, according to
            `DeviceOptions.retry`, although it changes arrays. The written values must not depend on anything
            that it or a concurrent operation writes: so it may write to a cache of attention, but not add to
            a sum. A failed or lost replay does not damage the arrays; its error tells the caller that the
            written places are in doubt.

    Returns:
        The graph. Nothing has run yet.

    Raises:
        NotSupportedError: The step uses an operation that graphs do not support: host arrays, values on the
            host, operations with an outcome that depends on status words, random numbers, another device. The
            message names the operation.
        TypeError: An argument is not an array, or the step returns something else.
        ValueError: The step requests no operation; or an array is on another device.
        StaleRefError: An array must not be used.
        Exception: An error of the step. Then, and if it is cancelled, nothing remains of the capture.
    """
    return await captured(device, step, arrays, is_idempotent=idempotent)


async def captured(
    device: Device,
    step: Callable[..., Awaitable[ReplyT]],
    arrays: Sequence[AccelRef],
    *,
    is_idempotent: bool = False,
    is_joined: bool = False,
) -> Graph[ReplyT]:
    """Record a step as `capture` does, and fuse neighbouring expressions if wanted."""
    _check_arguments(device, step, arrays)
    recorded, reply = await record(device, step, arrays, _looked_at)
    if not recorded.nodes:
        raise ValueError(f"{_CAPTURE}: the step asked {device.path} for no operation")
    returned: list[int] = []

    def note(ref: AccelRef) -> AccelRef:
        returned.append(ref.block.id)
        return ref

    map_refs(reply, note)
    if is_joined:
        intermediates = recorded.output_sizes.keys() - set(returned)
        unjoined = opened(device).state.backend.unjoined
        recorded = attrs.evolve(recorded, nodes=await joined(recorded.nodes, intermediates, unjoined))
    names = _names(step, len(arrays))
    arguments = [(name, array.spec) for name, array in zip(names, arrays, strict=True)]
    layout = lay_out(recorded, arguments, returned)
    return Graph(device, tuple(arrays), layout, reply, is_idempotent=is_idempotent)


@attrs.define(eq=False, repr=False)
class Graph(Generic[ReplyT]):
    """A chain of operations that is launched as one. Made by `capture`.

    Until it is closed or deleted, it retains the captured arrays, the other arrays of its operations, and
    memory for intermediate results. Its replays take effect one after the other.

    After a lost context, the first replay prepares it again from the recording. With ``isolation="process"``
    its arrays still exist then. Inline they are lost with the context: a replay that needs one raises
    `StaleRefError`, which names it.
    """

    _device: Device
    _arrays: tuple[AccelRef, ...]
    _layout: GraphLayout
    _reply: ReplyT
    _is_idempotent: bool = attrs.field(kw_only=True, alias="is_idempotent")
    _recipe: bytes = attrs.field(init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    # Made by the first replay, by block: memory for intermediate results, and for the outputs of `replay`.
    _memory: dict[int, AccelRef] = attrs.field(factory=dict[int, AccelRef], init=False)
    _cached_plan: _InPlace[ReplyT] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._recipe = self._layout.recipe.encode()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<Graph of {len(self)} operations on {self.device.path}{state}>"

    def __len__(self) -> int:
        """Return the number of its operations; a graph in it counts as one."""
        return len(self._layout.recipe.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device(self) -> Device:
        """The device that it runs on."""
        return self._arrays[0].device if self._arrays else self._device

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it uses now, for intermediate results and the outputs of `replay`."""
        return sum(ref.block.nbytes for ref in self._memory.values())

    async def __call__(self, *arrays: Operand) -> ReplyT:
        """Replay it with other arrays; the results are new arrays.

        Args:
            arrays: One for each argument of the step, with the same shape, dtype and strides. NumPy arrays
                are allowed for arguments that the graph only reads. Others are changed in place.

        Returns:
            The step's result, with the arrays of this replay.

        Raises:
            TypeError, ValueError: Arrays that differ from the captured ones, or two arrays that share memory,
                one of which is changed; nothing was launched.
            StaleRefError: An array must not be used, or was lost with its context.
            RuntimeError: The graph is closed.

        See `Device.ask` for cancellation and the errors that any operation can end with. If a replay fails on
        the device, the arrays that it was to change are damaged and their use refused, unless it is
        idempotent.
        """
        return await self.device.ask(Replay(self, arrays))

    async def replay(self) -> ReplyT:
        """Replay it in place: on the captured arrays, into the output arrays of the previous replay.

        Returns:
            The step's result: the same arrays each time. After a replay that failed they are new.

        Raises:
            StaleRefError: An array that must not be used, or was lost with its context.
            RuntimeError: The graph is closed.

        See `Device.ask` for cancellation and the errors that any operation can end with.
        """
        return await self.device.ask(Replay(self))

    def close(self) -> None:
        """Release its arrays and its memory; replays in flight end first. A second call does nothing."""
        self._is_closed = True
        self._arrays, self._memory, self._cached_plan = (), {}, None
        self._layout = attrs.evolve(self._layout, constants=())

    def dot(self) -> str:
        """Draw the recorded chain in the DOT language of Graphviz: operations, and which need which."""
        return dot_of(self._layout.recipe.nodes)

    def plan_replay(self, planner: Planner, arrays: Sequence[Operand] | None) -> Planned[ReplyT]:
        """See `Operation.plan`."""
        self._check_open(planner)
        cached_plan = self._cached_plan if arrays is None and not planner.is_recording else None
        if cached_plan is not None and cached_plan.is_there():
            return cached_plan.plan(planner)
        layout = self._layout
        arguments, specs = self._taken(planner, self._arrays if arrays is None else arrays)
        outputs: dict[int, AccelRef] = {}
        for block, nbytes in layout.output_sizes.items():
            outputs[block] = self._array(planner, block, nbytes, is_kept=arrays is None)
        written = [*specs["write"], *[ref.spec for ref in outputs.values()]]
        if layout.scratch:
            # The same for all replays, which follow one another.
            written.append(self._array(planner, _SCRATCH, layout.scratch, is_kept=True).spec)
        lowered = self._spec(specs, written)
        refs = {
            argument.block: (argument, operand)
            for argument, (operand, _) in zip(layout.inputs, arguments, strict=True)
        }
        planned = Planned(lowered, map_refs(self._reply, lambda ref: self._reply_array(ref, refs, outputs)))
        if arrays is None and not planner.is_recording:
            self._cached_plan = self._in_place(planned)
        return planned

    def plan_body(self, planner: Planner, arrays: Sequence[Operand]) -> GraphSpec:
        """Lower it to a part of another operation, which runs it any number of times, or never.

        Raises:
            ValueError: It returns arrays that it makes.
        """
        self._check_open(planner)
        if self._layout.output_sizes:
            raise ValueError(
                f"{planner.name}: a body cannot return arrays that it makes, because it may never run; "
                "let it change arrays that are made before"
            )
        _, specs = self._taken(planner, arrays)
        written = specs["write"]
        if self._layout.scratch:
            written.append(planner.output((self._layout.scratch,), DType.uint8).spec)
        return self._spec(specs, written)

    def _spec(self, specs: Mapping[str, Sequence[ArraySpec]], written: Sequence[ArraySpec]) -> GraphSpec:
        arrays = tuple(specs["read"]), tuple(specs["update"]), tuple(written)
        return GraphSpec(self._recipe, self._is_idempotent, *arrays)

    def _check_open(self, planner: Planner) -> None:
        if self._is_closed:
            raise RuntimeError(f"{planner.name}: the graph is closed")

    def _taken(
        self, planner: Planner, arrays: Sequence[Operand]
    ) -> tuple[list[tuple[Operand, ArraySpec]], dict[str, list[ArraySpec]]]:
        """Take the arguments and the constants; return the arguments, and all specifications by use."""
        layout = self._layout
        if len(arrays) != len(layout.inputs):
            names = ", ".join(argument.name for argument in layout.inputs)
            raise TypeError(
                f"{planner.name}: the graph takes {len(layout.inputs)} arrays ({names}), got {len(arrays)}"
            )
        arguments: list[tuple[Operand, ArraySpec]] = []
        specs: dict[str, list[ArraySpec]] = {"read": [], "update": [], "write": [], "none": []}
        for argument, operand in zip(layout.inputs, arrays, strict=True):
            if argument.use in ("update", "write"):
                spec = planner.update(argument.name, operand)  # type: ignore[arg-type]  # refused there
            else:
                spec = planner.read(argument.name, operand)
            _check_layout(planner.name, argument, spec)
            arguments.append((operand, spec))
            specs[argument.use].append(spec)
        for constant in layout.constants:
            take = planner.read if constant.use == "read" else planner.update
            specs[constant.use].append(take(f"{constant.name} in the graph", constant.ref))
        self._check_shared(planner, [spec for _, spec in arguments])
        return arguments, specs

    def _in_place(self, planned: Planned[ReplyT]) -> _InPlace[ReplyT]:
        """Cache the plan of a replay in place, because the next one is the same."""
        layout = self._layout
        taken = [
            (argument.use, argument.name, ref)
            for argument, ref in zip(layout.inputs, self._arrays, strict=True)
        ]
        taken += [
            (constant.use, f"{constant.name} in the graph", constant.ref) for constant in layout.constants
        ]
        reads = [(name, ref) for use, name, ref in taken if use in ("read", "none")]
        updates = [(name, ref) for use, name, ref in taken if use in ("update", "write")]
        return _InPlace(planned, reads, updates, tuple(self._memory.values()))

    def _check_shared(self, planner: Planner, specs: Sequence[ArraySpec]) -> None:
        """Refuse arrays that share memory if the graph changes one of them."""
        layout = self._layout
        arrays = [
            (argument.name, argument.use, spec) for argument, spec in zip(layout.inputs, specs, strict=True)
        ]
        arrays += [(constant.name, constant.use, constant.ref.spec) for constant in layout.constants]
        if len({spec.block for _, _, spec in arrays}) == len(arrays):
            return
        for number, (name, use, spec) in enumerate(arrays):
            for other_name, other_use, other_spec in arrays[:number]:
                if use in ("update", "write"):
                    planner.distinct(name, spec, **{f"{other_name} of the graph": other_spec})
                elif other_use in ("update", "write"):
                    planner.distinct(other_name, other_spec, **{f"{name} of the graph": spec})

    def _array(self, planner: Planner, block: int, nbytes: int, *, is_kept: bool) -> AccelRef:
        """Return memory that a replay writes: new, or the block of the previous replay."""
        is_kept = is_kept and not planner.is_recording
        previous_array = self._memory.get(block) if is_kept else None
        if previous_array is not None and previous_array.block.is_usable:
            return planner.reuse(previous_array)
        array = planner.output((nbytes,), DType.uint8)
        if is_kept:
            self._memory[block] = array
        return array

    def _reply_array(
        self, ref: AccelRef, arguments: dict[int, tuple[Input, Operand]], outputs: dict[int, AccelRef]
    ) -> AccelRef:
        """Return the array in a reply for an array of the step."""
        block, shift = ref.block, 0
        if block.id in outputs:
            block = outputs[block.id].block
        elif block.id in arguments:
            argument, operand = arguments[block.id]
            if not isinstance(operand, AccelRef):
                raise TypeError(
                    f"{argument.name} must be an AccelRef, because the graph returns it, "
                    f"got {type(operand).__name__}"
                )
            block, shift = operand.block, operand.spec.offset - argument.spec.offset
        else:
            return ref
        return AccelRef(block, attrs.evolve(ref.spec, block=block.id, offset=ref.spec.offset + shift))


@attrs.frozen(eq=False)
class _InPlace(Generic[ReplyT]):
    """A cached plan of a replay in place, without the check of its arrays.

    Attributes:
        planned: The launch and the reply.
        reads: The arrays that it reads, with their names.
        updates: The arrays that it changes.
        overwritten: The arrays that it overwrites in place.
    """

    planned: Planned[ReplyT]
    reads: Sequence[tuple[str, AccelRef]]
    updates: Sequence[tuple[str, AccelRef]]
    overwritten: Sequence[AccelRef]

    def is_there(self) -> bool:
        """Return whether the arrays that it overwrites still exist."""
        return all(ref.block.is_usable for ref in self.overwritten)

    def plan(self, planner: Planner) -> Planned[ReplyT]:
        """Return the same once more; raises as `Graph.plan_replay` does."""
        for name, ref in self.reads:
            planner.read(name, ref)
        for name, ref in self.updates:
            planner.update(name, ref)
        for ref in self.overwritten:
            planner.reuse(ref)
        # A list of before is the program's.
        reply = self.planned.result()
        return (
            self.planned
            if isinstance(reply, AccelRef)
            else Planned(self.planned.spec, map_refs(reply, lambda ref: ref))
        )


@attrs.define(eq=False, on_setattr=None)
class Replay(Operation[GraphsActor, ReplyT]):
    """A replay of a graph: with other arrays, or in place where none are given.

    Attributes:
        graph: The graph.
        arrays: See `Graph.__call__`; None for `Graph.replay`.
    """

    graph: Graph[ReplyT]
    arrays: Sequence[Operand] | None = None
    library: ClassVar[str] = "trio_accel.graphs:GraphsActor"

    def plan(self, planner: Planner) -> Planned[ReplyT]:
        """Check the arrays, and name the results."""
        return self.graph.plan_replay(planner, self.arrays)


name_function("graphs.Replay", "Graph.replay")


def _looked_at(reply: ReplyT) -> ReplyT:
    """Refuse a reply that holds anything but arrays which can be used."""

    def check(ref: AccelRef) -> AccelRef:
        ref.block.check(f"{_CAPTURE}: an array that the step returned")
        return ref

    return map_refs(reply, check)


def _check_arguments(device: Device, step: object, arrays: Sequence[AccelRef]) -> None:
    check_device(_CAPTURE, device)
    if not callable(step):
        raise TypeError(f"{_CAPTURE}: step must be an async function, got {type(step).__name__}")
    for number, array in enumerate(arrays):
        if not isinstance(array, AccelRef):
            raise TypeError(
                f"{_CAPTURE}: argument {number} of the step must be an AccelRef, got {type(array).__name__}"
            )
        if array.device is not device:
            raise ValueError(
                f"{_CAPTURE}: argument {number} of the step is on {array.device.path}, and the graph on "
                f"{device.path}; copy it there: await array.copy_to(device)"
            )


def _names(step: Callable[..., Any], count: int) -> Iterator[str]:
    """Yield the names of a step's arguments."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [parameter.name for parameter in parameters if parameter.kind in plain]
    for number in range(count):
        yield named[number] if number < len(named) else f"argument {number}"


def _check_layout(name: str, argument: Input, spec: ArraySpec) -> None:
    """Require the layout of the capture.

    Raises:
        TypeError: Another dtype.
        ValueError: Another shape, or other strides.
    """
    expected = argument.spec
    if spec.dtype is not expected.dtype:
        raise TypeError(
            f"{name}: {argument.name} must have dtype {expected.dtype}, as in the capture, got {spec.dtype}"
        )
    if spec.shape != expected.shape:
        raise ValueError(
            f"{name}: {argument.name} must have shape {expected.shape}, as in the capture, got {spec.shape}; "
            "capture another graph for it"
        )
    steps = zip(expected.shape, spec.strides, expected.strides, strict=True)
    if any(extent > 1 and mine != expected_stride for extent, mine, expected_stride in steps) and spec.size:
        raise ValueError(
            f"{name}: {argument.name} must have strides {expected.strides}, as in the capture, got "
            f"{spec.strides}; give a copy: await {argument.name}.copy()"
        )
