"""How long a cancelled asker waits for its running operation."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar

__all__ = ["cancel_grace", "grace_in"]

_GRACE: ContextVar[float] = ContextVar("trio_accel.cancel_grace")


@contextmanager
def cancel_grace(seconds: float) -> Generator[None, None, None]:
    """Choose how long a cancelled asker waits, for the operations that are asked for in the body.

    It goes before ``DeviceOptions(cancel_grace=...)``, for every device. Tasks that are started in the
    body inherit it. It is looked up when an asker is cancelled, and at no other time.

    >>> import trio_accel
    >>> with trio_accel.cancel_grace(5.0):
    ...     pass  # await trio_accel.linalg.matmul(a, b)

    Args:
        seconds: At least 0. ``math.inf`` waits until the operation has ended, as
            `trio.to_thread.run_sync` does.

    Raises:
        ValueError: No number of seconds.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"cancel_grace: seconds must be a number of at least 0, got {seconds!r}")
    token = _GRACE.set(seconds)
    try:
        yield
    finally:
        _GRACE.reset(token)


def grace_in(context: Context, default: float) -> float:
    """The seconds that were chosen in the context of an asker, or the default."""
    return context.get(_GRACE, default)
