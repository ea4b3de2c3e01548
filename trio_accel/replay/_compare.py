"""Elementwise comparison of arrays: the number of differences, the first one, and the largest one."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..actors import is_number, named_options, validator
from ..backends.base import HostArray

__all__ = ["Difference", "Tolerance"]

_INTEGER_OF_SIZE = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


_from_zero = validator("be a number from 0", lambda value: is_number(value, 0.0))


@named_options
@attrs.frozen(kw_only=True)
class Tolerance:
    """The allowed difference of two elements: ``absolute + relative * abs(reference)``.

    Attributes:
        relative: The share of the reference.
        absolute: The part that does not depend on the reference.

    Raises:
        ValueError: A value is not a number from 0.
    """

    relative: float = attrs.field(default=0.0, validator=_from_zero)
    absolute: float = attrs.field(default=0.0, validator=_from_zero)


@attrs.frozen(kw_only=True)
class Difference:
    """An array that differs.

    Attributes:
        number: The number of the operation in the journal, from 1; 0 for a mark.
        operation: The name of the operation, or of the step of a chain; or the label of the mark.
        step: The number of the step in its chain, from 1; 0 for a comparison of the whole operation.
        argument: The array.
        elements: The number of elements that differ.
        size: The number of elements in the array.
        ulps: The maximum difference in units in the last place; None if the elements are not comparable
            numbers.
        index: The index of the first element that differs.
    """

    number: int
    operation: str
    step: int
    argument: str
    elements: int
    size: int
    ulps: int | None
    index: tuple[int, ...]

    def __str__(self) -> str:
        by = "" if self.ulps is None else f", by {self.ulps} ulp at most"
        position = f", first at {list(self.index)}" if self.index else ""
        label = f"operation {self.number}, {self.operation}" if self.number else f"mark {self.operation!r}"
        return f"{label}: {self.elements} of {self.size} elements differ in {self.argument}{position}{by}"


def difference(
    reference: HostArray,
    array: HostArray,
    tolerance: Tolerance | None,
    *,
    number: int,
    operation: str,
    argument: str,
    step: int = 0,
) -> Difference | None:
    """Compare two arrays; None if they are equal by bits, or within a tolerance."""
    context: dict[str, Any] = {"number": number, "operation": operation, "step": step, "argument": argument}
    if reference.shape != array.shape or reference.dtype != array.dtype:
        return Difference(**context, elements=array.size, size=reference.size, ulps=None, index=())
    if tolerance is None:
        differs = _bits(reference) != _bits(array)
    else:
        with np.errstate(all="ignore"):
            differs = ~np.isclose(
                array, reference, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True
            )
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    first = np.unravel_index(int(np.argmax(differs)), differs.shape) if differs.ndim else ()
    index = tuple(map(int, first))
    return Difference(
        **context, elements=count, size=reference.size, ulps=_ulps(reference, array), index=index
    )


def _bits(array: HostArray) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array).view(f"V{array.itemsize}").reshape(array.shape)


def _ulps(reference: HostArray, array: HostArray) -> int | None:
    """Return the maximum number of values between two elements; None for elements without NumPy numbers."""
    if reference.dtype.kind == "c":
        real = f"f{reference.itemsize // 2}"
        reference, array = (
            np.ascontiguousarray(operand).reshape(-1).view(real) for operand in (reference, array)
        )
    elif reference.itemsize not in _INTEGER_OF_SIZE:
        return None
    reference_ordinals, array_ordinals = map(_ordinals, (reference, array))
    return int(
        np.where(
            reference_ordinals > array_ordinals,
            reference_ordinals - array_ordinals,
            array_ordinals - reference_ordinals,
        ).max(initial=0)
    )


def _ordinals(array: HostArray) -> npt.NDArray[np.uint64]:
    """Number elements as they follow one another."""
    if array.dtype.kind in "ub":
        return array.astype(np.uint64)
    if array.dtype.kind != "i":
        array = np.ascontiguousarray(array).view(_INTEGER_OF_SIZE[array.itemsize])
        # Negative numbers go down from the zero, and have the bits of positive ones.
        array = np.where(array < 0, np.iinfo(array.dtype).min - array, array)
    return array.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)
