"""Points in the cells of a regular grid, and their neighbours, computed by functions of arrays."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import arrays
from ..arrays._checks import check_real, placed
from ..backends.base import HostArray
from ..devices import AccelRef, Operand, composed
from ..expressions import Elementwise
from ..jit import CompileOptions, Kernel, cdiv, reads, scalar, updates, writes

__all__ = ["CellList", "cell_list", "neighbours"]

_NAME, _NEIGHBOURS_NAME = "spatial.cell_list", "spatial.neighbours"
_Floats: TypeAlias = npt.NDArray[np.float64]
_PerAxis: TypeAlias = "float | Sequence[float]"
# Cells have numbers of 32 bits, and so has the outside.
_MAX_CELLS = (1 << 31) - 2
_SCALARS = {"n": "int64", "axes": "int32", "radius": "float64", "lists": "bool", "total": "int64"}
_READ = {"points": "float64", "order": "int64", "starts": "int64", "grid": "float64", "begins": "int64"}
_kernel = functools.partial(
    Kernel,
    code=Path(__file__).with_name("points.cu").read_text(encoding="utf-8"),
    grid=lambda n: cdiv(n, 128),
    block=128,
    skip_empty=True,
    options=CompileOptions(fma=False),
)
# The host reads nothing, so a graph may contain it.
_count = {
    dtype: _kernel(
        f"count_cells<{c_type}>",
        cpu=f"{__name__}:by_counting",
        parameters={
            "n": scalar("int64"),
            "cells": reads(dtype),
            "counts": updates("int64", copy=True),
        },
    )
    for dtype, c_type in (("uint16", "unsigned short"), ("int32", "int"))
}
_neighbour_kernel = _kernel(
    "neighbours",
    cpu=f"{__name__}:by_tree",
    parameters={
        **{name: scalar(dtype) for name, dtype in _SCALARS.items()},
        **{name: reads(dtype) for name, dtype in _READ.items()},
        "out": writes("int64", shape=lambda total: total),
    },
)


class CellList(NamedTuple):
    """Points by cells; see `cell_list`."""

    order: AccelRef
    """Indices of the points, by cells, of int64. Those of one cell ascend."""
    starts: AccelRef
    """Where each cell begins in `order`, and where the last one ends: one more than there are cells."""
    low: tuple[float, ...]
    """Lower corner of the grid."""
    size: tuple[float, ...]
    """Extents of a cell."""
    shape: tuple[int, ...]
    """Cells along each axis."""


@composed
async def cell_list(
    points: Operand,
    size: _PerAxis,
    *,
    low: _PerAxis | None = None,
    shape: _PerAxis | None = None,
    box: _PerAxis | None = None,
) -> CellList:
    """Sort points by the cells of a grid: the points of cell c are ``order[starts[c]:starts[c + 1]]``.

    Cells are numbered in row-major order: cell ``(i, j, k)`` is number ``(i * shape[1] + j) * shape[2] + k``.
    An expression reads a cell by a range: ``sum(f(x[order[j]]) for j in range(starts[c], starts[c + 1]))``. A
    point is in the cell ``floor((x - low) / size)``, computed in float64.

    With a given grid a graph may contain it, because the host then reads nothing.

    Points outside of the grid, and points with a NaN, are in no cell. They come last in `order`, after
    ``starts[-1]``.

    >>> import numpy as np, trio, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("cells") as system, system.open_device("cpu") as device:
    ...         points = await device.put(np.array([[2.5], [0.5], [2.25], [9.0]]))
    ...         cells = await ta.spatial.cell_list(points, 1.0, low=0.0, shape=4)
    ...         print(await cells.order.to_host(), await cells.starts.to_host())
    >>> trio.run(main)
    [1 0 2 3] [0 1 1 3 3]

    Args:
        points: The points, real, of shape (n, d), with d from 1 to 3.
        size: Extent of a cell, the same along all axes or one for each.
        low: Lower corner of the grid. Without `low`, `shape` and `box`, the grid is that around all points,
            from the least coordinates on. These are read by the host, and must be finite.
        shape: Cells along each axis. It is given with `low`.
        box: Periods of a periodic box: coordinates count modulo these, from `low` on, which is 0 where it is
            left out. The grid has as many cells as fit, at least one, and these fill the box.

    Returns:
        The order, of int64, where each cell begins in it, of int64, and the grid.

    Raises:
        TypeError: The points are not an array, or are complex; or a size is not a number.
        ValueError: The points have another shape, a size is not positive and finite, only one of `low` and
            `shape` is given, `shape` and `box` are both given, the grid has more than 2**31 - 2 cells, or a
            grid around points with a non-finite coordinate is requested.
        NotSupportedError: See `arrays.argsort`.
    """
    [points] = await placed(_NAME, points=points)
    axes = _check_points(_NAME, points)
    sizes = _numbers(_NAME, "size", size, axes)
    if box is not None:
        if shape is not None:
            raise ValueError(f"{_NAME}: shape follows from box; leave one of them out")
        corner = _numbers(_NAME, "low", 0.0 if low is None else low, axes, is_positive=False)
        periods = _numbers(_NAME, "box", box, axes)
        # A quotient that should be an integer may be a little less.
        extents = np.maximum(np.floor(_quotient(periods, sizes) + 1e-9), 1)
        sizes = periods / extents
    elif low is None and shape is None:
        corner, high = await _bounds(_NAME, points)
        extents = np.floor(_quotient(high - corner, sizes)) + 1
    elif low is not None and shape is not None:
        corner = _numbers(_NAME, "low", low, axes, is_positive=False)
        extents = _numbers(_NAME, "shape", shape, axes)
    else:
        raise ValueError(f"{_NAME}: low and shape must be given together")
    total = math.prod(extents.tolist())
    if total > _MAX_CELLS or (extents % 1).any():
        problem = (
            f"more than {_MAX_CELLS} cells; choose a larger size" if total > _MAX_CELLS else "no integers"
        )
        raise ValueError(f"{_NAME}: a grid of shape {tuple(extents.tolist())} has {problem}")
    cells = tuple(map(int, extents.tolist()))
    # A radix sort of 16 bits is the fastest (D191).
    dtype, device = "uint16" if total < 1 << 16 else "int32", points.device
    expression = _cells(axes, box is not None, dtype)
    grid = (corner.tolist(), sizes.tolist(), cells)
    cell_numbers = await expression(
        *[points[:, axis] for axis in range(axes)], int(total), *itertools.chain(*grid)
    )
    order = await arrays.argsort(cell_numbers)
    if device.info.runs_kernels:
        [counts] = await _count[dtype](
            points.shape[0], cell_numbers, await device.zeros(int(total) + 1, "int64")
        )
        starts = (await arrays.cumulative_sum(counts, include_initial=True))[:-1]
    elif points.shape[0]:
        starts = await _starts(await arrays.take(cell_numbers, order), points.shape[0], shape=int(total) + 1)
    else:
        starts = await device.zeros(int(total) + 1, "int64")
    return CellList(order, starts, *map(tuple, grid))


@composed
async def neighbours(
    points: Operand, radius: float, *, box: float | Sequence[float] | None = None
) -> tuple[AccelRef, AccelRef]:
    """Find the points within a radius of each point i: ``indices[starts[i]:starts[i + 1]]``.

    Distances are computed in float64; a pair at the distance of the radius may be included or not, because of
    rounding. On a GPU each point checks the cells around it, see `cell_list`; on the CPU backend SciPy's
    `cKDTree` finds the pairs. The host reads the number of pairs, and without a box the least and greatest
    coordinates.

    Args:
        points: The points, real and finite, of shape (n, d), with d from 1 to 3.
        radius: The largest distance, positive.
        box: Periods of a periodic box, one for all axes or one for each: the distance is that to the nearest
            image.

    Returns:
        Starts and indices of compressed sparse rows, of int64. The indices of a point ascend.

    Raises:
        TypeError: The points are not an array, or are complex; or `radius` or `box` is not a number.
        ValueError: The points have another shape or are not finite, or `radius` or `box` is not finite and
            positive.
        NotSupportedError: See `arrays.argsort`.
    """
    [points] = await placed(_NEIGHBOURS_NAME, points=points)
    axes, count = _check_points(_NEIGHBOURS_NAME, points), points.shape[0]
    [reach] = _numbers(_NEIGHBOURS_NAME, "radius", radius, 1).tolist()
    points = await points.cast("float64")
    low, high = await _bounds(_NEIGHBOURS_NAME, points)
    extents = high - low if box is None else _numbers(_NEIGHBOURS_NAME, "box", box, axes)
    # So rounding moves no point further than to the next cell. There are not many more cells than points.
    size = min(max(reach * (1 + 1e-6), float(extents.max()) / 1024, 1e-300), 1e300)
    while math.prod(extents // size + 1) > 4 * count + 64:
        size *= 2
    chosen: Any = {"low": low, "shape": extents // size + 1} if box is None else {"box": extents}
    cells = await cell_list(points, size, **chosen)
    grid = np.array([cells.low, cells.size, cells.shape, 0 * extents if box is None else extents])
    if not points.device.info.runs_kernels:
        return await _by_pairs(points, cells, grid, reach)
    inputs = (points, cells.order, cells.starts, grid)
    [counts] = await _neighbour_kernel(count, axes, reach, False, count, *inputs, cells.starts)
    starts = await arrays.cumulative_sum(counts, include_initial=True)
    total = int(await starts[-1].item())
    [indices] = await _neighbour_kernel(count, axes, reach, True, total, *inputs, starts)
    return starts, indices


# Bisection of the points' cells in order, because the host would read a result of `searchsorted`.
_starts = Elementwise[AccelRef](
    """
first = 0
last = n
for step in range(32):
    middle = (first + last) // 2
    is_before = (first < last) & (cells[minimum(middle, n - 1)] < i(0))
    last = where(is_before, last, middle)
    first = where(is_before, middle + 1, first)
start = int64(minimum(first, last))
""",
    inputs=("cells", "n"),
    operation=_NAME,
)


async def _by_pairs(
    points: AccelRef, cells: CellList, grid: _Floats, radius: float
) -> tuple[AccelRef, AccelRef]:
    """Look at all pairs of a point and one in the cells around it, by functions of arrays.

    A row is a point and one of the cells around it, of which there are three along each axis. A pair is a
    row and a place in its cell.
    """
    (count, axes), device = points.shape, points.device
    if not count:
        return await device.zeros(1, "int64"), await device.empty(0, "int64")
    edges = await device.put(grid)
    begins, lengths = await _around(axes)(points, cells.starts, edges, shape=count * 3**axes)
    ends = await arrays.cumulative_sum(lengths)
    # Each point is a pair with itself.
    total = int(await ends[-1].item())
    numbers = await arrays.arange(device, total)
    rows = await arrays.searchsorted(ends, numbers, side="right")
    inputs = (rows, numbers, ends, begins, cells.order, points, edges, radius)
    pairs, is_near = await _is_near(axes)(*inputs, count)
    sorted_pairs = await arrays.sort(await arrays.compress(is_near, pairs))
    firsts = await arrays.arange(device, 0, (count + 1) * count, count)
    return await arrays.searchsorted(sorted_pairs, firsts), await arrays.remainder(sorted_pairs, count)


def by_counting(n: int, cells: HostArray, counts: HostArray) -> None:
    """Count points of cells on the CPU backend."""
    counts[:] = np.bincount(cells, minlength=counts.size)


def by_tree(n: int, axes: int, radius: float, lists: bool, total: int, *arrays: HostArray) -> None:
    """Compute it on the CPU backend, where SciPy's tree needs no cells."""
    # A thread of the device imports it, because it takes longer than the package.
    from scipy.spatial import cKDTree

    points, _, _, (low, _, _, box), _, out = arrays
    if box.any():
        points = (points - low) % box
        # A coordinate slightly below 0 rounds to the upper end.
        points[points >= box] = 0.0
    tree = cKDTree(points, compact_nodes=False, balanced_tree=False, boxsize=box if box.any() else None)
    pairs = tree.query_pairs(radius, output_type="ndarray").astype(np.int64)
    if lists:
        both = np.concatenate([pairs @ [n, 1], pairs @ [1, n]])
        both.sort()
        out[:] = both % n
    else:
        out[:] = np.bincount(pairs.reshape(-1), minlength=n)


@functools.cache
def _around(axes: int) -> Elementwise[tuple[AccelRef, AccelRef]]:
    """Make the expression of where the cells around each point begin, and how many points they have."""
    cells = 3**axes
    steps, cell, inside = ["here = True"], "0", "here"
    for a in range(axes):
        steps += [
            f"n{a} = int64(g[2, {a}]); f{a} = floor((x[i(0) // {cells}, {a}] - g[0, {a}]) / g[1, {a}])",
            f"is{a} = g[3, {a}] > 0; f{a} = f{a} - where(is{a}, floor(f{a} / n{a}) * n{a}, 0)",
            f"o{a} = i(0) // {3 ** (axes - 1 - a)} % 3",
            f"c{a} = where(is{a} & (n{a} < 3), o{a}, int64(minimum(f{a}, n{a} - 1)) + o{a} - 1)",
        ]
        inside += f" & where(is{a}, (n{a} > 2) | (o{a} < n{a}), (c{a} >= 0) & (c{a} < n{a}))"
        cell = f"({cell}) * n{a} + (c{a} + n{a}) % n{a}"
    steps.append(f"cell = {cell}; begin = s[cell]; length = where({inside}, s[cell + 1] - begin, 0)")
    return Elementwise(
        "; ".join(steps), inputs=("x", "s", "g"), outputs=("begin", "length"), operation=_NEIGHBOURS_NAME
    )


@functools.cache
def _is_near(axes: int) -> Elementwise[tuple[AccelRef, AccelRef]]:
    """Make the expression of each pair's number, which orders the pairs, and whether it is near."""
    steps = [f"i = row // {3**axes}; place = pair - where(row > 0, ends[maximum(row - 1, 0)], 0)"]
    steps.append("j = order[begins[row] + place]")
    for a in range(axes):
        steps.append(f"d{a} = x[i, {a}] - x[j, {a}]; b{a} = g[3, {a}]")
        steps.append(f"d{a} = d{a} - where(b{a} > 0, round(d{a} / where(b{a} > 0, b{a}, 1)) * b{a}, 0)")
    square = " + ".join(f"d{a} * d{a}" for a in range(axes))
    steps.append(f"number = i * n + j; near = (i != j) & ({square} <= radius * radius)")
    return Elementwise(
        "; ".join(steps),
        inputs=("row", "pair", "ends", "begins", "order", "x", "g", "radius", "n"),
        outputs=("number", "near"),
        operation=_NEIGHBOURS_NAME,
    )


async def _bounds(name: str, points: AccelRef) -> tuple[_Floats, _Floats]:
    """Read the least and the greatest coordinates along each axis; no points are at 0.

    Raises:
        ValueError: One is not finite, or their distance is not.
    """
    if not points.shape[0]:
        return np.zeros(points.shape[1]), np.zeros(points.shape[1])
    ends = [
        (await reduction(points, axis=0).to_host()).astype(np.float64)
        for reduction in (arrays.min, arrays.max)
    ]
    if not np.isfinite(ends).all():
        raise ValueError(f"{name}: points must be finite, got coordinates from {ends[0]} to {ends[1]}")
    with np.errstate(over="ignore"):
        is_near = np.isfinite(ends[1] - ends[0]).all()
    if not is_near:
        raise ValueError(
            f"{name}: points must be no further apart than float64 holds, got {ends[0]} to {ends[1]}"
        )
    return ends[0], ends[1]


def _quotient(extents: _Floats, sizes: _Floats) -> _Floats:
    """Divide by the sizes of cells; quotients that are too large become infinite."""
    with np.errstate(over="ignore"):
        return extents / sizes


def _check_points(name: str, points: AccelRef) -> int:
    """Return of how many coordinates points are.

    Raises:
        TypeError: They are complex.
        ValueError: They are in no plane, on no line and not in space.
    """
    check_real(name, points=points.spec)
    if points.ndim != 2 or not 1 <= points.shape[1] <= 3:
        raise ValueError(f"{name}: points must have shape (n, d), with d from 1 to 3, got {points.shape}")
    return points.shape[1]


def _numbers(name: str, argument: str, value: Any, axes: int, *, is_positive: bool = True) -> _Floats:
    """Take a number for each axis, or one for all.

    Raises:
        TypeError: Something else.
        ValueError: Too few or too many, or one is not finite or not positive.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: {argument} must be a real number or one for each axis, got {value!r}")
    if array.shape not in ((), (axes,)) or not np.isfinite(array).all() or (is_positive and array.min() <= 0):
        requirement = "finite and positive" if is_positive else "finite"
        raise ValueError(f"{name}: {argument} must be {requirement}, one or {axes} numbers, got {value!r}")
    return np.broadcast_to(array, axes).astype(np.float64)


@functools.cache
def _cells(axes: int, is_periodic: bool, dtype: str) -> Elementwise[AccelRef]:
    """Make the expression of a point's cell; points outside are in an additional one."""
    dims = range(axes)
    steps = [f"f{a} = (float64(x{a}) - low{a}) / size{a}" for a in dims]
    # A place below the upper end may round to it.
    wrapped = "floor(minimum(f{a} - floor(f{a} / n{a}) * n{a}, n{a} - 1))"
    steps += [f"c{a} = " + (wrapped if is_periodic else "floor(f{a})").format(a=a) for a in dims]
    inside = " & ".join(f"(c{a} >= 0) & (c{a} < n{a})" for a in dims)
    cell = functools.reduce(lambda cell, a: f"({cell}) * n{a} + c{a}", dims[1:], "c0")
    steps.append(f"y = {dtype}(where({inside}, {cell}, total))")
    x, *grid = ([f"{name}{a}" for a in dims] for name in ("x", "low", "size", "n"))
    return Elementwise("; ".join(steps), inputs=[*x, "total", *itertools.chain(*grid)], operation=_NAME)
