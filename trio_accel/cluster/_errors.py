"""Errors of a cluster."""

from __future__ import annotations

from functools import partial

from ..actors import NotExecutedError
from ..backends.base import NotSupportedError

__all__ = [
    "EntityMovedError",
    "FencedError",
    "LethalRequestError",
    "NodeLostError",
    "NotRepeatableError",
    "StoreError",
]


class NodeLostError(Exception):
    """A node was lost with a request in flight; the request may have been executed.

    Attributes:
        node: The name of the node.
        epoch: The number of the table by which the request was sent.
    """

    def __init__(self, message: str, *, node: str, epoch: int) -> None:
        super().__init__(message)
        self.node: str = node
        self.epoch: int = epoch

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), node=self.node, epoch=self.epoch), self.args


class LethalRequestError(NodeLostError):
    """Nodes were lost whenever this request to a `DurableEntity` was in flight, so it is not sent again.

    Attributes:
        request: Class of the request, and the entity.
    """

    def __init__(self, message: str, *, node: str, epoch: int, request: str) -> None:
        super().__init__(message, node=node, epoch=epoch)
        self.request: str = request

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), node=self.node, epoch=self.epoch, request=self.request), self.args


def not_started(node: str, error: BaseException) -> Exception:
    """Return the error to raise for an agent that could not start."""
    if isinstance(error, NotSupportedError):
        return NotSupportedError(f"node {node}: {error}", backend=error.backend)
    if isinstance(error, (ValueError, TypeError)):
        return ValueError(f"node {node}: {error}")
    return NodeLostError(f"the agent of node {node} does not start: {error}", node=node, epoch=0)


class EntityMovedError(NotExecutedError):
    """The entity has moved, and its message was not begun. `EntityRef` asks again automatically."""


class FencedError(Exception):
    """Another home has taken the entity over, so this one may no longer write."""


class StoreError(Exception):
    """The store cannot be reached, has failed or is damaged; nothing was acknowledged.

    Attributes:
        is_begun: Whether the call was begun, so that it may have written.
        is_damaged: Whether the store or a value in it is known to be damaged, so that no repetition helps.
    """

    def __init__(self, message: str, *, is_begun: bool = True, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_begun: bool = is_begun
        self.is_damaged: bool = is_damaged

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), is_begun=self.is_begun, is_damaged=self.is_damaged), self.args


class NotRepeatableError(Exception):
    """A repeated message has given another reply than before, so the state also differs."""
