"""Options of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ..actors import Backoff, Intensity
from ..backends.base import Isolation
from ._completion import CompletionStrategy, HostCallbackCompletion

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceOptions"]


def _positive(instance: DeviceOptions, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"DeviceOptions: {attribute.name} must be a whole number of at least 1, got {value!r}"
        )


def _seconds(instance: DeviceOptions, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"DeviceOptions: {attribute.name} must be seconds of at least 0, got {value!r}")


def _isolation(
    instance: DeviceOptions, attribute: attrs.Attribute[Isolation | None], value: Isolation | None
) -> None:
    if value not in (None, "process", "inline"):
        raise ValueError(f"DeviceOptions: isolation must be 'process', 'inline' or None, got {value!r}")


def _a(cls: type[object]) -> Callable[[DeviceOptions, attrs.Attribute[object], object], None]:
    def check(instance: DeviceOptions, attribute: attrs.Attribute[object], value: object) -> None:
        if not isinstance(value, cls):
            article = "an" if cls.__name__[0] in "AEIO" else "a"
            raise TypeError(
                f"DeviceOptions: {attribute.name} must be {article} {cls.__name__}, got {value!r}"
            )

    return check


def _strategy(instance: DeviceOptions, attribute: attrs.Attribute[object], value: object) -> None:
    if not callable(getattr(value, "open", None)):
        raise TypeError(
            f"DeviceOptions: completion must be a completion strategy such as HostCallbackCompletion(), "
            f"got {value!r}"
        )


@attrs.frozen(kw_only=True)
class DeviceOptions:
    """How a device is opened and supervised.

    Attributes:
        isolation: Where the context lives: ``"inline"``, in this process; ``"process"``, in a worker.
            None takes the backend's default.
        completion: How completions are learned of.
        in_flight: The most launches that a library has on its stream; senders of more wait.
        intensity: Restarts that the device allows its context, and the context its libraries.
        backoff: Waiting before a context or library is started again.
        cancel_grace: Seconds that a cancelled asker waits for its running operation. Past it the
            asker gets its cancellation, and the buffers stay reserved until the device is done.
        memory_limit: The most bytes that arrays on the device may take; None for what there is.
    """

    isolation: Isolation | None = attrs.field(default=None, validator=_isolation)
    completion: CompletionStrategy = attrs.field(factory=HostCallbackCompletion, validator=_strategy)
    in_flight: int = attrs.field(default=32, validator=_positive)
    intensity: Intensity = attrs.field(default=Intensity(3, 60.0), validator=_a(Intensity))
    backoff: Backoff = attrs.field(factory=Backoff, validator=_a(Backoff))
    cancel_grace: float = attrs.field(default=5.0, validator=_seconds)
    memory_limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
