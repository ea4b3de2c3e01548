"""Recursive filters along an axis, as rows of kernels.

Each row is computed step by step. A filter can also be written as products of a block of the signal with
matrices, with powers of a matrix to skip blocks (C. W. Barnes and S. Shinnaka, "Block-shift invariance and
block implementation of discrete-time filters", 1980). That failed, because rounding such a power moves poles
near 1 out of the unit circle, and because a product with a NaN or an infinity ruins the whole block.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import asarray, broadcast_to, moveaxis, reshape
from ..backends.base import DType, HostArray
from ..devices import AccelRef, composed
from ..expressions import axis_of, check_ref
from ._recursions import filter_rows

__all__ = ["lfilter", "sosfilt"]


async def _filtered(
    name: str, b: HostArray, a: HostArray, x: AccelRef, axis: int, zi: AccelRef | npt.ArrayLike | None
) -> tuple[AccelRef, AccelRef]:
    """Filter along an axis by sections of one order in series; return also the last states.

    Args:
        name: The function.
        b: Numerators, of shape (sections, order + 1).
        a: Denominators, of the same shape, or of one element.
        x: The signals.
        axis: The axis.
        zi: States to begin with, of shape (sections, ..., order, ...); None for zeros.
    """
    check_ref(name, "x", x)
    axis_index, moved = axis_of(name, x, axis), moveaxis(x, axis, -1)
    sections, order, count = len(b), b.shape[1] - 1, moved.shape[-1]
    shape = (sections, *x.shape[:axis_index], order, *x.shape[axis_index + 1 :])
    lines = math.prod(moved.shape[:-1])
    initial_state: Any = zi if zi is None or isinstance(zi, AccelRef) else np.asarray(zi)
    kinds = [DType.of(array.dtype).dtype for array in (x, b, a, initial_state) if array is not None]
    dtype = DType.of(np.result_type(*kinds, np.float32))
    if initial_state is None:
        state: Any = np.zeros((lines, sections, order), dtype.dtype)
    else:
        # One state may be there for all signals along an axis, as in SciPy.
        allowed = [{extent} if axis == axis_index + 1 else {1, extent} for axis, extent in enumerate(shape)]
        if len(initial_state.shape) != len(shape) or not all(
            map(operator.contains, allowed, initial_state.shape)
        ):
            # States of `lfilter` come with one section in front, which its caller has not given.
            begin = name == "lfilter"
            raise ValueError(
                f"{name}: zi must have the shape {shape[begin:]}, got {initial_state.shape[begin:]}"
            )
        start = broadcast_to(await asarray(x.device, initial_state, dtype=dtype), shape)
        state = await reshape(moveaxis(start, (0, axis_index + 1), (-2, -1)), (lines, sections, order))
    rows = await reshape(moved if dtype is x.dtype else await moved.cast(dtype), (lines, count))
    with np.errstate(all="ignore"):
        first = a[:, :1].astype(dtype.dtype)
        forth, back = (coefficients.astype(dtype.dtype) / first for coefficients in (b, a))
    output, final_state = await filter_rows(forth, back, rows, state)
    final_state = moveaxis(
        final_state.reshape((*moved.shape[:-1], sections, order)), (-2, -1), (0, axis_index + 1)
    )
    return moveaxis(output.reshape(moved.shape), -1, axis_index), final_state


@composed
async def lfilter(b: npt.ArrayLike, a: npt.ArrayLike, x: AccelRef, axis: int = -1, zi: Any = None) -> Any:
    """Filter by a rational transfer function along an axis, as `scipy.signal.lfilter`.

    Sums are made in SciPy's order, in the dtype of the result. Each signal is one sequence of steps, so a GPU
    filters many signals in the time of one. float32 coefficients and signals give float32; a list of Python
    floats is float64. An exponential average of weight ``w`` is ``lfilter([w], [1, w - 1], x)``.

    Args:
        b: Coefficients of the numerator, on the host.
        a: Coefficients of the denominator, on the host.
        x: The signals, real or complex.
        axis: The axis along which they are filtered.
        zi: States of the delays to begin with: with the shape of `x`, with ``max(len(a), len(b)) - 1``
            elements along the axis; on the host or the device. None for zeros.

    Returns:
        The filtered signals, with the shape of `x`. With `zi`, a pair of them and the last states.

    Raises:
        TypeError: `x` is not an array of a device.
        ValueError: Coefficients are not vectors, ``a[0]`` is 0, the axis is out of range, or `zi` has another
            shape.
    """
    coefficients = [np.atleast_1d(np.asarray(vector)) for vector in (b, a)]
    kind = np.result_type(*coefficients, np.float32)
    if (
        any(vector.ndim != 1 or not vector.size for vector in coefficients)
        or kind.kind not in "fc"
        or not coefficients[1][0]
    ):
        raise ValueError(f"lfilter: b and a must be vectors of numbers, and a[0] not 0, got {b!r} and {a!r}")
    # Without a recursion, a padded `a` would multiply infinities by 0.
    length = 1 if len(coefficients[1]) == 1 else max(map(len, coefficients))
    forth, back = (
        np.pad(vector.astype(kind), (0, max(length - len(vector), 0)))[None] for vector in coefficients
    )
    states = zi[None] if isinstance(zi, AccelRef) else zi if zi is None else np.asarray(zi)[None]
    output, final_state = await _filtered("lfilter", forth, back, x, axis, states)
    return output if zi is None else (output, final_state[0])


@composed
async def sosfilt(sos: npt.ArrayLike, x: AccelRef, axis: int = -1, zi: Any = None) -> Any:
    """Filter by sections of second order along an axis, as `scipy.signal.sosfilt`; see `lfilter`.

    Args:
        sos: Sections, of shape (n, 6), on the host.
        x: The signals.
        axis: The axis along which they are filtered.
        zi: States of the delays to begin with, of shape (n, ...), where ``...`` is the shape of `x` with 2
            elements along the axis. None for zeros.

    Returns:
        The filtered signals, with the shape of `x`. With `zi`, a pair of them and the last states.

    Raises:
        TypeError: `x` is not an array of a device.
        ValueError: `sos` has another shape, the axis is out of range, or `zi` has another shape.
    """
    sections = np.atleast_2d(np.asarray(sos))
    is_shaped = (
        sections.ndim == 2 and sections.shape[1] == 6 and sections.size and sections.dtype.kind in "iufc"
    )
    if not is_shaped or (sections[:, 3] != 1).any():
        raise ValueError(f"sosfilt: sos must have shape (n, 6), and ones as sos[:, 3], got {sos!r}")
    filters = sections.astype(np.result_type(sections, np.float32))
    results = await _filtered("sosfilt", filters[:, :3], filters[:, 3:], x, axis, zi)
    return results[0] if zi is None else results
