"""What a program is made of: all that another process needs to make it again, as one line of text."""

from __future__ import annotations

import json
from typing import Any

import attrs

from ...actors import Backoff, Intensity
from .dtypes import DType
from .ops import ArraySpec
from .trees import Tree

__all__ = ["MOST_TEXT", "ProgramDefinition"]

MOST_TEXT = 1 << 20
"""The most characters of a definition, and of the arguments of a call."""


@attrs.frozen(kw_only=True)
class ProgramDefinition:
    """What a program is made of.

    Attributes:
        name: Its name in the tree.
        number: Tells programs of one name apart that were opened one after the other.
        target: Import path of its class or function, ``"package.module:Class"``.
        arguments: Tree of the constructor's arguments: a tuple and a dict. None for a function.
        arrays: The arrays among them.
        updated: Numbers of those that a method may change.
        intensity: How often it may be restarted; None for the device's.
        backoff: Waiting before a restart; None for the device's.
        refuses_all: Whether each error of a call is its asker's own, and restarts nothing.
    """

    name: str
    number: int
    target: str
    arguments: Tree
    arrays: tuple[ArraySpec, ...]
    updated: frozenset[int]
    intensity: Intensity | None
    backoff: Backoff | None
    refuses_all: bool = False

    def encode(self) -> str:
        """As text: its name, then the rest; the name ends at the first space behind it.

        Raises:
            ValueError: It is too long.
        """
        arrays = [
            (
                int(array.block),
                int(array.offset),
                array.dtype.value,
                _whole(array.shape),
                _whole(array.strides),
            )
            for array in self.arrays
        ]
        intensity = None if self.intensity is None else attrs.asdict(self.intensity)
        backoff = None if self.backoff is None else attrs.asdict(self.backoff)
        rest: list[Any] = [self.number, self.target, self.arguments, arrays, sorted(self.updated)]
        text = json.dumps(
            [*rest, intensity, backoff, self.refuses_all], separators=(",", ":"), ensure_ascii=False
        )
        if len(text) > MOST_TEXT:
            raise ValueError(
                f"program {self.name!r}: its arguments are {len(text)} characters as text, at most "
                f"{MOST_TEXT} are allowed; hand large values over as arrays"
            )
        return f"{self.name} {text}"

    @classmethod
    def decode(cls, text: str) -> ProgramDefinition:
        """Read what `encode` made."""
        name, _, rest = text.partition(" ")
        number, target, arguments, arrays, updated, intensity, backoff, refuses_all = json.loads(rest)
        return cls(
            name=name,
            number=number,
            target=target,
            arguments=arguments,
            arrays=tuple(
                ArraySpec(block, offset, DType(dtype), tuple(shape), tuple(strides))
                for block, offset, dtype, shape, strides in arrays
            ),
            updated=frozenset(updated),
            intensity=None if intensity is None else Intensity(**intensity),
            backoff=None if backoff is None else Backoff(**backoff),
            refuses_all=refuses_all,
        )


def _whole(numbers: tuple[int, ...]) -> list[int]:
    return [int(number) for number in numbers]
