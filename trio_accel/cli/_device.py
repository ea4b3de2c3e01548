"""How a command opens the device that its options name."""

from __future__ import annotations

from typing import Literal, TypeAlias

import trio_accel as ta
from trio_accel.cli._errors import InputError

__all__ = ["Isolation", "isolation_of", "open_device"]

Isolation: TypeAlias = Literal["inline", "process"]

# After Ctrl-C an operation that still runs is waited for so long.
_CLOSE_GRACE = 0.2
# The demo loses contexts and actors on purpose; a device that does so all the time would be given up.
_INTENSITY = ta.Intensity(100, 60.0)
# It tells how soon the next one serves, and not how long a supervisor waits after several in a row.
_BACKOFF = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)


async def open_device(
    system: ta.System,
    backend: str | None,
    isolation: Isolation | None,
    *,
    preferred: Isolation | None = None,
    stuck_after: float | None = None,
) -> ta.Device:
    """Open a device.

    Args:
        system: Where.
        backend: Its name, ``None`` for the best one.
        isolation: Where its context lives, ``None`` for what is preferred.
        preferred: Where it lives if the device has that; ``None`` for the backend's default.
        stuck_after: Seconds after which an operation counts as hung, ``None`` for never.

    Raises:
        InputError: There is no such device, or it does not have the isolation.
    """
    options = ta.DeviceOptions(
        isolation=isolation or preferred,
        close_grace=_CLOSE_GRACE,
        intensity=_INTENSITY,
        backoff=_BACKOFF,
        stuck_after=stuck_after,
    )
    try:
        return await system.open_device(backend, options=options)
    except ta.NotSupportedError as error:
        if isolation is not None or preferred is None:
            raise _unusable(error) from error
    except ValueError as error:
        raise _unusable(error) from error
    return await open_device(system, backend, None, stuck_after=stuck_after)


def _unusable(error: Exception) -> InputError:
    return InputError(f"cannot open a device: {str(error).removeprefix('spec: ')}")


def isolation_of(device: ta.Device) -> Isolation:
    """Where the context of a device lives."""
    return device.options.isolation or device.info.isolations[0]
