"""What operations that come again came to."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar
from weakref import ref

from ...base.ops import ArraySpec, OperationSpec
from ..runtime._memory import CudaMemory
from ..runtime._stream import CudaStream

__all__ = ["Known"]

_THING = TypeVar("_THING")
_Spec: TypeAlias = OperationSpec | ArraySpec
_MOST = 256


class Known(Generic[_THING]):
    """By specification or array, and by stream, what was found out that depends on nothing else.

    A program that drops its results asks for the same again and again, on the same blocks: then the
    specification is the same one, too, or the array is. All is found out anew when memory was freed, as
    blocks may lie elsewhere then. The table itself keeps no specification and no array.

    Args:
        places: Where blocks lie.
    """

    __slots__ = ("_found", "_places")

    def __init__(self, places: CudaMemory) -> None:
        self._places = places
        self._found: dict[int, tuple[ref[_Spec], CudaStream, int, _THING]] = {}

    def find(self, spec: _Spec, stream: CudaStream) -> _THING | None:
        """What is kept; None if that is nothing, or may not hold any more."""
        found = self._found.get(id(spec))
        if found is None:
            return None
        of, on, freed, thing = found
        return thing if of() is spec and on is stream and freed == self._places.freed else None

    def keep(self, spec: _Spec, stream: CudaStream, thing: _THING) -> None:
        """Keep what was found out just now."""
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[id(spec)] = ref(spec), stream, self._places.freed, thing

    def clear(self) -> None:
        """Something else has changed: keep nothing."""
        self._found.clear()
