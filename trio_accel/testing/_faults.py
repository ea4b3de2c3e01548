"""Faults on purpose, by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs

from ..devices import (
    Device,
    Fault,
    FaultHow,
    FaultKind,
    FaultPlan,
    MultiDeviceOperation,
    Operation,
    operation_name,
)
from ..devices import anew as _anew
from ..devices.front._device import opened

__all__ = ["FaultInjection", "inject_fault", "poison"]

_MARKS = ("hang", "poison", "segfault", "kill")
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
        """How many more requests it hits; requests on their way to the device do not count."""
        return self._plan.remaining if self._plan in opened(self.device).state.faults else 0

    @property
    def hit(self) -> int:
        """How many launches it has hit."""
        return self._plan.hit

    def remove(self) -> None:
        """Inject no more."""
        opened(self.device).state.faults.remove(self._plan)


def poison(device: Device, reason: str = "poisoned by a test") -> None:
    """Make the device's context unusable, as a fault on the hardware would, while it works.

    Operations in flight end with `ContextPoisonedError`, and the context is replaced. If there is none, the
    next operation finds out, and ends so. In a worker process of an accelerator it is a real fault:
    operations that complete before the driver has noticed are complete.

    Raises:
        DeviceLostError: The device has no context now.
    """
    opened(device).dispatch.poison(reason)


def inject_fault(
    device: Device,
    operation: Callable[..., Operation[Any, Any] | MultiDeviceOperation[Any]] | str,
    *,
    fail: Exception | None = None,
    delay: float | None = None,
    hang: bool = False,
    poison: bool = False,
    segfault: bool = False,
    kill: bool = False,
    how: FaultHow | None = None,
    count: int = 1,
    again: bool = False,
) -> FaultInjection:
    """Make something happen to the next requests for an operation. Exactly one of the faults is given.

    Each fault goes with one request, on whichever context that is launched, asked or submitted; a request
    that is cancelled before its launch gives it back for the next. Faults for the same operation are used
    in the order in which they were injected. ``segfault`` and ``kill`` hit the process that has the context:
    with ``isolation="inline"`` that is the program itself.

    Args:
        device: Device whose operations are hit.
        operation: Message class, such as `trio_accel.linalg.Matmul`, or the name of the operation, such as
            ``"jit.saxpy"`` for launches of that kernel. Of an operation that spans devices, the part of this
            device is hit.
        fail: The launch fails as if the backend had raised this; each launch raises a copy of its own.
            The effect depends on the error's class: one that the error table does not know makes
            the library suspect, so that its actor crashes and is restarted.
        delay: The operation takes so many seconds longer, and later work on its stream waits.
        hang: The operation never ends, until its context does: by `stuck_after` of `DeviceOptions`, by
            `poison`, or with the device.
        poison: The operation loses the context.
        segfault: The process dies of a native fault when the device comes to the operation.
        kill: The process is killed when the operation has been launched.
        how: Which one, where there are several. ``poison``: ``"illegal_address"`` (the default),
            ``"trap"``, ``"assert"``, as kernels do it on an accelerator; on the CPU they are the same.
            ``hang``: the host holds the stream back by default, a ``"kernel"`` that does not end, or one
            that is ``"writing"`` to the operation's outputs, again and again. ``kill``: with
            ``"writing"``, while such a kernel runs.
        count: How many requests are hit.
        again: A request that runs again (`retry` of `DeviceOptions`) is hit again, as one that is bad is.

    Raises:
        ValueError: Not exactly one fault, a count below 1, a delay that is no time, or a `how` that
            the fault does not have.
        TypeError: An operation that is no message class, or `fail` is no error or cannot be copied.
    """
    name = _name_of(operation)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"inject_fault: count must be a whole number of at least 1, got {count!r}")
    marked = dict(zip(_MARKS, (hang, poison, segfault, kill), strict=True))
    given = [name for name, is_given in marked.items() if is_given]
    given += [name for name, value in (("fail", fail), ("delay", delay)) if value is not None]
    if len(given) != 1:
        raise ValueError(
            "inject_fault: give exactly one of fail, delay, hang, poison, segfault and kill, got "
            f"{' and '.join(given) or 'none'}"
        )
    (kind,) = given
    hows = _HOWS.get(kind, ())
    if how is not None and how not in hows:
        raise ValueError(
            f"inject_fault: how must be {' or '.join(map(repr, hows)) or 'left out'} with {kind}, got {how!r}"
        )
    if fail is not None:
        _check_copies(fail)
    seconds = 0.0 if delay is None else delay
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise ValueError(f"inject_fault: delay must be seconds of at least 0, got {delay!r}")
    fault = Fault(kind=cast("FaultKind", kind), how=how, error=fail, seconds=seconds)
    plan = FaultPlan(name, fault, count, again=again)
    opened(device).state.faults.add(plan)
    return FaultInjection(device, plan)


def _name_of(operation: object) -> str:
    # With its capability, as errors and events name it.
    if isinstance(operation, str) and "." in operation:
        return operation
    if not (isinstance(operation, type) and issubclass(operation, (Operation, MultiDeviceOperation))):
        raise TypeError(
            "inject_fault: operation must be a message class such as linalg.Matmul, or a name such as "
            f"'jit.saxpy', got {operation!r}"
        )
    return operation_name(cast("type[object]", operation))


def _check_copies(error: Exception) -> None:
    if not isinstance(error, Exception):
        raise TypeError(f"inject_fault: fail must be an exception, got {error!r}")
    try:
        _anew(error)
    except Exception as failure:
        raise TypeError(
            f"inject_fault: fail must be an exception that can be copied, got {error!r}"
        ) from failure
