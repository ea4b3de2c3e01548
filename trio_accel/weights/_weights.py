"""Weights that were loaded: arrays by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ..devices import AccelRef

__all__ = ["Weights"]


class Weights(Mapping[str, AccelRef]):
    """Arrays of a device by their names, in the order of their files, with the files' text.

    Args:
        arrays: The arrays.
        metadata: Text by name.
    """

    def __init__(self, arrays: Mapping[str, AccelRef], metadata: Mapping[str, str]) -> None:
        self._arrays = dict(arrays)
        self._metadata = MappingProxyType(dict(metadata))

    def __repr__(self) -> str:
        return f"<Weights: {len(self)} arrays, {self.nbytes} bytes>"

    def __getitem__(self, name: str) -> AccelRef:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text by name that the writer of the file has added; the first of several files has its way."""
        return self._metadata

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on the device."""
        return sum(array.nbytes for array in self._arrays.values())

    def release(self) -> None:
        """Give the memory of all arrays back now; see `AccelRef.release`."""
        for array in self._arrays.values():
            array.release()
