"""Faults for injection into operations."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import attrs
import trio

from ...backends.base import AccelDevice, AccelError, AccelStream, Poison, StreamPause
from ..base._bridge import LoopNotifier
from ..base._waits import Alarms

__all__ = ["Fault", "FaultHow", "FaultKind", "FaultPlan", "copy_error"]

FaultKind = Literal["fail", "delay", "hang", "poison", "segfault", "kill"]
FaultHow: TypeAlias = Literal["kernel", "writing"] | Poison


@attrs.frozen(kw_only=True)
class Fault:
    """The fault of one launch; made by `trio_accel.testing.inject_fault`.

    Attributes:
        kind: ``"fail"``: the backend raises. ``"delay"``: the operation takes longer. ``"hang"``: it never
            ends. ``"poison"``: it loses the context. ``"segfault"`` and ``"kill"``: the process with the
            context dies while it runs.
        how: For ``"poison"``, a kind of `Poison`. For ``"hang"``, None if the host holds the operation, or
            ``"kernel"`` for an endless kernel, or ``"writing"`` for one that writes to the operation's
            outputs. ``"writing"`` is also possible for ``"kill"``.
        error: The backend's error.
        seconds: The additional duration.
    """

    kind: FaultKind
    how: FaultHow | None = None
    error: Exception | None = None
    seconds: float = 0.0

    def before_enqueue(
        self, device: AccelDevice, stream: AccelStream, alarms: Alarms, holds: list[StreamPause]
    ) -> None:
        """Act before the operation is enqueued.

        Raises:
            Exception: The error of kind ``"fail"``, a new instance each time.
        """
        if self.kind == "fail" and self.error is not None:
            raise copy_error(self.error)
        if self.kind == "segfault":
            stream.crash()
        elif self.kind == "delay":
            holds.append(self._delay(stream, alarms))
        elif self.kind == "hang" and self.how != "writing":
            holds.append(device.spin(stream) if self.how == "kernel" else stream.hold())

    def after_enqueue(
        self, device: AccelDevice, stream: AccelStream, written: Sequence[int], holds: list[StreamPause]
    ) -> None:
        """Act after the work is enqueued, and before its end is.

        Args:
            device: The device.
            stream: The operation's stream.
            written: The blocks that it writes.
            holds: Collects the holds to release with the context.
        """
        if self.kind == "poison":
            how = cast("Poison | None", self.how) or "illegal_address"
            device.poison("poisoned by an injected fault", how, stream)
        elif self.how == "writing":
            reached = stream.record()
            holds.append(device.spin(stream, written[0] if written else None))
            if self.kind == "kill":
                stream.notify(reached, _Kill())

    def _delay(self, stream: AccelStream, alarms: Alarms) -> StreamPause:
        def reached() -> None:
            waker.close()
            alarms.set(id(hold), trio.current_time() + self.seconds, hold.release)

        # The time begins when the stream gets here, so delays on one stream add up.
        waker = LoopNotifier(reached)
        hold = stream.hold(waker)
        return hold

    def after(self) -> None:
        """Act after the launch."""
        if self.kind == "kill" and self.how != "writing":
            _Kill().ring()


class _Kill:
    """A waker that kills its own process."""

    def ring(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def copy_error(error: Exception) -> Exception:
    """Return a copy of an error, because an exception object must not be raised twice."""
    # Errors of devices have fields outside of their `args`.
    return attrs.evolve(error) if isinstance(error, AccelError) else copy.copy(error)


@attrs.define(eq=False)
class FaultPlan:
    """A fault that waits for its operation.

    Attributes:
        operation: The name of the operation, such as ``"linalg.Matmul"``.
        fault: The fault of each launch that it hits.
        remaining: The number of hits left.
        hit: The number of hits so far.
        is_removed: Whether it must not hit again.
        repeat: Whether it hits a request again that runs again.
    """

    operation: str
    fault: Fault
    remaining: int
    hit: int = attrs.field(default=0, init=False)
    is_removed: bool = attrs.field(default=False, init=False)
    repeat: bool = attrs.field(default=False, kw_only=True)


class FaultHit:
    """A fault assigned to one request. Made by `Faults.take`.

    Attributes:
        fault: The fault.
        is_struck: Whether it has happened, or was returned.
    """

    __slots__ = ("_faults", "_plan", "fault", "is_struck")

    def __init__(self, plan: FaultPlan, faults: Faults) -> None:
        self.fault: Fault = plan.fault
        self.is_struck: bool = False
        self._plan = plan
        self._faults = faults

    @property
    def comes_again(self) -> bool:
        """Whether it happens again if the request runs again."""
        return self._plan.repeat and not self._plan.is_removed

    def strike(self) -> None:
        """Record that the fault happens now."""
        if not self.is_struck:
            self.is_struck = True
            self._plan.hit += 1

    def give_back(self) -> None:
        """End with the request. A pending fault hits the next request."""
        if not self.is_struck:
            self.is_struck = True
            self._faults.put_back(self._plan)


class Faults:
    """The waiting faults of one device. Each is assigned to one request, in whichever context that runs.

    Attributes:
        waiting: The faults with hits left.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[FaultPlan] = []

    def __contains__(self, plan: FaultPlan) -> bool:
        return plan in self.waiting

    def add(self, plan: FaultPlan) -> None:
        """Hit the next launches of an operation."""
        self.waiting.append(plan)

    def remove(self, plan: FaultPlan) -> None:
        """Stop hitting."""
        plan.is_removed = True
        if plan in self.waiting:
            self.waiting.remove(plan)

    def take(self, operation: str) -> FaultHit | None:
        """Take a hit for an operation's next request, if a fault waits for it."""
        for plan in self.waiting:
            if plan.operation == operation:
                plan.remaining -= 1
                if not plan.remaining:
                    self.waiting.remove(plan)
                return FaultHit(plan, self)
        return None

    def put_back(self, plan: FaultPlan) -> None:
        """Return the hit of an unlaunched request."""
        plan.remaining += 1
        if not plan.is_removed and plan not in self.waiting:
            self.waiting.insert(0, plan)
