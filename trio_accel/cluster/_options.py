"""Options of a cluster."""

from __future__ import annotations

import attrs

from ..actors import Backoff, Intensity, is_number, must_be_whole, named_options, validator
from ..devices import DeviceOptions

__all__ = ["ClusterOptions"]


_seconds = validator("be seconds above 0", lambda value: is_number(value, 1e-3, 1e9))


@named_options
@attrs.frozen(kw_only=True)
class ClusterOptions:
    """Options of a cluster.

    Attributes:
        devices: The names of the devices that each agent opens; by default all GPUs of its node that
            `open_device()` could take, or ``"cpu"``.
        device: The options of these devices.
        window: The maximum number of requests of one process that wait for replies of one node; further
            callers wait in their own tasks.
        heartbeat_timeout: Seconds without a sign of life after which an agent is ended, and its entities move
            to other homes. An agent that hears nothing for two thirds of that time ends its entities on its
            own.
        hand_off: Seconds that a node may take to end the entities that leave it; then its agent is ended.
        idle_after: Seconds without a message after which an entity ends; None for never.
        intensity: The number of agents that may fail within its time, before the cluster fails.
        backoff: The wait before an agent is started again.
    """

    devices: tuple[str, ...] | None = None
    device: DeviceOptions = attrs.field(factory=lambda: DeviceOptions(isolation="process"))
    window: int = attrs.field(default=64, validator=must_be_whole(1))
    heartbeat_timeout: float = attrs.field(default=15.0, validator=_seconds)
    hand_off: float = attrs.field(default=30.0, validator=_seconds)
    idle_after: float | None = attrs.field(default=None, validator=attrs.validators.optional(_seconds))
    intensity: Intensity = attrs.field(factory=lambda: Intensity(100, 60.0))
    backoff: Backoff = attrs.field(factory=lambda: Backoff(base=0.2))

    @property
    def alone_after(self) -> float:
        """Seconds without a message from the program after which an agent ends its entities on its own."""
        return self.heartbeat_timeout * 2 / 3
