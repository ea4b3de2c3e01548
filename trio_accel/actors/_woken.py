"""What a task is woken with that is told nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, Final, final

import outcome

__all__ = ["WOKEN"]


@final
class _Woken(outcome.Outcome[None]):
    """None, for any number of tasks. Trio makes a `Value` each time: three tenths of a wake-up."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Nothing is told."""

    def send(self, gen: Generator[Any, None, Any]) -> Any:
        """Go on with a generator."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Any, None]) -> Any:
        """Go on with an async generator."""
        return await agen.asend(None)


WOKEN: Final[outcome.Outcome[None]] = _Woken()
"""What `trio.lowlevel.reschedule` takes for a task that is told nothing: None, for any number of them."""
