"""Members and entities, as all nodes name them."""

from __future__ import annotations

from typing import Any

import attrs

from ..devices import Key

__all__ = ["Member"]


@attrs.frozen
class Member:
    """A node that has an agent.

    Attributes:
        name: Name of the node, which outlives its agents.
        devices: Names of the devices that the agent has opened.
        epoch: Number of the table with which this agent came.
        address: Where its agent listens.
    """

    name: str
    devices: tuple[str, ...]
    epoch: int
    address: Any = attrs.field(repr=False)


@attrs.frozen
class Target:
    """An entity, as all nodes name it.

    Attributes:
        path: Where its class is found.
        key: Its key.
        is_durable: Whether the store has its messages.
        node: The only node that it may be at home on; None for any.
        digest: Digest of the file of its class, as the asker has it.
    """

    path: str
    key: Key
    is_durable: bool = False
    node: str | None = None
    digest: str = attrs.field(default="", eq=False)

    @property
    def text(self) -> str:
        """Its name in a store: keys of two types differ."""
        return f"{self.path}/{type(self.key).__name__}/{self.key!r}"
