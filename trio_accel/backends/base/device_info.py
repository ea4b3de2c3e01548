"""What is known of a device without opening it."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["DeviceInfo", "Isolation"]

Isolation = Literal["process", "inline"]


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """What is known of a device without opening it.

    Attributes:
        backend: Name of its backend, such as ``"cpu"``.
        index: Number of the device within its backend.
        description: The vendor's name of the product.
        total_memory: Bytes of memory, of all its users together.
        compute_units: Processor cores or multiprocessors.
        isolations: Where its context can live, the default first.
        completion: How completions are best learned of: ``"callback"``, the stream notifies;
            ``"adaptive"``, events are polled for a short while first, since that costs less.
        is_exclusive: Whether it takes one context at a time.
        uuid: What other tools know the hardware by, such as ``"GPU-..."`` with NVIDIA's; None if it has none.
            Of a part of a GPU (MIG), it is that of the GPU.
    """

    backend: str
    index: int
    description: str
    total_memory: int
    compute_units: int
    isolations: tuple[Isolation, ...]
    completion: Literal["callback", "adaptive"] = "callback"
    is_exclusive: bool = False
    uuid: str | None = None

    @property
    def name(self) -> str:
        """The name that `open_device` takes, such as ``"cpu:0"``."""
        return f"{self.backend}:{self.index}"
