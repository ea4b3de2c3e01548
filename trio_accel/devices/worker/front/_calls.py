"""What the worker is asked beside requests: a memory count, or to say when nothing is in flight."""

from __future__ import annotations

from typing import Any

import attrs
import trio

from ..transport._codec import NonsenseError

__all__ = ["CallLostError", "Calls"]


class CallLostError(Exception):
    """The worker is gone and has not answered; the next one can be asked."""


@attrs.define(eq=False)
class _Call:
    what: str
    done: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    is_lost: bool = False


class Calls:
    """The calls that are not answered."""

    def __init__(self) -> None:
        self._last = 0
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, what: str) -> int:
        """Number of a new call."""
        self._last += 1
        self._calls[self._last] = _Call(what)
        return self._last

    async def wait(self, number: int) -> Any:
        """Wait for the answer.

        Raises:
            CallLostError: There will be none.
        """
        call = self._calls[number]
        try:
            await call.done.wait()
        finally:
            self._calls.pop(number, None)
        if call.is_lost:
            raise CallLostError
        return call.value

    def check(self, number: int, value: Any) -> None:
        """See that an answer can be one.

        Raises:
            NonsenseError: There was no such call, or it asks for something else.
        """
        call = self._calls.get(number)
        if number > self._last or (call is not None and (value is None) is (call.what == "count")):
            raise NonsenseError(f"result: it answers no call that was made, {number}")

    def answer(self, number: int, value: Any) -> None:
        """The worker has answered; perhaps nobody waits any more."""
        call = self._calls.get(number)
        if call is not None:
            call.value = value
            call.done.set()

    def lose(self) -> None:
        """The worker is gone."""
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()
