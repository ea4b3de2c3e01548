"""Hot swaps: a model is replaced while it serves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeAlias

import attrs
import outcome
import trio

from ..actors import (
    ActorContext,
    DeferredReply,
    ParkingLot,
    Reading,
    Request,
    TaskEvent,
    checked_options,
    handles,
    must_be_positive,
    named_options,
)
from ._checks import called
from ._submit import CallStatistics, ItemT, Model, ResultT, TaskSubmitActor, as_callable, count, outcome_of

__all__ = [
    "Deployment",
    "HotSwap",
    "HotSwapStatistics",
    "ModelRetiredError",
    "Opening",
    "Probe",
    "Swap",
    "SwapFailedError",
    "Swapped",
]

_logger = logging.getLogger("trio_accel.patterns")

Opening: TypeAlias = Callable[[], AbstractAsyncContextManager[Model[ItemT, ResultT]]]
"""Loads a model: the body of the ``async with`` may use it, and its end gives everything back."""
Probe: TypeAlias = Callable[[Callable[[ItemT], Awaitable[ResultT]]], Awaitable[object]]
"""Tries a model that was loaded, as an async callable; raises if it must not serve."""


class SwapFailedError(Exception):
    """The next model was not accepted; the previous one keeps serving.

    If the next model failed, its error is the `__cause__`.
    """


class ModelRetiredError(Exception):
    """The model did not answer before it had to make room for the next; it may have executed the request."""


@named_options
@attrs.define(eq=False)
class Deployment(Generic[ItemT, ResultT]):
    """The model that a `HotSwap` serves. It survives restarts of the actor, which continues with that model.

    Attributes:
        opening: Loads the model.
        version: Its name, for people.
    """

    opening: Opening[ItemT, ResultT] = attrs.field(validator=called)
    version: str = "1"


@named_options
@attrs.frozen
class Swap(Request["HotSwap[Any, Any]", "Swapped"]):
    """Ask a `HotSwap` to replace its model. The reply arrives when the old model has released its memory.

    If the caller is cancelled before the switch, nothing has changed; afterwards, the new model serves.

    Attributes:
        opening: Loads the next model.
        version: Its name.
    """

    opening: Opening[Any, Any] = attrs.field(validator=called)
    version: str


@attrs.frozen(kw_only=True)
class Swapped:
    """The reply to `Swap`.

    Attributes:
        version: The model that serves now.
        previous: The model before.
        load_time: Seconds from the request to the switch: loading, warming up, probing.
        drain_time: Seconds from the switch until the model before was closed.
    """

    version: str
    previous: str
    load_time: float
    drain_time: float


@attrs.frozen(kw_only=True)
class HotSwapStatistics(CallStatistics):
    """Counts of a `HotSwap` since its incarnation began: swaps and requests.

    Attributes:
        version: The current model.
        next: The model being loaded; None if there is none.
        previous: The model that finishes its last requests; None if there is none.
        retired: The number of requests that failed with `ModelRetiredError`.
        swaps: The number of replaced models.
        failed_swaps: The number of swaps that failed or were cancelled.
    """

    version: str
    next: str | None
    previous: str | None
    retired: int = 0
    swaps: int = 0
    failed_swaps: int = 0


class _Loaded(Generic[ItemT, ResultT]):
    """A loaded model, until its end."""

    def __init__(self, version: str, model: Callable[[ItemT], Awaitable[ResultT]]) -> None:
        self.version = version
        self.model = model
        self.calls: set[trio.CancelScope] = set()
        self.retire = TaskEvent()
        self.closed = TaskEvent()
        self._left = ParkingLot()

    async def ask(self, item: ItemT) -> ResultT:
        with trio.CancelScope() as scope:
            self.calls.add(scope)
            try:
                return await self.model(item)
            finally:
                self.calls.remove(scope)
                self._left.unpark_all()
        raise ModelRetiredError(f"model {self.version} was replaced, and did not answer in time")

    async def wait_idle(self, seconds: float) -> None:
        """Wait until it works on nothing, for at most this time."""
        with trio.move_on_after(seconds):
            while self.calls:
                await self._left.park()

    def cancel_calls(self) -> None:
        for scope in self.calls:
            scope.cancel(reason="the model was replaced")


class HotSwap(TaskSubmitActor[ItemT, ResultT]):
    """An actor for `Submit` that replaces its model without losing a request.

    `Swap` loads the next model while the old one serves, sends it the items of `warm_up`, and tries it with
    `probe`. If any of that fails, or the caller of `Swap` is cancelled, the next model is closed again, and
    the old one keeps serving. Otherwise the next model serves all requests from the switch on. The old one
    finishes its requests, and is closed. So one model serves each request, and a later request never gets an
    older model than an earlier one.

    At most two models are loaded. A second swap is refused during a swap, or while the old model is not yet
    closed. An old model that does not finish within `drain_for` seconds is closed anyway: its requests are
    cancelled, and fail with `ModelRetiredError`.

    When the actor restarts, the model of the `Deployment` is loaded, warmed up and probed again, and requests
    in the mailbox wait for it. It is the model of the last successful swap. A swap in progress fails.

    Args:
        deployment: The first model.
        warm_up: Items that a model gets before it serves, one after the other. Its results are not used.
        probe: An async function of the model, as a callable, that raises if the model must not serve.
        drain_for: The seconds that an old model has for its last requests.

    Raises:
        TypeError: `deployment` is not a `Deployment`, or `probe` is not a function.
        ValueError: `drain_for` is not above 0.
        Exception: The error of loading, warming up or probing the first model.
    """

    @checked_options
    def __init__(
        self,
        deployment: Deployment[ItemT, ResultT],
        *,
        warm_up: Sequence[ItemT] = (),
        probe: Probe[ItemT, ResultT] | None = None,
        drain_for: float = 30.0,
    ) -> None:
        if not isinstance(deployment, Deployment):
            raise TypeError(
                "HotSwap: deployment must be Deployment(opening), of a function that opens the model, "
                f"got {deployment!r}"
            )
        if probe is not None and not callable(probe):
            raise TypeError(f"probe must be an async function of the model, got {probe!r}")
        self._deployment = deployment
        self._warm_up = tuple(warm_up)
        self._probe = probe
        self._drain_for = must_be_positive("drain_for", drain_for)
        self._current: _Loaded[ItemT, ResultT]
        self._previous: _Loaded[ItemT, ResultT] | None = None
        self._next: str | None = None
        self._is_over = False

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the models."""
        async with super().lifespan(context):
            self._current = await self._load(self._deployment.opening, self._deployment.version)
            yield
            self._is_over = True
            for loaded in (self._previous, self._current):
                if loaded is not None:
                    loaded.cancel_calls()
                    loaded.retire.set()
                    await loaded.closed.wait()

    async def answer(self, item: ItemT) -> ResultT:
        """Have the current model serve an item."""
        # The incarnation may have ended before the call began, and the model be closed.
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            return await self._current.ask(item)
        except ModelRetiredError:
            if self._is_over:
                # The actor ends and cancels this task, so its caller gets the actor's error instead.
                await trio.sleep_forever()  # noqa: ASYNC120
            self._tally["retired"] += 1
            raise

    @handles(Swap)
    async def _swap(self, message: Swap) -> Swapped | DeferredReply[Swapped]:
        # A swap is not a call, so its reply has another type.
        start: Callable[[Callable[[], Awaitable[Swapped]]], DeferredReply[Swapped]] = self.start  # type: ignore[assignment]
        reply = start(partial(self._replace, message.opening, message.version))
        await trio.lowlevel.checkpoint()
        return reply

    async def _replace(self, opening: Opening[ItemT, ResultT], version: str) -> Swapped:
        """Load the next model, and make it the current one."""
        if self._next is not None:
            raise SwapFailedError(f"{version} was not loaded: {self._next} is being loaded")
        if self._previous is not None:
            reason = f"{self._previous.version} has {len(self._previous.calls)} requests left"
            raise SwapFailedError(f"{version} was not loaded: {reason} and is not closed yet")
        begun = trio.current_time()
        self._next = version
        try:
            loaded = await self._load_next(opening, version)
        except BaseException:
            self._tally["failed_swaps"] += 1
            raise
        finally:
            self._next = None
        old = self._previous = self._current
        # There is no checkpoint in between, so the next model serves all requests from here on.
        self._current = loaded
        self._deployment.opening, self._deployment.version = opening, version
        self._tally["swaps"] += 1
        switched = trio.current_time()
        old.retire.set()
        await old.closed.wait()
        return Swapped(
            version=version,
            previous=old.version,
            load_time=switched - begun,
            drain_time=trio.current_time() - switched,
        )

    async def _load_next(self, opening: Opening[ItemT, ResultT], version: str) -> _Loaded[ItemT, ResultT]:
        """Load the model of a swap.

        Raises:
            SwapFailedError: Its context, the warm-up or the probe failed, also over a cancellation.
        """
        # `withdraw` finds the operation by this while the thread is at work.
        loaded = await outcome_of(self._load(opening, version))
        if isinstance(loaded, outcome.Value):
            return loaded.value
        reason = f"{version} was not taken, and {self._current.version} serves on"
        raise SwapFailedError(f"{reason}: {loaded.error!r}") from loaded.error

    async def _load(self, opening: Opening[ItemT, ResultT], version: str) -> _Loaded[ItemT, ResultT]:
        """Load a model, and return it when it may serve; from then on a separate task holds it."""
        box: list[_Loaded[ItemT, ResultT]] = []
        try:
            await self._nursery.start(self._hold, opening, version, box)
        except BaseException:
            # The cancellation may follow `started()`: then the model is loaded, and must be closed.
            for loaded in box:
                loaded.retire.set()
            raise
        return box[0]

    async def _hold(
        self,
        opening: Opening[ItemT, ResultT],
        version: str,
        box: list[_Loaded[ItemT, ResultT]],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Load a model, hold it until it is retired and idle, and close it."""
        loaded: _Loaded[ItemT, ResultT] | None = None
        try:
            async with opening() as model:
                loaded = _Loaded(version, as_callable(model))
                for item in self._warm_up:
                    await loaded.model(item)
                if self._probe is not None:
                    await self._probe(loaded.model)
                box.append(loaded)
                task_status.started()
                await loaded.retire.wait()
                await loaded.wait_idle(self._drain_for)
                loaded.cancel_calls()
                await loaded.wait_idle(self._drain_for)
            if not loaded.retire.is_set():
                reason = f"the context of model {version} ended by itself, and closed the model"
                raise RuntimeError(reason)  # noqa: TRY301  # as if the context had raised it
        except Exception:
            if loaded is None or not loaded.retire.is_set():
                raise
            # Only log the failure, because no request needs the old model any longer.
            _logger.exception("%s: closing the old model %s failed", self.context.path, version)
        finally:
            if loaded is not None:
                loaded.closed.set()
                if self._previous is loaded:
                    self._previous = None

    def readings(self) -> Iterator[Reading]:
        """Yield the counts for metrics, including swaps."""
        yield from super().readings()
        for ending, name in (("swapped", "swaps"), ("failed", "failed_swaps")):
            text = "Swaps of a model by what became of them."
            yield count("model_swaps", text, self._tally[name], outcome=ending)

    def statistics(self) -> HotSwapStatistics:
        """Return the counts."""
        return HotSwapStatistics(
            version=self._current.version,
            next=self._next,
            previous=None if self._previous is None else self._previous.version,
            **self._tally,
        )
