"""One part of an operation that spans devices, as the library actor of its device launches it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress

from ...actors import ActorContext, DeferredReply
from ...backends.base import InThread, KernelLibrary, NotSupportedError
from ._completer import Completer
from ._enqueuer import Enqueuer
from ._lane import Lane
from ._launch_gate import LaunchGate
from ._meeting import PartInFlight, PartLaunch

__all__ = ["Part", "check_part"]


class Part:
    """Launches a part, in the steps in which all parts of an operation are launched.

    Attributes:
        failure: What its preparation has failed with.
        reply: The reply to its asker, set before it comes to the meeting.
    """

    __slots__ = (
        "_completer",
        "_context",
        "_enqueuer",
        "_gate",
        "_in_flight",
        "_kernels",
        "_lane",
        "_launch",
        "_steps",
        "failure",
        "reply",
    )

    def __init__(
        self,
        launch: PartLaunch,
        kernels: KernelLibrary,
        lane: Lane,
        context: ActorContext,
        gate: LaunchGate,
        enqueuer: Enqueuer,
        completer: Completer,
    ) -> None:
        self._launch = launch
        self._kernels = kernels
        self._lane = lane
        self._context = context
        self._gate = gate
        self._enqueuer = enqueuer
        self._completer = completer
        self._steps: Generator[None, None, PartInFlight] | None = None
        self._in_flight: PartInFlight | None = None
        self.failure: Exception | None = None
        self.reply: DeferredReply[None] | None = None

    @property
    def is_launched(self) -> bool:
        """Whether the backend has it, or had it."""
        return self._in_flight is not None

    def begin(self) -> None:
        """Allocate, have operands copied, and have the stream wait for what goes before."""
        self._steps = self._enqueuer.enqueue_part(self._launch, self._kernels, self._lane, self.failure)
        next(self._steps)

    def enter(self) -> None:
        """Hold the stream back until all have come."""
        assert self._steps is not None  # it has begun
        next(self._steps)

    def enqueue(self) -> None:
        """Enqueue the kernel."""
        assert self._steps is not None  # it has begun
        next(self._steps)

    def leave(self) -> tuple[PartInFlight, Lane]:
        """Hold the stream back until all kernels are done; returns what was enqueued, and where."""
        assert self._steps is not None  # it has begun
        try:
            next(self._steps)
        except StopIteration as end:
            operation: PartInFlight = end.value
        else:
            raise AssertionError("the launch of a part has four steps")
        self._gate.leave(self._launch)
        operation.crash, operation.reply = self._context.crash, self.reply
        self._in_flight = operation
        return operation, self._lane

    def abandon(self, error: Exception) -> None:
        """Clean up: it is not launched, for this reason. Does nothing before `begin`."""
        if self._steps is not None:
            with suppress(type(error)):
                self._steps.throw(error)

    def watch(self) -> None:
        """Have the end of what was enqueued seen."""
        if self._in_flight is not None:
            self._completer.port.watch(self._lane.stream, self._in_flight.event)


def check_part(launch: PartLaunch, kernels: KernelLibrary) -> Callable[[], None] | None:
    """Refuse a part that its library does not have.

    Returns:
        What is to be done before it is launched; see `KernelLibrary.prepare`.

    Raises:
        NotSupportedError: It has no kernel for it, or one that blocks: the others would wait for that.
    """
    if launch.spec.operation not in kernels.operations:
        raise NotSupportedError(f"library {kernels.name!r} has no {type(launch.spec).__name__}")
    prepare = kernels.prepare(launch.spec)
    if isinstance(prepare, InThread):
        raise NotSupportedError(
            f"library {kernels.name!r} has a kernel for {type(launch.spec).__name__} that blocks, and so "
            "runs no part of an operation that spans devices"
        )
    return prepare
