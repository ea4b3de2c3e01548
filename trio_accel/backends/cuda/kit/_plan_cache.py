"""What repeated copies came to."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

from ...base.ops import ArraySpec
from ..runtime._memory import CudaMemory
from ..runtime._stream import CudaStream

__all__ = ["PlanCache"]

_PLAN = TypeVar("_PLAN")
_MOST = 256


class PlanCache(Generic[_PLAN]):
    """By array and stream, a plan that depends on nothing else.

    A program that copies to or from an array repeatedly has the same object each time. A plan is made anew
    when memory was freed, as blocks may lie elsewhere then. The cache itself keeps no array alive.

    Args:
        addresses: Where blocks lie.
    """

    __slots__ = ("_addresses", "_entries")

    def __init__(self, addresses: CudaMemory) -> None:
        self._addresses = addresses
        self._entries: dict[int, tuple[ref[ArraySpec], CudaStream, int, _PLAN]] = {}

    def find(self, array: ArraySpec, stream: CudaStream) -> _PLAN | None:
        """The plan that is stored; None if there is none, or if it may not hold any more."""
        entry = self._entries.get(id(array))
        if entry is None:
            return None
        of, on, freed, plan = entry
        return plan if of() is array and on is stream and freed == self._addresses.freed else None

    def store(self, array: ArraySpec, stream: CudaStream, plan: _PLAN) -> None:
        """Store a plan that was made just now."""
        if len(self._entries) >= _MOST:
            self._entries.clear()
        self._entries[id(array)] = ref(array), stream, self._addresses.freed, plan

    def clear(self) -> None:
        """Something else has changed: no plan holds any more."""
        self._entries.clear()
