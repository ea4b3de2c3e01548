"""Specifications of the memory operations that every device has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from ..dtypes import HostArray
from ._array import ArraySpec, NumberRole, exact, number, reads, writes
from ._signature import refuse_shapes
from ._spec import OperationSpec, specification

__all__ = ["CopyFromHostSpec", "CopySpec", "CopyToHostSpec", "FillSpec", "HostUse", "JoinSpec"]


class HostUse:
    """The use of one host array by an enqueued copy, which can be withdrawn until it begins.

    The thread that copies calls `begin` and `end`, the Trio thread the others. Which of them is first is
    decided by the list: to take from it, or to replace its item, is one step.

    Args:
        array: Source or target of the copy; None if the copy has taken place.
    """

    __slots__ = ("_array", "_is_over")

    def __init__(self, array: HostArray | None) -> None:
        self._array: list[HostArray] = [] if array is None else [array]
        self._is_over = array is None

    def begin(self) -> HostArray | None:
        """Take the array to copy; None if the copy was withdrawn."""
        try:
            return self._array.pop()
        except IndexError:
            return None

    def end(self) -> None:
        """End the use: the copy is over, or has failed."""
        self._is_over = True

    def run(self, copy: Callable[[HostArray], object]) -> None:
        """Copy from or to the array, unless the copy was withdrawn."""
        array = self.begin()
        if array is not None:
            try:
                copy(array)
            finally:
                self.end()

    def withdraw(self) -> bool:
        """Prevent a copy that has not begun; return whether the array is no longer in use."""
        if self.begin() is not None:
            self._is_over = True
        return self._is_over

    def make_private(self, max_nbytes: int) -> bool:
        """Let a copy that has not begun use a private array; return whether the array is no longer in use.

        Args:
            max_nbytes: Larger arrays, in bytes, are left as they are.
        """
        if self._is_over:
            return True
        array = self._array[:]
        if not array or array[0].nbytes > max_nbytes:
            return False
        try:
            self._array[0] = array[0].copy()
        except IndexError:
            return False
        # A thread that copies from it now uses nothing of the program's.
        self._is_over = True
        return True


class _HostCopySpec(OperationSpec):
    """A copy from or to a host array."""

    # Set when it is enqueued, if the backend knows its use. It is not a field of the specification.
    __slots__ = ("_use",)
    _use: HostUse | None

    @property
    def use(self) -> HostUse | None:
        """The backend's use of the host array; None if the device itself uses it, until the copy is done."""
        return getattr(self, "_use", None)

    def note_use(self, use: HostUse | None) -> None:
        """Note how the backend uses the host array from now on; None if the device itself uses it."""
        self._use = use


@specification
class CopyFromHostSpec(_HostCopySpec):
    """Copy a host array of the same shape and dtype into device memory."""

    host: HostArray
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        _check_host(name, self, self.host, out=self.out)


@specification
class CopyToHostSpec(_HostCopySpec):
    """Copy device memory into a writable host array of the same shape and dtype."""

    host: HostArray
    source: ArraySpec = reads()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        _check_host(name, self, self.host, source=self.source)


@specification
class CopySpec(OperationSpec):
    """Copy between device arrays of one shape, converting the dtype where they differ."""

    source: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        if self.source.shape != self.out.shape:
            refuse_shapes(name, self, "source and out must have one shape", source=self.source, out=self.out)


@specification
class FillSpec(OperationSpec):
    """Set every element to one value, which the dtype can hold.

    A Python integer stays exact: an `int64` above 2**53 does not fit into a `complex`.
    """

    value: int | float | complex | bool = number(NumberRole.ELEMENT, "out")
    out: ArraySpec = writes()


@specification
class JoinSpec(OperationSpec):
    """Copy arrays one after another along an axis, converting the dtype if they differ.

    Along the other axes, each array begins where its place does. If a source is shorter there, the remaining
    elements are set to `pad`.
    """

    axis: int = exact()
    sources: tuple[ArraySpec, ...] = reads(variadic=True)
    pad: int | float | complex | bool = number(NumberRole.ELEMENT, "out")
    out: ArraySpec = writes()

    @property
    def is_padded(self) -> bool:
        """Whether a source is shorter than its place."""
        out = self.out.shape
        next_axis = self.axis + 1
        return any(
            (*source.shape[: self.axis], *source.shape[next_axis:]) != (*out[: self.axis], *out[next_axis:])
            for source in self.sources
        )

    @property
    def source_starts(self) -> Iterator[tuple[int, ArraySpec]]:
        """The place where each source begins along the axis, with the source."""
        start = 0
        for source in self.sources:
            yield start, source
            start += source.shape[self.axis]

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        axis, out = self.axis, self.out
        for source in self.sources:
            if source.ndim != out.ndim or not all(map(operator.le, source.shape, out.shape)):
                rule = "each source must fit into its place"
                refuse_shapes(name, self, rule, source=source, out=out)
        if not 0 <= axis < out.ndim or sum(source.shape[axis] for source in self.sources) != out.shape[axis]:
            refuse_shapes(name, self, f"out must have a place for each element along axis {axis}", out=out)


def _check_host(name: str, spec: OperationSpec, host: HostArray, **arrays: ArraySpec) -> None:
    """Require that a host array has the shape and dtype of the other array."""
    [(field, array)] = arrays.items()
    if host.shape != array.shape:
        refuse_shapes(name, spec, f"{field} must have the shape {host.shape} of host", **arrays)
    if host.dtype != array.dtype.dtype:
        cls = type(spec).__name__
        raise TypeError(f"{name}: {cls}: {field} must have the dtype {host.dtype} of host, got {array.dtype}")
