"""Members and entities, with the same names on all nodes."""

from __future__ import annotations

from typing import Any

import attrs

from ..devices import Key

__all__ = ["Member"]


@attrs.frozen
class Member:
    """A node with an agent.

    Attributes:
        name: The name of the node, which outlives its agents.
        devices: The names of the devices that the agent has opened.
        epoch: The number of the first table with this agent.
        address: The address of its agent.
    """

    name: str
    devices: tuple[str, ...]
    epoch: int
    address: Any = attrs.field(repr=False)


@attrs.frozen
class Target:
    """An entity, with the same name on all nodes.

    Attributes:
        path: The import path of its class.
        key: The key.
        is_durable: Whether the store keeps its messages.
        node: The only possible home node; None for any.
        digest: The digest of its class's file, as the caller has it.
    """

    path: str
    key: Key
    is_durable: bool = False
    node: str | None = None
    digest: str = attrs.field(default="", eq=False)

    @property
    def text(self) -> str:
        """The name in a store: keys of two types differ."""
        return f"{self.path}/{type(self.key).__name__}/{self.key!r}"
