"""Comparison of arrays element by element: how many differ, where first, and by how much."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..backends.base import HostArray

__all__ = ["Difference", "Tolerance"]

_WHOLE = {2: np.int16, 4: np.int32, 8: np.int64}


@attrs.frozen(kw_only=True)
class Tolerance:
    """How far two elements may be apart: ``absolute + relative * abs(reference)``.

    Attributes:
        relative: Share of the reference.
        absolute: Part that does not depend on it.

    Raises:
        ValueError: One is below 0, or NaN.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name in ("relative", "absolute"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Tolerance: {name} must be at least 0, got {getattr(self, name)!r}")


@attrs.frozen(kw_only=True)
class Difference:
    """An array that differs.

    Attributes:
        number: Number of the operation in the journal, from 1; 0 for a mark.
        operation: Its name, for a step of a chain with the name of that; or the label of the mark.
        step: Number of the step inside of a chain, from 1; 0 where it was compared whole.
        argument: The array.
        elements: How many elements differ.
        of: How many elements it has.
        ulps: The most units in the last place between two; None where they are no numbers of the same kind.
        index: Index of the first element that differs.
    """

    number: int
    operation: str
    step: int
    argument: str
    elements: int
    of: int
    ulps: int | None
    index: tuple[int, ...]

    def __str__(self) -> str:
        by = "" if self.ulps is None else f", by {self.ulps} ulp at most"
        at = f", first at {list(self.index)}" if self.index else ""
        where = f"operation {self.number}, {self.operation}" if self.number else f"mark {self.operation!r}"
        return f"{where}: {self.elements} of {self.of} elements differ in {self.argument}{at}{by}"


def difference(
    reference: HostArray,
    other: HostArray,
    tolerance: Tolerance | None,
    *,
    number: int,
    operation: str,
    argument: str,
    step: int = 0,
) -> Difference | None:
    """Compare two arrays; None if they are equal by bits, or within a tolerance."""
    told: dict[str, Any] = {"number": number, "operation": operation, "step": step, "argument": argument}
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return Difference(**told, elements=other.size, of=reference.size, ulps=None, index=())
    if tolerance is None:
        differs = _bits(reference) != _bits(other)
        if differs.ndim > reference.ndim:
            differs = differs.any(axis=-1)
    else:
        with np.errstate(all="ignore"):
            differs = ~np.isclose(
                other, reference, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True
            )
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    first = np.unravel_index(int(np.argmax(differs)), differs.shape) if differs.ndim else ()
    index = tuple(map(int, first))
    return Difference(**told, elements=count, of=reference.size, ulps=_ulps(reference, other), index=index)


def _bits(array: HostArray) -> npt.NDArray[Any]:
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint8).reshape(*array.shape, array.itemsize) if array.size else np.empty(array.shape)


def _ulps(reference: HostArray, other: HostArray) -> int | None:
    """Count the numbers between two elements, at most."""
    if reference.dtype.kind == "c":
        real = f"f{reference.itemsize // 2}"
        pair = [np.ascontiguousarray(one).reshape(-1).view(real) for one in (reference, other)]
        return _ulps(pair[0], pair[1])
    whole = _WHOLE.get(reference.itemsize)
    if reference.dtype.kind in "iub":
        gaps = [abs(int(a) - int(b)) for a, b in zip(reference.reshape(-1), other.reshape(-1), strict=True)]
        return max(gaps, default=0)
    if whole is None:
        return None
    ordered = [_ordered(one, whole) for one in (reference, other)]
    return max((abs(int(a) - int(b)) for a, b in zip(*ordered, strict=True) if a != b), default=0)


def _ordered(array: HostArray, whole: Any) -> list[int]:
    """Numbers that follow one another as the floats of an array do."""
    bits = np.ascontiguousarray(array).reshape(-1).view(whole)
    lowest = int(np.iinfo(whole).min)
    return [int(one) if one >= 0 else lowest - int(one) for one in bits.tolist()]
