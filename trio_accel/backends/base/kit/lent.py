"""Arrays that code of the user's was lent for one call, and that it keeps."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import ref

from ....actors import warn_untold

Lent: TypeAlias = "ref[Any]"
"""Finds the object shared by an array and everything made of it, while any of them exists."""


class Keepers:
    """Reports functions that keep lent arrays, because the memory will belong to another array."""

    def __init__(self) -> None:
        # Searches of old garbage for each function that found nothing kept.
        self._searches: Counter[str] = Counter()
        self._told: set[str] = set()

    def report_kept(
        self, label: str, read: Sequence[Lent], written: Sequence[Lent], named: Callable[[set[int]], str]
    ) -> None:
        """Find the arrays that a call has kept, when nothing but the function can hold them.

        An array that is only read is reported once for each function, by a logged warning.

        Args:
            label: The function's name.
            read: Arrays lent for reading.
            written: Arrays lent for writing.
            named: Returns the names of arguments, given the ids of their arrays.

        Raises:
            RuntimeError: The function keeps an array that it can write to.
        """
        lent = [*written] if label in self._told else [*written, *read]
        generation = 0
        # A cycle that nothing refers to keeps nothing. Most cycles of a call are young.
        while kept_ids := {id(reference) for reference in lent if reference() is not None}:
            if generation > 2:
                break
            if generation == 2:
                # This takes long, so a function that leaves old cycles does not pay for it at each call.
                self._searches[label] = count = self._searches[label] + 1
                if count & (count - 1):
                    return
            gc.collect(generation)
            generation += 1
        else:
            return
        del self._searches[label]
        names = named(kept_ids)
        if any(id(reference) in kept_ids for reference in written):
            raise RuntimeError(
                f"{label} keeps {names} after its call, or a view, and could write to another array's memory "
                "by it; keep a copy"
            )
        self._told.add(label)
        warn_untold(
            "trio_accel.backends",
            "%s keeps %s after its call, or a view: its memory becomes another array's, whose numbers are "
            "seen there; keep a copy",
            label,
            names,
        )
