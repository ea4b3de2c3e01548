"""A program whose methods have status words: undeclared results, long results, and items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt


class Told:
    """Returns what it was opened with."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self.x = x

    def number(self) -> int:
        """Return the first element."""
        return int(self.x[0])

    def plus(self, number: int) -> int:
        """Add a number to the first element."""
        return int(self.x[0]) + number

    def text(self) -> str:
        """Return a text that status words of a call are too short for."""
        return f"{int(self.x[0])}" * 2000

    def items(self) -> Iterator[int]:
        """Yield the elements."""
        for item in self.x:
            yield int(item)
