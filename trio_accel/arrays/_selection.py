"""Groups of equal elements, selections by a mask, and counts of bins.

The number of elements is only known afterwards. So a result gets the largest size possible, and the reply is
a view of the filled part, which keeps the memory of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import attrs
import numpy as np

from ..backends.base import DType, Ints, host_array
from ..backends.base.contract.ops import ArraySpec, CountSpec, GroupSpec, SelectSpec, number_of
from ..devices import (
    AccelRef,
    Device,
    Operand,
    Operation,
    Planned,
    Planner,
    composed,
    device_of,
    operation,
    shown,
)
from ..devices.base._views import reshaped
from ..expressions import ARRAYS, Elementwise, ExpressionArgument, Reduction
from ._actor import ArraysActor
from ._checks import bounded_integer, check_number, check_real, flat
from ._creation import linspace
from ._manipulation import stack

__all__ = [
    "HistogramResult",
    "RunLengthsResult",
    "UniqueAllResult",
    "UniqueCountsResult",
    "UniqueInverseResult",
    "argwhere",
    "bincount",
    "compress",
    "histogram",
    "nonzero",
    "partition",
    "run_lengths",
    "select",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
]


class UniqueAllResult(NamedTuple):
    """The elements that differ, and all about them; see `unique_all`."""

    values: AccelRef
    """The elements, in ascending order."""
    indices: AccelRef
    """Index of the first one of each, among all elements in C order."""
    inverse_indices: AccelRef
    """For each element the index in `values`."""
    counts: AccelRef
    """How often each is there."""


class UniqueCountsResult(NamedTuple):
    """The elements that differ, and how often they are there; see `unique_counts`."""

    values: AccelRef
    """The elements, in ascending order."""
    counts: AccelRef
    """How often each is there."""


class UniqueInverseResult(NamedTuple):
    """The elements that differ, and where they are; see `unique_inverse`."""

    values: AccelRef
    """The elements, in ascending order."""
    inverse_indices: AccelRef
    """For each element the index in `values`."""


class RunLengthsResult(NamedTuple):
    """Runs of equal elements; see `run_lengths`."""

    values: AccelRef
    """The element of each run."""
    lengths: AccelRef
    """How long each is."""


class HistogramResult(NamedTuple):
    """Counts of bins; see `histogram`."""

    counts: AccelRef
    """How many elements there are in each bin."""
    edges: AccelRef
    """Edges of the bins: one more than there are bins."""


def _grouping(
    make: Callable[..., Any], *fields: str, is_sorted: bool = True
) -> Callable[[Any, Planner], Any]:
    """Return the plan of a search for groups.

    Args:
        make: Makes the reply from the values and the other results.
        fields: Fields of `GroupSpec`, in the order of the reply.
        is_sorted: See `GroupSpec`.
    """

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        array = planner.read("x", message.x)
        if array.ndim != 1 and not is_sorted:
            raise ValueError(f"{planner.name}: x must be a vector, got shape {array.shape}")
        x = flat(planner, array)
        values = planner.output(x.shape, x.dtype)
        shapes = {"inverse": array.shape}
        optional = {field: planner.output(shapes.get(field, x.shape), DType.int64) for field in fields}
        specs = {
            field: reshaped(optional[field].spec, x.shape) if field in optional else None
            for field in _OPTIONAL_RESULTS
        }
        count = planner.status(2)

        def finish() -> Any:
            length = number_of(count)
            return make(
                values[:length],
                *[ref if field == "inverse" else ref[:length] for field, ref in optional.items()],
            )

        return Planned(GroupSpec(is_sorted, x, values.spec, **specs, count=count), finish=finish)

    return plan


_OPTIONAL_RESULTS = ("counts", "indices", "inverse")


def _same(values: AccelRef) -> AccelRef:
    return values


@operation(actor=ArraysActor, plan=_grouping(_same))
async def unique_values(x: Operand) -> AccelRef:
    """Find the elements that differ, in ascending order, as the array API standard's ``unique_values`` does.

    NaN is equal to nothing, so each one is there, after the numbers. The first zero of both signs is taken.
    The result is a view of an array as large as `x`.

    Args:
        x: An array of any shape; its elements are taken in C order.

    Returns:
        The elements, a vector.

    Raises:
        NotSupportedError: See `sort`; and complex numbers on CUDA.
    """
    ...


@operation(actor=ArraysActor, plan=_grouping(UniqueCountsResult, "counts"))
async def unique_counts(x: Operand) -> UniqueCountsResult:
    """Find the elements that differ, and count them, as the array API standard's ``unique_counts`` does.

    Args:
        x: The array; see `unique_values` for details.

    Returns:
        The elements in ascending order, and how often each is there, of int64.

    Raises:
        NotSupportedError: See `unique_values`.
    """
    ...


@operation(actor=ArraysActor, plan=_grouping(UniqueInverseResult, "inverse"))
async def unique_inverse(x: Operand) -> UniqueInverseResult:
    """Find the elements that differ, and where they are, as the array API standard's ``unique_inverse`` does.

    Args:
        x: The array; see `unique_values` for details.

    Returns:
        The elements in ascending order, and for each element of `x`, in its shape, which one it is, of int64.

    Raises:
        NotSupportedError: See `unique_values`.
    """
    ...


@operation(actor=ArraysActor, plan=_grouping(UniqueAllResult, "indices", "inverse", "counts"))
async def unique_all(x: Operand) -> UniqueAllResult:
    """Find the elements that differ, and all about them, as the array API standard's ``unique_all`` does.

    Args:
        x: The array; see `unique_values` for details.

    Returns:
        The elements in ascending order; the index of the first of each; for each element of `x` its index
        among them; and how often each is there. Indices and counts are of int64.

    Raises:
        NotSupportedError: See `unique_values`.
    """
    ...


@operation(actor=ArraysActor, plan=_grouping(RunLengthsResult, "counts", is_sorted=False))
async def run_lengths(x: Operand) -> RunLengthsResult:
    """Find the runs of equal neighbours in a vector (CUB's run-length encoding).

    NaN is equal to nothing: each is a run. The results are views of arrays as long as `x`.

    Args:
        x: The vector.

    Returns:
        The first element of each run, and how long each is, of int64.

    Raises:
        ValueError: `x` is not a vector.
        NotSupportedError: float8 on CUDA.
    """
    ...


def _plan_nonzero(message: Any, planner: Planner) -> Planned[tuple[AccelRef, ...]]:
    x = planner.read("x", message.x)
    if not x.ndim:
        raise ValueError(f"{planner.name}: x must have at least one axis")
    indices, count = [planner.output((x.size,), DType.int64) for _ in x.shape], planner.status(2)
    spec = SelectSpec(False, x, None, tuple([ref.spec for ref in indices]), count)
    return Planned(spec, finish=lambda: tuple([ref[: number_of(count)] for ref in indices]))


@operation(actor=ArraysActor, plan=_plan_nonzero)
async def nonzero(x: Operand) -> tuple[AccelRef, ...]:
    """Find the indices of nonzero elements, as the array API standard's ``nonzero`` does.

    NaN is not zero. The results are views of arrays with a place for each element of `x`.

    Args:
        x: An array of at least one axis.

    Returns:
        For each axis the indices along it, of int64, in C order of the elements.

    Raises:
        ValueError: The array has zero axes.
        NotSupportedError: float8 on CUDA.
    """
    ...


@composed
async def argwhere(x: Operand) -> AccelRef:
    """Find the indices of nonzero elements, a row for each: `nonzero`, and a join.

    See `nonzero` for arguments and errors.

    Returns:
        A matrix of int64, with a column for each axis of `x`.
    """
    return await stack(await nonzero(x), axis=1)


@composed
async def select(
    conditions: Sequence[ExpressionArgument],
    choices: Sequence[ExpressionArgument],
    default: ExpressionArgument = 0,
) -> AccelRef:
    """Take the first choice with a true condition, as `numpy.select` does: one launch.

    Args:
        conditions: Truth values. All arguments broadcast.
        choices: An array or number for each condition, promoted to one dtype with `default`.
        default: The value if no condition is true.

    Returns:
        The elements.

    Raises:
        TypeError: A condition does not have truth values, or the standard does not promote the choices to
            one.
        ValueError: The numbers of choices and conditions differ, or the shapes do not broadcast.
    """
    if not len(conditions) == len(choices) > 0:
        raise ValueError(
            f"arrays.select: each condition must have a choice, got {len(conditions)} and {len(choices)}"
        )
    return await _selecting(len(choices))(*conditions, *choices, default)


@functools.cache
def _selecting(count: int) -> Elementwise[AccelRef]:
    conditions, choices = (
        [f"{name}_{number}" for number in range(count)] for name in ("condition", "choice")
    )
    pairs = zip(reversed(conditions), reversed(choices), strict=True)
    text = functools.reduce(lambda rest, pair: f"where({pair[0]}, {pair[1]}, {rest})", pairs, "default")
    inputs = (*conditions, *choices, "default")
    named: dict[str, Any] = {"promoted": (*choices, "default"), "truths": conditions}
    return Elementwise(text, inputs=inputs, operation="arrays.select", **named)


def _selected(make: Callable[[AccelRef, int], Any], *, is_whole: bool) -> Callable[[Any, Planner], Any]:
    """Return the plan for selecting the items of an array by a mask of its first axes.

    Args:
        make: Makes the reply from an array that begins with the selected items, and their number.
        is_whole: Whether the other items follow.
    """

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        name, mask, x = planner.name, planner.read("mask", message.mask), planner.read("x", message.x)
        if mask.dtype is not DType.bool:
            raise TypeError(f"{name}: mask must be of bool, got {mask.dtype}; take() selects by indices")
        if x.shape[: mask.ndim] != mask.shape:
            raise ValueError(
                f"{name}: mask must have the shape of x or of its first axes, got mask of shape {mask.shape} "
                f"and x of shape {x.shape}"
            )
        out, count = planner.output((mask.size, *x.shape[mask.ndim :]), x.dtype), planner.status(2)
        spec = SelectSpec(is_whole, mask, x, (out.spec,), count)
        return Planned(spec, finish=lambda: make(out, number_of(count)))

    return plan


@operation(actor=ArraysActor, plan=_selected(lambda out, count: out[:count], is_whole=False))
async def compress(mask: Operand, x: Operand) -> AccelRef:
    """Select elements by a mask: NumPy's ``x[mask]``.

    The result is a view of an array with a place for each item of `x`.

    Args:
        mask: Truth values, with the shape of `x` or its first axes.
        x: The array.

    Returns:
        The selected items in C order: of shape ``(count, *x.shape[mask.ndim:])``.

    Raises:
        TypeError: The mask is not of bool.
        ValueError: The mask has another shape.
    """
    ...


@operation(actor=ArraysActor, plan=_selected(lambda out, count: (out[:count], out[count:]), is_whole=True))
async def partition(mask: Operand, x: Operand) -> tuple[AccelRef, AccelRef]:
    """Part an array by a mask: NumPy's ``x[mask], x[~mask]``. Items keep their order in both.

    Both are views of one new array, which holds the selected items first.

    Args:
        mask: Truth values, with the shape of `x` or its first axes.
        x: The array.

    Returns:
        The selected items, and the others.

    Raises:
        TypeError: The mask is not of bool.
        ValueError: The mask has another shape.
    """
    ...


@attrs.frozen(eq=False)
class Count(Operation[ArraysActor, AccelRef]):
    """Count the elements of bins, or add their weights.

    Attributes:
        function: The function that asks for it.
        x: The elements.
        edges: Edges of the bins; None where the elements are bins.
        weights: Weights; None for ones.
        bins: How many bins there are.
        ends: The first and the last edge before they are rounded; zeros for the edges themselves.
    """

    library: ClassVar[str] = ARRAYS
    function: str
    x: Operand
    edges: Operand | None
    weights: Operand | None
    bins: int
    ends: tuple[float, float] = (0, 0)

    @property
    def operation(self) -> str:
        """Name of the function."""
        return self.function

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Name the counts."""
        x = planner.read("x", self.x)
        edges = None if self.edges is None else planner.read("bins", self.edges)
        check_real(planner.name, x=x, **({} if edges is None else {"bins": edges}))
        weights = None if self.weights is None else self._weights(planner, x)
        out = planner.output((self.bins,), DType.int64 if weights is None else DType.float64)
        bounds: Ints = ()
        # Smaller ends are edges as they are.
        if x.dtype in (DType.int64, DType.uint64) and max(map(abs, self.ends)) > 2**53:
            limits = np.iinfo(x.dtype.dtype)
            low, high = max(math.ceil(self.ends[0]), limits.min), min(math.floor(self.ends[1]), limits.max)
            bounds = (int(low), int(high)) if low <= high else (1, 0)
        return Planned(CountSpec(flat(planner, x), edges, bounds, weights, out.spec, planner.status(1)), out)

    def _weights(self, planner: Planner, x: ArraySpec) -> ArraySpec:
        assert self.weights is not None
        name, weights = planner.name, planner.read("weights", self.weights)
        if weights.shape != x.shape:
            raise ValueError(f"{name}: weights must have the shape {x.shape} of x, got {weights.shape}")
        check_real(name, weights=weights)
        if weights.dtype is not DType.float64:
            weights = planner.convert(weights, DType.float64)
        return flat(planner, weights)


@composed
async def bincount(x: Operand, weights: Operand | None = None, *, minlength: int = 0) -> AccelRef:
    """Count how often each integer is there, as `numpy.bincount` does.

    The largest number is found first, and read by the host: so it waits for the device twice.

    Args:
        x: A vector of integers from 0 on.
        weights: Real numbers of the same shape, which are added up in float64 in the place of ones.
        minlength: The least length of the result.

    Returns:
        Counts of int64, or sums of float64: one more than the largest number of `x`, and at least
        `minlength`.

    Raises:
        TypeError: `x` is not of integers, `weights` is complex, or `minlength` is not an integer.
        ValueError: `x` is not a vector, `weights` has another shape, or `minlength` is negative.
        LibraryError: A number is negative.
        OutOfMemoryError: The largest number is too large.
    """
    name = "arrays.bincount"
    device = device_of(name, x, weights)
    minlength = bounded_integer(name, "minlength", minlength)
    if x.ndim != 1 or minlength < 0:
        raise ValueError(
            f"{name}: x must be a vector, and minlength not negative, got shape {x.shape}, {minlength}"
        )
    if DType.of(x.dtype).kind not in ("int", "uint"):
        raise TypeError(f"{name}: x must have an integer dtype, got {x.dtype}")
    maximum = int(await (await device.ask(_MAX.compute(x))).item()) if x.size else -1
    return await device.ask(Count(name, x, None, weights, max(maximum + 1, minlength)))


@composed
async def histogram(
    x: Operand,
    bins: int | Operand = 10,
    *,
    range: tuple[float, float] | None = None,
    weights: Operand | None = None,
) -> HistogramResult:
    """Count the elements of bins, as `numpy.histogram` does.

    A bin has its lower edge, and the last one its upper edge too. NaN is in none. Integers of 64 bits are
    compared exactly, also with the ends of `range` before they are rounded to edges.

    Args:
        x: An array of real numbers.
        bins: How many bins of one width there are, or their edges: a vector in ascending order. The order is
            not checked where it is on the device.
        range: The first and the last edge, where `bins` is a number. By default the least and the largest
            element, which are found first, and read by the host.
        weights: Real numbers with the shape of `x`, which are added up in float64 in the place of ones.

    Returns:
        How many elements there are in each bin, of int64, or sums of float64; and the edges.

    Raises:
        TypeError: `x`, the edges or `weights` are complex, or `bins` is not an integer.
        ValueError: There are no bins, or more bins than numbers in the range; edges descend, the range is not
            finite, or `weights` has another shape.
    """
    name = "arrays.histogram"
    device = device_of(name, x, bins if isinstance(bins, AccelRef) else None, weights)
    ends: tuple[float, float] = (0, 0)
    if DType.of(x.dtype).kind == "complex":
        raise TypeError(f"{name}: x must be real, because complex numbers cannot be compared; got {x.dtype}")
    if isinstance(bins, np.ndarray):
        DType.of(host_array(f"{name}: bins", bins).dtype)
    if isinstance(bins, (AccelRef, np.ndarray)):
        if bins.ndim != 1 or len(bins) < 2:
            raise ValueError(f"{name}: bins must be a vector of at least two edges, got shape {bins.shape}")
        if isinstance(bins, np.ndarray) and np.any(bins[1:] < bins[:-1]):
            raise ValueError(f"{name}: bins must be edges in ascending order, got {bins}")
        edges = bins if isinstance(bins, AccelRef) else await device.put(bins)
    else:
        count = bounded_integer(name, "bins", bins, "an integer or an array of edges")
        if count < 1:
            raise ValueError(f"{name}: bins must be at least 1, got {bins}")
        ends = await _range(name, x, range)
        inexact = DType.of(x.dtype) if DType.of(x.dtype).is_inexact else DType.float64
        edges = await _edges(name, device, float(ends[0]), float(ends[1]), count, inexact)
    return HistogramResult(await device.ask(Count(name, x, edges, weights, len(edges) - 1, ends)), edges)


async def _edges(name: str, device: Device, low: float, high: float, count: int, dtype: DType) -> AccelRef:
    """Make edges for bins with equal width, which must be different numbers in the dtype."""
    # The distance of numbers is least at the end nearer to 0, so too many bins are refused before they are
    # made.
    smallest = min(abs(low), abs(high)) if low * high > 0 else 0.0
    min_spacing, max_spacing = (
        float(np.spacing(dtype.dtype.type(end / 2))) for end in (smallest, max(abs(low), abs(high)))
    )
    width = high / count - low / count
    if width >= min_spacing or count == 1:
        edges = await linspace(device, low, high, count + 1, dtype=dtype)
        # Edges need no comparison if their distance exceeds that of numbers anywhere in the range.
        if width >= 4 * max_spacing or await (await _ASCEND(edges[1:], edges[:-1])).item():
            return edges
    raise ValueError(
        f"{name}: {count} bins are too many: from {low} to {high} {dtype} has not as many numbers"
    )


async def _range(name: str, x: Operand, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the first and the last edge of bins, by NumPy's rules; integers are not rounded."""
    if bounds is not None:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError(f"{name}: range must be two numbers, got {bounds!r}")
        low, high = [check_number(name, "range", number, is_real=True) for number in bounds]
    elif math.prod(x.shape):
        low, high = [await reduce(x).item() for reduce in (_MIN, _MAX)]
    else:
        low, high = 0.0, 1.0
    # Integers may be larger than each float64.
    limit = float(np.finfo(np.float64).max)
    is_finite = all(-limit <= end <= limit for end in (low, high))
    if bounds is None and not is_finite:
        raise ValueError(f"{name}: pass range, because x has elements that are not finite")
    if not is_finite or low > high:
        range_text = " to ".join(map(shown, (low, high)))
        raise ValueError(f"{name}: range must be finite and ascend, got {range_text}")
    return (low, high) if low < high else (low - 0.5, high + 0.5)


_ASCEND: Final = Reduction("after > before", "all", operation="arrays.histogram")
_MIN, _MAX = (Reduction("x", name, operation=f"arrays.{name}") for name in ("min", "max"))
