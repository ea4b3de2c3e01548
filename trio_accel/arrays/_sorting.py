"""Order of arrays: sorting, the largest elements, and the search in what is sorted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from ..backends.base import DType
from ..backends.base.contract.ops import ArraySpec, SearchSpec, SortSpec
from ..devices import AccelRef, Operand, Planned, Planner, operation, operation_like
from ..devices.operations._calls import composed
from ._actor import ArraysActor
from ._checks import axis_of, check_real, flag, placed, whole
from ._indexing import take_along_axis

__all__ = ["TopKResult", "argsort", "lexsort", "searchsorted", "sort", "top_k"]


class TopKResult(NamedTuple):
    """The elements that come first, and where they were."""

    values: AccelRef
    indices: AccelRef


def _plan_sort(message: Any, planner: Planner, *, places: bool) -> Planned[AccelRef]:
    x, axis = _ordered(message, planner)
    out = planner.output(x.shape, DType.int64 if places else x.dtype, message.out)
    planner.distinct("out", out.spec, x=x)
    flag(planner.name, "stable", message.stable)
    results = (None, out.spec) if places else (out.spec, None)
    return Planned(SortSpec(axis, flag(planner.name, "descending", message.descending), x, *results), out)


def _plan_top_k(message: Any, planner: Planner) -> Planned[TopKResult]:
    x, axis = _ordered(message, planner)
    k, count = whole(planner.name, "k", message.k), x.shape[axis]
    if not 0 <= k <= count:
        raise ValueError(f"{planner.name}: k must be from 0 to the {count} elements along the axis, got {k}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    found = TopKResult(planner.output(shape, x.dtype), planner.output(shape, DType.int64))
    largest = flag(planner.name, "largest", message.largest)
    return Planned(SortSpec(axis, largest, x, found.values.spec, found.indices.spec), found)


def _plan_search(message: Any, planner: Planner) -> Planned[AccelRef]:
    name = planner.name
    x1, x2 = planner.read("x1", message.x1), planner.read("x2", message.x2)
    sorter = None if message.sorter is None else planner.read("sorter", message.sorter)
    if x1.ndim != 1 or (sorter is not None and sorter.shape != x1.shape):
        given = "" if sorter is None else f" and sorter of shape {sorter.shape}"
        raise ValueError(f"{name}: x1 must be a vector, and sorter as long, got shape {x1.shape}{given}")
    if message.side not in ("left", "right"):
        raise ValueError(f"{name}: side must be 'left' or 'right', got {message.side!r}")
    if sorter is not None and sorter.dtype.kind not in ("int", "uint"):
        raise TypeError(f"{name}: sorter must be of whole numbers, got {sorter.dtype}")
    check_real(name, x1=x1, x2=x2)
    out = planner.output(x2.shape, DType.int64, message.out)
    others = {"x1": x1, "x2": x2, **({} if sorter is None else {"sorter": sorter})}
    planner.distinct("out", out.spec, **others)
    return Planned(SearchSpec(message.side, x1, x2, sorter, out.spec, planner.status(1)), out)


def _ordered(message: Any, planner: Planner) -> tuple[ArraySpec, int]:
    """Take the array of a message, and its axis."""
    x = planner.read("x", message.x)
    check_real(planner.name, x=x)
    return x, axis_of(planner.name, x, message.axis)


@operation(actor=ArraysActor, plan=partial(_plan_sort, places=False))
async def sort(
    x: Operand, *, axis: int = -1, descending: bool = False, stable: bool = True, out: AccelRef | None = None
) -> AccelRef:
    """Sort along an axis, as the array API standard's ``sort`` does.

    NaN counts as larger than every number: it comes last, and first where the order is descending. Zeros of
    both signs are equal.

    Args:
        x: The array: real numbers or truth values.
        axis: The axis, from the end for a negative one.
        descending: Whether the largest come first.
        stable: Whether equal elements keep their order. They do in any case.
        out: Array of this shape and dtype to write to; by default a new one.

    Returns:
        The sorted elements.

    Raises:
        TypeError: The array is complex.
        ValueError: There is no such axis, or `out` has another shape or shares memory with `x`.
        NotSupportedError: The device has no sorting; on CUDA it is that of the package ``cuda-cccl``.
    """
    ...


@operation_like(sort, plan=partial(_plan_sort, places=True))
def argsort() -> None:
    """Find the indices that sort along an axis, as the array API standard's ``argsort`` does.

    Args:
        x: The array; see `sort` for its order.
        axis: The axis, from the end for a negative one.
        descending: Whether the largest come first.
        stable: Whether equal elements keep their order. They do in any case.
        out: Array of this shape and int64 to write to; by default a new one.

    Returns:
        Indices along the axis, of int64.

    Raises:
        TypeError: The array is complex.
        ValueError: There is no such axis, or `out` has another shape or shares memory with `x`.
        NotSupportedError: See `sort`.
    """


@composed
async def lexsort(keys: Sequence[Operand], *, axis: int = -1) -> AccelRef:
    """Find the indices that sort by several keys, as `numpy.lexsort` does: the last one counts first.

    There is a sort for each key.

    Args:
        keys: Arrays of one shape.
        axis: The axis, from the end for a negative one.

    Returns:
        Indices along the axis, of int64.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `argsort`; or no keys, or keys of several shapes.
    """
    given = await placed("arrays.lexsort", **{f"keys[{number}]": key for number, key in enumerate(keys)})
    if len({key.shape for key in given}) > 1:
        raise ValueError(f"arrays.lexsort: keys must be of one shape, got {[key.shape for key in given]}")
    order = await argsort(given[0], axis=axis)
    for key in given[1:]:
        step = await argsort(await take_along_axis(key, order, axis), axis=axis)
        order = await take_along_axis(order, step, axis)
    return order


@operation(actor=ArraysActor, plan=_plan_top_k)
async def top_k(x: Operand, k: int, *, axis: int = -1, largest: bool = True) -> TopKResult:
    """Find the largest elements along an axis, in order, and where they are.

    The first ones of equal elements are taken. NaN counts as larger than every number.

    Args:
        x: The array: real numbers or truth values.
        k: How many: from 0 to the elements along the axis.
        axis: The axis, from the end for a negative one.
        largest: Whether the largest are wanted, which come in descending order. Otherwise the smallest, in
            ascending order.

    Returns:
        The elements, and their indices along the axis, of int64.

    Raises:
        TypeError: The array is complex, or `k` is no whole number.
        ValueError: There is no such axis, or are not so many elements.
        NotSupportedError: See `sort`.
    """
    ...


@operation(actor=ArraysActor, plan=_plan_search)
async def searchsorted(
    x1: Operand,
    x2: Operand,
    *,
    side: Literal["left", "right"] = "left",
    sorter: Operand | None = None,
    out: AccelRef | None = None,
) -> AccelRef:
    """Find where values belong in a sorted vector, as the array API standard's ``searchsorted`` does.

    Args:
        x1: Vector in ascending order, NaN last.
        x2: The values. They are compared in the type that both have in common by NumPy's rules, but signed
            numbers exactly with those of uint64.
        side: Whether before the elements that are equal (``"left"``), or behind them (``"right"``).
        sorter: Indices that bring `x1` into order, such as those of `argsort`.
        out: Array of the shape of `x2` and of int64 to write to; by default a new one.

    Returns:
        For each value the index before which it keeps the vector in order, of int64.

    Raises:
        TypeError: An array is complex, or `sorter` has no whole numbers.
        ValueError: `x1` is no vector, `sorter` is not as long, or there is no such side.
        LibraryError: An index of `sorter` is out of range.
    """
    ...
