"""Pairs of points that are near one another: counted, then written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from .. import arrays
from ..arrays._checks import placed
from ..devices import AccelRef, Operand
from ..devices.operations._calls import composed
from ..jit import CompileOptions, Kernel, cdiv, reads, scalar, writes
from ._cells import bounds, cell_list, check_points, numbers

__all__ = ["neighbours"]

_Numbers: TypeAlias = npt.NDArray[Any]
_NAME = "spatial.neighbours"
_SCALARS = {"n": "int64", "axes": "int32", "radius": "float64", "lists": "bool", "total": "int64"}
_READ = {"points": "float64", "order": "int64", "starts": "int64", "grid": "float64", "begins": "int64"}


_kernel = Kernel(
    "neighbours", Path(__file__).with_name("neighbours.cu").read_text(encoding="utf-8"),
    parameters={
        **{name: scalar(dtype) for name, dtype in _SCALARS.items()},
        **{name: reads(dtype) for name, dtype in _READ.items()},
        "out": writes("int64", shape=lambda total: total),
    },
    grid=lambda n: cdiv(n, 128), block=128, options=CompileOptions(fma=False), cpu=f"{__name__}:by_tree",
)  # fmt: skip


def by_tree(n: int, axes: int, radius: float, lists: bool, total: int, *arrays: _Numbers) -> None:
    """Compute it on the CPU backend, where SciPy's tree needs no cells."""
    points, _, _, (low, _, _, box), _, out = arrays
    if box.any():
        points = (points - low) % box
        # What is a little below 0 rounds to the upper end.
        points[points >= box] = 0.0
    tree = cKDTree(points, compact_nodes=False, balanced_tree=False, boxsize=box if box.any() else None)
    pairs = tree.query_pairs(radius, output_type="ndarray").astype(np.int64)
    if lists:
        both = np.concatenate([pairs @ [n, 1], pairs @ [1, n]])
        both.sort()
        out[:] = both % n
    else:
        out[:] = np.bincount(pairs.reshape(-1), minlength=n)


@composed
async def neighbours(
    points: Operand, radius: float, *, box: float | Sequence[float] | None = None
) -> tuple[AccelRef, AccelRef]:
    """Find the other points within a radius of each: those of i are ``indices[starts[i]:starts[i + 1]]``.

    Distances are computed in float64; a pair whose distance is the radius but for rounding may be there or
    not. On a GPU each point looks at the cells around it, see `cell_list`; on the CPU backend SciPy's
    `cKDTree` finds the pairs. The host reads how many there are, and without a box the least and greatest
    coordinates.

    Args:
        points: The points, real and finite, of shape (n, d), with d from 1 to 3.
        radius: The largest distance, positive.
        box: Periods of a periodic box, one for all axes or one for each: the distance is that to the nearest
            image.

    Returns:
        Starts and indices of compressed sparse rows, of int64. The indices of a point ascend.

    Raises:
        TypeError: The points are no array, or complex; or `radius` or `box` is no number.
        ValueError: The points have another shape or are not finite, or `radius` or `box` is not finite and
            positive.
        NotSupportedError: See `arrays.argsort`.
    """
    [points] = await placed(_NAME, points=points)
    axes, count = check_points(_NAME, points), points.shape[0]
    [reach] = numbers(_NAME, "radius", radius, 1)
    points = await points.cast("float64")
    low, high = await bounds(_NAME, points)
    extents = high - low if box is None else numbers(_NAME, "box", box, axes)
    # So rounding moves no point further than to the next cell. There are not many more cells than points.
    size = max(reach * (1 + 1e-6), float(extents.max()) / 1024, 1e-300)
    while math.prod(extents // size + 1) > 4 * count + 64:
        size *= 2
    chosen: Any = {"low": low, "shape": extents // size + 1} if box is None else {"box": extents}
    cells = await cell_list(points, size, **chosen)
    grid = np.array([cells.low, cells.size, cells.shape, 0 * extents if box is None else extents])
    given = (points, cells.order, cells.starts, grid)
    counts = (
        (await _kernel(count, axes, reach, False, count, *given, cells.starts))[0] if count else cells.order
    )
    starts = await arrays.cumulative_sum(counts, include_initial=True)
    total = int(await starts[-1].item())
    found = (await _kernel(count, axes, reach, True, total, *given, starts))[0] if total else cells.order[:0]
    return starts, found
