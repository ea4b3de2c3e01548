"""Messages of the memory actor: what every device can do with its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import CopyFromForeignSpec, DType, ForeignArray
from ...backends.base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, StackSpec
from ...backends.base.values import check_conversion, element
from ..arrays._ref import AccelRef
from ..base._refusals import what_to_do
from ..base._views import overlaps_itself
from ..engine._library import LibraryActor
from ..operations._operation import Operand, Operation, Planned, Planner

__all__ = ["Copy", "Empty", "Fill", "MemoryActor", "Put", "Stack", "ToHost"]

_PATH = "trio_accel.devices:MemoryActor"


class MemoryActor(LibraryActor):
    """Copies between host and device, and within the device, on a stream of its own."""

    library = "memory"


@attrs.define(eq=False, on_setattr=None)
class Put(Operation[MemoryActor, AccelRef]):
    """Copy an array to the device; replies when the original may be changed again."""

    host: npt.NDArray[Any] | ForeignArray
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse what is no array of a device dtype."""
        if isinstance(self.host, ForeignArray):
            out = planner.output(self.host.shape, planner.dtype("host", self.host.dtype))
            planner.keep(self.host)
            return Planned(CopyFromForeignSpec(self.host, out.spec), out)
        if not isinstance(self.host, np.ndarray):
            raise TypeError(f"{planner.name}: host must be a NumPy array, got {type(self.host).__name__}")
        planner.unmasked("host", self.host)
        out = planner.output(self.host.shape, planner.dtype("host", self.host.dtype))
        planner.keep(self.host)
        return Planned(CopyFromHostSpec(self.host, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class ToHost(Operation[MemoryActor, npt.NDArray[Any]]):
    """Copy an array to host memory: into `out`, or a new array."""

    source: AccelRef
    out: npt.NDArray[Any] | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[npt.NDArray[Any]]:
        """Refuse an `out` of another shape or dtype, or one that is read-only or whose elements overlap."""
        source = planner.read("source", self.source)
        host = self.out
        if host is None:
            # Nobody else has it: a cancelled asker need not wait until it is filled.
            host = np.empty(source.shape, source.dtype.dtype)
            return Planned(CopyToHostSpec(host, source), host)
        if not isinstance(host, np.ndarray):
            raise TypeError(
                f"{planner.name}: out must be a NumPy array, got {type(host).__name__}{what_to_do(host)}"
            )
        if host.shape != source.shape or host.dtype != source.dtype.dtype or not host.flags.writeable:
            given = (
                "a read-only array" if not host.flags.writeable else f"shape {host.shape}, dtype {host.dtype}"
            )
            raise ValueError(
                f"{planner.name}: out must be a writable array of shape {source.shape} and dtype "
                f"{source.dtype}, got {given}"
            )
        if overlaps_itself(host):
            raise ValueError(
                f"{planner.name}: out must have memory of its own for each element, got an array of shape "
                f"{host.shape} with strides {host.strides}, whose elements overlap; give "
                "np.empty(shape, dtype), or none for a new array"
            )
        planner.keep(host)
        return Planned(CopyToHostSpec(host, source), host)


@attrs.define(eq=False, on_setattr=None)
class Copy(Operation[MemoryActor, AccelRef]):
    """Copy an array to new memory of its device, to another dtype if one is given."""

    source: AccelRef
    dtype: DType | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse a cast that would drop imaginary parts."""
        source = planner.read("source", self.source)
        dtype = self.dtype or source.dtype
        check_conversion(planner.name, "dtype", source.dtype, dtype)
        out = planner.output(source.shape, dtype)
        return Planned(CopySpec(source, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Fill(Operation[MemoryActor, AccelRef]):
    """Set every element of an array to one value; replies with the array."""

    array: AccelRef
    value: complex
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse a value that the dtype cannot hold."""
        array = planner.update("array", self.array)
        return Planned(FillSpec(element(planner.name, "value", self.value, array.dtype), array), self.array)


@attrs.define(eq=False, on_setattr=None)
class Empty(Operation[MemoryActor, AccelRef]):
    """Make an array, filled with one value."""

    shape: tuple[int, ...]
    dtype: DType
    value: complex = 0
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse negative sizes and values that the dtype cannot hold."""
        for extent in self.shape:
            if isinstance(extent, bool) or not isinstance(extent, (int, np.integer)) or extent < 0:
                raise ValueError(f"{planner.name}: shape must hold sizes of at least 0, got {self.shape}")
        shape = tuple(int(extent) for extent in self.shape)
        out = planner.output(shape, self.dtype)
        return Planned(FillSpec(element(planner.name, "value", self.value, self.dtype), out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Stack(Operation[MemoryActor, AccelRef]):
    """Copy arrays next to each other, along a new first axis, as `numpy.stack` does.

    Host arrays are copied to the device first, each by itself.

    Attributes:
        arrays: Arrays of one dtype and number of axes, at least one.
        pad: What shorter arrays are filled up with behind their ends, to the longest of each axis; without
            it, all must have one shape.
    """

    arrays: Sequence[Operand]
    pad: complex | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse arrays that do not go together, and a padding that the dtype cannot hold."""
        sources = tuple(
            planner.read(f"arrays[{index}]", array) for index, array in enumerate(tuple(self.arrays))
        )
        if not sources:
            raise ValueError(f"{planner.name}: arrays must hold at least one")
        first = sources[0]
        for index, source in enumerate(sources):
            differs = source.shape != first.shape if self.pad is None else source.ndim != first.ndim
            if differs or source.dtype is not first.dtype:
                kind = "shape" if self.pad is None else "number of axes"
                raise ValueError(
                    f"{planner.name}: arrays must have one dtype and one {kind}, got {first.dtype} "
                    f"{first.shape} and, as number {index}, {source.dtype} {source.shape}"
                )
        place = tuple(max(extents) for extents in zip(*(one.shape for one in sources), strict=True))
        out = planner.output((len(sources), *place), first.dtype)
        pad = element(planner.name, "pad", 0 if self.pad is None else self.pad, first.dtype)
        return Planned(StackSpec(sources, pad, out.spec), out)
