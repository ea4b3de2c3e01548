"""The words of a text, as numbers: what the model of this service reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

# Words that say nothing of what a sentence is about, and ends that its other forms have.
FUNCTION_WORDS = """
an and are as at be been before but by can do does each else every for from had has have he her his how if
in into is it its just may me more most my no nor not of on one only or other our out over own same she
should so some such than that the their them then there these they this those through to too under until up
us was we were what when where which while who whom why will with would you your
"""
ENDS = ("ing", "ed", "es", "s", "e")

_SILENT = frozenset(FUNCTION_WORDS.split())
_WORD = re.compile(r"[a-z][a-z_]+")


@attrs.frozen
class Vocabulary:
    """The words that a model knows, with their numbers."""

    numbers: dict[str, int]

    def known(self, text: str) -> list[int]:
        """The numbers of the words of a text."""
        found = [self.numbers.get(word) for word in words_of(text)]
        return [number for number in found if number is not None]

    def batch(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The words of several texts as two arrays with a row for each: numbers, and which are there."""
        rows = [self.known(text) for text in texts]
        width = max(1, *map(len, rows))
        numbers = np.zeros((len(rows), width), np.int64)
        shown = np.zeros((len(rows), width), np.float32)
        for place, row in enumerate(rows):
            numbers[place, : len(row)], shown[place, : len(row)] = row, 1.0
        return numbers, shown


def words_of(text: str) -> list[str]:
    """The words of a text that say what it is about, without their ends."""
    return [stem_of(word) for word in _WORD.findall(text.lower()) if word not in _SILENT]


def stem_of(word: str) -> str:
    """A word without its end: "killed" and "kills" are one word."""
    for end in ENDS:
        if word.endswith(end) and len(word) >= len(end) + 4 and not word.endswith("ss"):
            return word.removesuffix(end)
    return word
