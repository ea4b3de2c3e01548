"""Awaits of Trio's own primitives that a task may leave half-way; see `_messages`."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar, cast

import trio

from ._messages import raise_closed

__all__ = ["Leavable"]

T_co = TypeVar("T_co", covariant=True)


class Leavable(Generic[T_co]):
    """An await of Trio's that a task may leave half-way. Its abort function runs then, as if cancelled."""

    __slots__ = ("_awaitable",)

    def __init__(self, awaitable: Awaitable[T_co]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, T_co]:
        waiting = self._awaitable.__await__()
        answer = None
        while True:
            try:
                trap = waiting.send(answer)
            except StopIteration as end:
                return cast("T_co", end.value)
            is_left = True
            try:
                answer = yield trap
                is_left = False
            finally:
                if is_left and trio.lowlevel.in_trio_run():
                    abort = getattr(trap, "abort_func", None)
                    if abort is not None:
                        abort(raise_closed)
