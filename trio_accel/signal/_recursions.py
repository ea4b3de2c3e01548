"""Kernels of filters: a recursion along each row, and sums of neighbours.

SciPy computes them on the CPU backend. A GPU has one thread for each row of a recursion.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..backends.base import DType, HostArray
from ..devices import AccelRef
from ..jit import CompileOptions, Kernel, cdiv, reads, scalar, writes

# States of higher orders do not fit into registers.
_MAX_UNROLLED_ORDER = 16
_NAMES = {"float32": "float", "float64": "double", "complex64": "c64", "complex128": "c128"}
_WIDE = {"float": "double", "c64": "c128"}
_CODE = Path(__file__).with_name("recursions.cu").read_text(encoding="utf-8")


def _kernel(
    name: str, cpu: Callable[..., None], scalars: dict[str, str], read: str, dtype: DType, grid: Any
) -> Kernel:
    return Kernel(
        name,
        _CODE,
        grid=grid,
        block=32,
        skip_empty=True,
        cpu=f"{__name__}:{cpu.__name__}",
        # A fused product keeps digits that SciPy rounds, so results would differ.
        options=CompileOptions(fma=False),
        parameters={
            **{parameter: scalar(kind) for parameter, kind in scalars.items()},
            **{parameter: reads(dtype, layout="packed") for parameter in read.split()},
            "out": writes(dtype, shape=lambda x: x.shape),
            "last": writes(dtype, shape=lambda state: state.shape),
        },
    )


@functools.cache
def _recursion(dtype: DType, order: int) -> Kernel:
    def grid(lines: int) -> int:
        return cdiv(lines, 32)

    scalars = {"lines": "int64", "count": "int64", "sections": "int32", "order": "int32"}
    name = f"filter_rows<{_NAMES[dtype.value]}, {order}>"
    return _kernel(name, by_recursion, scalars, "b a x state", dtype, grid)


@functools.cache
def _taps(dtype: DType) -> Kernel:
    def grid(lines: int, count: int, order: int) -> int:
        return cdiv(lines * (count + order), 32)

    name, scalars = _NAMES[dtype.value], {"lines": "int64", "count": "int64", "order": "int32"}
    wide = _WIDE.get(name, name)
    return _kernel(f"filter_taps<{name}, {wide}>", by_taps, scalars, "b x state", dtype, grid)


def filter_rows(b: HostArray, a: HostArray, x: AccelRef, state: Any) -> Awaitable[tuple[AccelRef, ...]]:
    """Filter rows by sections in series.

    Args:
        b: Numerators, of shape (sections, order + 1).
        a: Denominators, of the same shape, whose first elements are 1; or of one element, for taps only.
        x: The rows, of shape (lines, count).
        state: States before the first elements, of shape (lines, sections, order).

    Returns:
        The filtered rows, and the states after the last elements. All have one dtype.
    """
    (lines, count), (sections, width) = x.shape, b.shape
    order = width - 1
    if a.shape[1] == 1:
        return _taps(x.dtype)(lines, count, order, b, x, state)
    kernel = _recursion(x.dtype, order if order <= _MAX_UNROLLED_ORDER else 0)
    return kernel(lines, count, sections, order, b, a, x, state)


def by_recursion(lines: int, count: int, sections: int, order: int, *arrays: HostArray) -> None:
    """Compute a recursion on the CPU backend."""
    import scipy.signal

    b, a, x, state, out, final_state = arrays
    if not count:
        final_state[...] = state  # SciPy leaves it as the memory was.
    elif sections > 1:
        states = np.moveaxis(state, 1, 0)
        out[...], section_states = cast("Any", scipy.signal.sosfilt)(np.hstack([b, a]), x, zi=states)
        final_state[...] = np.moveaxis(section_states, 0, 1)
    else:
        out[...], final_state[:, 0] = cast("Any", scipy.signal.lfilter)(b[0], a[0], x, zi=state[:, 0])


def by_taps(lines: int, count: int, order: int, b: HostArray, *arrays: HostArray) -> None:
    """Compute sums of neighbours on the CPU backend."""
    by_recursion(lines, count, 1, order, b, np.ones((1, 1), b.dtype), *arrays)
