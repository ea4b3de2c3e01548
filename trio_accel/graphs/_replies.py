"""What a step returns: arrays, in tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ..devices import AccelRef

__all__ = ["map_reply"]

ReplyT = TypeVar("ReplyT")


def map_reply(reply: ReplyT, function: Callable[[AccelRef], AccelRef]) -> ReplyT:
    """Replace each array of a reply.

    Raises:
        TypeError: It holds something else.
    """
    return cast("ReplyT", _mapped(reply, function))


def _mapped(value: object, function: Callable[[AccelRef], AccelRef]) -> Any:
    if value is None:
        return None
    if isinstance(value, AccelRef):
        return function(value)
    kind = cast("type[Any]", type(value))
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, function) for item in cast("Sequence[Any]", value)]
        if kind is list:
            return items
        # A named tuple takes its items one by one.
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if kind is dict:
        return {key: _mapped(item, function) for key, item in cast("dict[Any, Any]", value).items()}
    raise TypeError(
        "capture: the step must return arrays of the device, None, or tuples, lists and dictionaries of "
        f"these, got {kind.__name__}"
    )
