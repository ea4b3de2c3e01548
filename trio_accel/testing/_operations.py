"""Operations under control of the test: with faults, and with completions that are noticed later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

import attrs
import trio

from ..actors import is_number
from ..backends.base import AccelEvent, AccelStream, operation_of
from ..devices import (
    CompletionPort,
    Device,
    Fault,
    FaultHow,
    FaultKind,
    FaultPlan,
    Operation,
    copy_error,
    opened,
    operation_name,
)
from ..devices.base._bridge import LoopNotifier
from ..devices.engine._completer import Completer

__all__ = ["FaultInjection", "ManualCompletion", "inject_fault", "poison"]

_HOWS: dict[str, tuple[str, ...]] = {
    "hang": ("kernel", "writing"),
    "poison": ("illegal_address", "trap", "assert"),
    "kill": ("writing",),
}


@attrs.frozen(eq=False)
class FaultInjection:
    """A fault that waits for its operation. Made by `inject_fault`; ``remove()`` takes it away.

    Attributes:
        device: Whose operations it hits.
    """

    device: Device = attrs.field(repr=False)
    _plan: FaultPlan

    @property
    def operation(self) -> str:
        """Name of the operation it hits, such as ``"linalg.Matmul"``."""
        return self._plan.operation

    @property
    def remaining(self) -> int:
        """The number of requests that it still hits; requests on their way to the device do not count."""
        return self._plan.remaining if self._plan in opened(self.device).state.faults else 0

    @property
    def hit(self) -> int:
        """The number of launches that it has hit."""
        return self._plan.hit

    def remove(self) -> None:
        """Inject no more, not even to a request that runs again."""
        opened(self.device).state.faults.remove(self._plan)


def poison(device: Device, reason: str = "poisoned by a test") -> None:
    """Make the device's context unusable, as a fault on the hardware would, while it works.

    Operations in flight end with `ContextPoisonedError`, and the context is replaced. If there is none, the
    next operation notices the fault, and ends with that error. In a worker process of an accelerator it is a
    real fault: operations that complete before the driver notices it are complete.

    Raises:
        DeviceLostError: The device lacks a context now.
    """
    opened(device).dispatch.poison(reason)


def inject_fault(
    device: Device,
    operation: Callable[..., Operation[Any, Any]] | str,
    *,
    fail: Exception | None = None,
    delay: float | None = None,
    hang: bool = False,
    poison: bool = False,
    segfault: bool = False,
    kill: bool = False,
    how: FaultHow | None = None,
    count: int = 1,
    repeat: bool = False,
) -> FaultInjection:
    """Make something happen to the next requests for an operation. Pass exactly one of the faults.

    Each fault belongs to one request, asked or submitted, in whichever context it is launched; if the request
    is cancelled before its launch, the next one gets the fault. Faults for the same operation are used in the
    order in which they were injected. ``segfault`` and ``kill`` hit the process with the context: with
    ``isolation="inline"`` this is the program itself.

    Args:
        device: The device with the operations to hit.
        operation: A message class, such as `trio_accel.linalg.Matmul`, or the name of the operation, such as
            ``"jit.saxpy"`` for launches of that kernel. In an operation of a world, the part of this device
            is hit.
        fail: The launch fails as if the backend had raised this error; each launch raises a copy. The effect
            depends on the error's class: if the error table does not know it, the library counts as suspect,
            so its actor crashes and is restarted.
        delay: The operation takes this number of seconds longer, and later work on its stream waits. A kernel
            of your own that CUDA loads at its first launch also waits for the stream, and blocks the loop of
            the device meanwhile: launch it once before.
        hang: The operation never ends, until its context does: by `stuck_after` of `DeviceOptions`, by
            `poison`, or with the device.
        poison: The operation loses the context.
        segfault: The process dies of a native fault when the device reaches the operation.
        kill: The process is killed when the operation has been launched.
        how: The variant of the fault. ``poison``: ``"illegal_address"`` (the default), ``"trap"``,
            ``"assert"``, as kernels do it on an accelerator; on the CPU they are the same. ``hang``: by
            default the host holds the stream back; ``"kernel"``: a kernel does not end; ``"writing"``: a
            kernel writes to the operation's outputs again and again. ``kill``: with ``"writing"``, while such
            a kernel runs.
        count: The number of requests to hit.
        repeat: Whether a request that runs again (`retry` of `DeviceOptions`) is hit again, like a bad
            request.

    Raises:
        ValueError: Not exactly one fault, a count below 1, an invalid delay, or a `how` that the fault lacks.
        TypeError: `operation` is not a message class, or `fail` is not an error or cannot be copied.
    """
    name = _name_of(operation)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"inject_fault: count must be an integer of at least 1, got {count!r}")
    marked = {"hang": hang, "poison": poison, "segfault": segfault, "kill": kill}
    faults = [name for name, is_given in marked.items() if is_given]
    faults += [name for name, value in (("fail", fail), ("delay", delay)) if value is not None]
    if len(faults) != 1:
        raise ValueError(
            "inject_fault: give exactly one of fail, delay, hang, poison, segfault and kill, got "
            f"{' and '.join(faults) or 'none'}"
        )
    (kind,) = faults
    hows = _HOWS.get(kind, ())
    if how is not None and how not in hows:
        raise ValueError(
            f"inject_fault: how must be {' or '.join(map(repr, hows)) or 'left out'} with {kind}, got {how!r}"
        )
    if fail is not None:
        _check_copies(fail)
    seconds = 0.0 if delay is None else delay
    if not is_number(seconds, 0.0, sys.float_info.max):
        raise ValueError(f"inject_fault: delay must be seconds of at least 0, got {delay!r}")
    fault = Fault(kind=cast("FaultKind", kind), how=how, error=fail, seconds=seconds)
    plan = FaultPlan(name, fault, count, repeat=repeat)
    opened(device).state.faults.add(plan)
    return FaultInjection(device, plan)


def _name_of(operation: object) -> str:
    # Events name an operation with its capability, and errors name its function.
    if isinstance(operation, str) and "." in operation:
        return operation_of(operation)
    if not (isinstance(operation, type) and issubclass(operation, Operation)):
        raise TypeError(
            "inject_fault: operation must be a message class such as linalg.Matmul, or a name such as "
            f"'jit.saxpy', got {operation!r}"
        )
    return operation_name(cast("type[object]", operation))


def _check_copies(error: Exception) -> None:
    if not isinstance(error, Exception):
        raise TypeError(f"inject_fault: fail must be an exception, got {error!r}")
    try:
        copy_error(error)
    except Exception as failure:
        raise TypeError(
            f"inject_fault: fail must be an exception that can be copied, got {error!r}"
        ) from failure


class ManualCompletion:
    """A completion strategy that holds operations in flight until the test releases them.

    For ``DeviceOptions(isolation="inline", completion=...)``: the device computes as always, but the
    program does not learn of it. So a test can look at its own cancellation, back-pressure and time
    limits while operations run for exactly as long as it wants. Held operations count as running: for
    `stuck_after`, for the window of `in_flight`, for a lease, for `Device.synchronize` and for the end
    of the device, which waits for `close_grace` seconds at most. A lost context ends held operations, as it
    ends everything in flight.

    One object may serve several devices; they are held together.

    Args:
        is_holding: Whether it holds from the start, also the copies of `Device.put`; else from `hold` on.
    """

    def __init__(self, *, is_holding: bool = True) -> None:
        self._is_holding = is_holding
        self._held: list[_HeldEvent] = []
        self._changed = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<ManualCompletion, {len(self._held)} held>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the test moves it by hand, in its own process")

    @property
    def held(self) -> int:
        """The number of held operations."""
        return len(self._held)

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the held operations, such as ``"linalg.Matmul"``, in launch order."""
        return tuple(event.operation for event in self._held)

    async def wait_held(self, count: int = 1) -> None:
        """Wait until at least `count` operations are held.

        An operation that fails at its launch is never held. If that is possible, use a timeout.
        """
        await trio.lowlevel.checkpoint()
        while len(self._held) < count:
            await self._changed.park()

    def release(self, count: int = 1) -> None:
        """Release the operations that were launched first. Each is noticed soon after the device finishes it.

        Raises:
            ValueError: `count` exceeds the number of held operations, or is not a count.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= len(self._held):
            raise ValueError(f"release: count must be from 0 to the {len(self._held)} held, got {count!r}")
        going, self._held = self._held[:count], self._held[count:]
        for event in going:
            event.let_go()

    def release_all(self) -> None:
        """Release all held operations; later ones are held again."""
        self.release(len(self._held))

    def hold(self) -> None:
        """Hold operations from now on."""
        self._is_holding = True

    def pass_all(self) -> None:
        """Release all held operations, and hold no more until `hold`."""
        self._is_holding = False
        self.release_all()

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Raises:
            TypeError: `reap` does not belong to an engine.
        """
        completer = getattr(reap, "__self__", None)
        if not isinstance(completer, Completer):
            raise TypeError(f"ManualCompletion: it holds the operations of an engine, not of {reap!r}")
        return _ManualPort(completer, LoopNotifier(reap), self._take, self._forget)

    def _take(self, event: _HeldEvent) -> None:
        if not self._is_holding:
            event.let_go()
            return
        self._held.append(event)
        self._changed.unpark_all()

    def _forget(self, port: _ManualPort) -> None:
        """Hold nothing more for an ended engine."""
        self._held = [event for event in self._held if event.port is not port]


@attrs.define(eq=False)
class _ManualPort(CompletionPort):
    _completer: Completer
    notifier: LoopNotifier
    _take: Callable[[_HeldEvent], None]
    _forget: Callable[[_ManualPort], None]

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # The engine takes everything that is done when it looks, so exchange the events that it looks at.
        for queue in self._completer.queues.all:
            for operation in queue.operations:
                if operation.event is event:
                    held = _HeldEvent(self, stream, event, operation.launch.name)
                    operation.event = held
                    self._take(held)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._forget(self)
        self.notifier.close()


@attrs.define(eq=False)
class _HeldEvent:
    """An event that is not done before its release, whatever the device reports."""

    port: _ManualPort
    _stream: AccelStream
    _event: AccelEvent
    operation: str
    _is_held: bool = attrs.field(default=True, init=False)

    @property
    def is_done(self) -> bool:
        return not self._is_held and self._event.is_done

    @property
    def error(self) -> Exception | None:
        return self._event.error

    def let_go(self) -> None:
        self._is_held = False
        self._stream.notify(self._event, self.port.notifier)
