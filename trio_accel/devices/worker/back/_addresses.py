"""Where blocks lie in the memory of a worker's device, as the application is told."""

from __future__ import annotations

from collections.abc import Iterable

from ...engine._engine import Engine
from ...operations._operation import Launch
from ..transport._frames import Address

__all__ = ["all_addresses", "new_addresses"]


def new_addresses(launch: Launch, engine: Engine) -> tuple[Address, ...]:
    """Where the blocks lie that an operation has made, unless they lie where they did before."""
    fresh = engine.fresh
    blocks = [block for block, _ in launch.allocations if block in fresh]
    fresh.difference_update(blocks)
    return _addresses(blocks, engine)


def all_addresses(allocations: Iterable[tuple[int, int]], engine: Engine) -> tuple[Address, ...]:
    """Where the blocks lie that an operation was to make, of which the application forgets it.

    It takes no note of what it does not keep. So the next operation that makes these tells them again.
    """
    addresses = _addresses([block for block, _ in allocations], engine)
    engine.fresh.update([block for block, *_ in addresses])
    return addresses


def _addresses(blocks: Iterable[int], engine: Engine) -> tuple[Address, ...]:
    """Where blocks lie; nothing of those that are freed."""
    return tuple([address[:] for block in blocks if (address := engine.placed(block)) is not None])
