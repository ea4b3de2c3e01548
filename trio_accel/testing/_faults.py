"""Faults on purpose, by operation."""

from __future__ import annotations

import copy
from typing import Any

import attrs

from ..backends.base import AccelError
from ..devices import Device, Launch, Operation, Phase, operation_name

__all__ = ["FaultInjection", "inject_fault", "poison"]


@attrs.define(eq=False)
class FaultInjection:
    """A fault that waits for its operation. Made by `inject_fault`; ``remove()`` takes it away.

    Attributes:
        operation: Name of the operation it hits, such as ``"linalg.Matmul"``.
        remaining: How many more it hits.
        hit: How many it has hit.
        error: What the launches fail with.
        device: Whose operations it hits.
    """

    operation: str
    remaining: int
    hit: int = attrs.field(default=0, init=False)
    error: Exception = attrs.field(kw_only=True)
    device: Device = attrs.field(kw_only=True, repr=False)

    def remove(self) -> None:
        """Inject no more."""
        if self in self.device.hooks:
            self.device.hooks.remove(self)

    def __call__(self, phase: Phase, launch: Launch, /) -> None:
        """Fail the launch, as an engine hook."""
        if phase is not Phase.ENQUEUE or launch.name != self.operation or not self.remaining:
            return
        self.remaining -= 1
        self.hit += 1
        if not self.remaining:
            self.remove()
        # A new instance each time: an exception object must not be raised twice.
        raise _anew(self.error)


def poison(device: Device, reason: str = "poisoned by a test") -> None:
    """Make the device's context unusable, as a fault on the hardware would, while it works.

    What is in flight ends with `ContextPoisonedError`, and the context is replaced.

    Raises:
        DeviceLostError: The device has no context now.
    """
    device.engine().device.poison(reason)


def inject_fault(
    device: Device, operation: type[Operation[Any, Any]], *, fail: Exception, count: int = 1
) -> FaultInjection:
    """Make the next launches of an operation fail, as if the backend had raised an error.

    What happens then follows the error's class: one that the error table does not know makes
    the library suspect, so that its actor crashes and is restarted.

    Args:
        device: Device whose operations are hit.
        operation: Message class, such as `trio_accel.linalg.Matmul`.
        fail: What they fail with; each launch raises a copy of its own.
        count: How many launches fail.

    Raises:
        ValueError: A count below 1.
        TypeError: An operation that is no message class, or an error that is none or cannot be copied.
    """
    if not (isinstance(operation, type) and issubclass(operation, Operation)):
        raise TypeError(
            f"inject_fault: operation must be a message class such as linalg.Matmul, got {operation!r}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"inject_fault: count must be a whole number of at least 1, got {count!r}")
    if not isinstance(fail, Exception):
        raise TypeError(f"inject_fault: fail must be an exception, got {fail!r}")
    try:
        _anew(fail)
    except Exception as error:
        raise TypeError(
            f"inject_fault: fail must be an exception that can be copied, got {fail!r}"
        ) from error
    fault = FaultInjection(operation_name(operation), count, error=fail, device=device)
    device.hooks.append(fault)
    return fault


def _anew(error: Exception) -> Exception:
    # Errors of devices have fields that their `args` do not tell.
    return attrs.evolve(error) if isinstance(error, AccelError) else copy.copy(error)
