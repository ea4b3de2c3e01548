"""Reductions along axes, by the array API standard."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Never

from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Operand
from ..expressions import Reduction
from ._actor import LIBRARY

__all__ = ["sum"]


async def sum(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    *,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
    out: AccelRef | None = None,
    **_unknown: Never,
) -> AccelRef:
    """Add the elements of an array along axes, as the array API standard's ``sum`` does.

    float16, bfloat16 and float32 are added in float64, complex64 in complex128, and the sum is rounded once.
    The order of the elements differs between devices and from NumPy's. A sum of no elements is 0.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("sums") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.arange(6, dtype=np.int8).reshape(2, 3))
    ...         total = await ta.arrays.sum(x, axis=1)
    ...         print(total.dtype, await total.to_host())
    >>> trio.run(main)
    int64 [ 3 12]

    Args:
        x: The array.
        axis: Axis or axes to add along, from the end for negative ones; None for all.
        dtype: Type that the elements are converted to before they are added. By default it is that of `x`; of
            whole numbers and truth values `int64`, of unsigned ones `uint64`.
        keepdims: Whether the axes that are added along stay, with one element.
        out: Array to write to.

    Returns:
        The sums.

    Raises:
        TypeError: `x` is no array, there is no such dtype, or the sum does not become that of `out`.
        ValueError: An axis that there is not, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    reduction = _reduction("sum", None if dtype is None else DType.of(dtype).value)
    return await reduction(x, axis=axis, keepdims=keepdims, out=out, **_unknown)


@functools.cache
def _reduction(name: str, dtype: str | None) -> Reduction:
    """A reduction of the elements as they are; its name is the standard's, too."""
    return Reduction("x", name, dtype=dtype, operation=f"arrays.{name}", library=LIBRARY)
