"""Arrays of other libraries, in memory that a device can address."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

import attrs
import numpy as np

from .dtypes import Ints
from .ops import ArraySpec, OperationSpec, contiguous_strides, specification, writes

__all__ = ["CopyFromForeignSpec", "ForeignArray", "SharesCudaMemory"]

# The stream that libraries use by default, for arrays that do not name a stream.
_LEGACY = 1
# Since this version of the protocol, an array itself declares whether somebody has to wait for a stream.
_NAMES_ITS_STREAM = 3


class SharesCudaMemory(Protocol):
    """An array of a library that works on a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The place of the array, and its layout."""
        ...


@attrs.frozen(eq=False)
class ForeignArray:
    """An array in the memory of a GPU, as its owner describes it by ``__cuda_array_interface__``.

    Attributes:
        owner: The object that owns the memory and keeps it alive.
        address: The address of the first element.
        dtype: Element type, as NumPy has it.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
        stream: Handle of the stream on which it was computed; None if that is done.
    """

    owner: object
    address: int
    dtype: np.dtype[Any]
    shape: Ints
    strides: Ints
    stream: int | None

    @classmethod
    def of(cls, owner: object) -> ForeignArray | None:
        """Read an object's description of itself; return None if it lacks the protocol.

        Raises:
            TypeError: An array with a mask.
        """
        if isinstance(owner, np.ndarray):
            return None
        interface = getattr(owner, "__cuda_array_interface__", None)
        if not isinstance(interface, dict):
            return None
        return cls._read(owner, cast("dict[str, Any]", interface))

    @classmethod
    def _read(cls, owner: object, interface: dict[str, Any]) -> ForeignArray:
        if interface.get("mask") is not None:
            raise TypeError("host: masked arrays are not supported, because device arrays do not keep a mask")
        dtype = np.dtype(interface["typestr"])
        shape = tuple(int(extent) for extent in interface["shape"])
        strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
        stream = interface.get("stream")
        if stream == 0 or (stream is None and interface["version"] < _NAMES_ITS_STREAM):
            stream = _LEGACY
        return cls(owner, int(interface["data"][0]), dtype, shape, tuple(map(int, strides)), stream)


@specification
class CopyFromForeignSpec(OperationSpec):
    """Copy an array of another library, of the same shape and dtype, when its stream has computed it.

    Only devices that share their memory with other libraries have this operation.
    """

    is_from_outside: ClassVar[bool] = True

    source: ForeignArray
    out: ArraySpec = writes()
