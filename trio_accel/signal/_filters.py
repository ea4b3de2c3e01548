"""Recursive filters as products of matrices.

A block of a signal and the state ahead of it make the filtered block and the state behind it: that is linear,
so it is a product with a matrix, which SciPy makes of unit vectors. The states at the ends of blocks are a
linear recurrence. So a signal takes some products, whose order its length alone fixes.

Source: C. W. Barnes and S. Shinnaka, "Block-shift invariance and block implementation of discrete-time
filters", 1980.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import scipy.signal

from ..arrays import asarray, broadcast_to, concat, moveaxis, reshape
from ..arrays._scans import prefixes
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.operations._calls import Function, called, composed
from ..expressions import axis_of, check_ref

__all__ = ["lfilter", "sosfilt"]

_Host: TypeAlias = npt.NDArray[Any]
# Elements of a block; and powers of two of blocks, of which 2**38 are more than there are.
_BLOCK, _MOST_LEVELS = 64, 38


@functools.lru_cache(256)
def _matrices(sos: bytes, sections: int, kind: str, length: int, dtype: DType) -> tuple[_Host, _Host, _Host]:
    """Make what a block and the state ahead of it make: a block, and a state; and what states make of states.

    The last one is of 1, 2, 4 and more blocks.
    """
    filters = np.frombuffer(sos, kind).reshape(sections, 2, -1)
    order = filters.shape[2] - 1
    units = np.eye(length + sections * order, dtype=filters.dtype)
    states, parts = units[:, length:].reshape(len(units), sections, order), list[_Host]()
    signal = units[:, :length]
    for number, section in enumerate(filters):
        signal, last = cast("Any", scipy.signal.lfilter)(*section, signal, zi=states[:, number])
        parts.append(last)
    ends = np.hstack(parts)
    with np.errstate(all="ignore"):
        powers = [ends[length:]]
        while len(powers) < _MOST_LEVELS:
            powers.append(powers[-1] @ powers[-1])
    return signal.astype(dtype.dtype), ends.astype(dtype.dtype), np.array(powers, dtype.dtype)


async def _filter_rows(
    rows: AccelRef, state: AccelRef, of_block: Any, of_rest: Any
) -> tuple[AccelRef, AccelRef]:
    """Filter rows from states, by the matrices of a block, and of what is left behind all blocks."""
    (lines, count), order = rows.shape, state.shape[1]
    blocks, rest, parts = count // _BLOCK, count % _BLOCK, list[AccelRef]()
    if blocks:
        made, ends, powers = of_block
        head = await reshape(rows[:, : blocks * _BLOCK], (lines * blocks, _BLOCK))
        given = (await (head @ ends[:_BLOCK])).reshape((lines, blocks, order))
        await given[:, 0].assign(given[:, 0] + state @ ends[_BLOCK:])

        async def pair(one: Any, two: Any) -> Any:
            before = await reshape(one[1], (lines * one[1].shape[1], order))
            return two[0] + 1, await ((before @ powers[two[0]]).reshape(one[1].shape) + two[1])

        states = await prefixes((0, given), pair, 1)
        begun = await concat([state.reshape((lines, 1, order)), states[:, :-1]], axis=1)
        filtered = await (head @ made[:_BLOCK] + begun.reshape((lines * blocks, order)) @ made[_BLOCK:])
        parts.append(filtered.reshape((lines, blocks * _BLOCK)))
        state = await states[:, -1].copy()
    if rest:
        made, ends = of_rest
        tail = await concat([rows[:, -rest:], state], axis=1)
        parts.append(await (tail @ made))
        state = await (tail @ ends)
    return await concat(parts, axis=1), state


# A step of its own: it looks at no number, so it is recorded, and is one request.
_rows_filtered = called(Function("signal.lfilter", _filter_rows, "awaitable"))


async def _filtered(
    name: str, sos: _Host, x: AccelRef, axis: int, zi: AccelRef | npt.ArrayLike | None
) -> tuple[AccelRef, AccelRef]:
    """Filter along an axis by sections of one order in series; return also the last states.

    Args:
        name: The function.
        sos: Numerators and denominators, of shape (sections, 2, order + 1).
        x: The signals.
        axis: The axis.
        zi: States to begin with, of shape (sections, ..., order, ...); None for zeros.
    """
    check_ref(name, "x", x)
    place, moved = axis_of(name, x, axis), moveaxis(x, axis, -1)
    sections, order, count = len(sos), sos.shape[2] - 1, moved.shape[-1]
    shape = (sections, *x.shape[:place], order, *x.shape[place + 1 :])
    given = (
        np.zeros(shape, x.dtype.dtype) if zi is None else zi if isinstance(zi, AccelRef) else np.asarray(zi)
    )
    # One state may be there for all signals along an axis, as in SciPy.
    allowed = [{want} if axis == place + 1 else {1, want} for axis, want in enumerate(shape)]
    is_there = len(given.shape) == len(shape) and all(map(operator.contains, allowed, given.shape))
    if not x.size or not is_there:
        raise ValueError(
            f"{name}: x must have elements, and zi the shape {shape}, sections first, got {given.shape}"
        )
    kinds = [DType.of(each.dtype).dtype for each in (x, sos, given)]
    dtype = DType.of(np.result_type(*kinds, np.float32))
    start = broadcast_to(await asarray(x.device, given, dtype=dtype), shape)
    aligned = moveaxis(start, (0, place + 1), (-2, -1))
    state = await reshape(aligned, (moved.size // count, sections * order))
    rows = await reshape(moved if dtype is x.dtype else await moved.cast(dtype), (-1, count))
    key = sos.tobytes(), sections, sos.dtype.str
    made, ends, powers = _matrices(*key, _BLOCK, dtype)
    of_block = made, ends, powers[: (count // _BLOCK).bit_length() + 1]
    of_rest = _matrices(*key, count % _BLOCK, dtype)[:2] if count % _BLOCK else ()
    whole, last = await _rows_filtered(rows, state, of_block, of_rest)
    last = moveaxis(last.reshape(aligned.shape), (-2, -1), (0, place + 1))
    return moveaxis(whole.reshape(moved.shape), -1, place), last


@composed
async def lfilter(b: npt.ArrayLike, a: npt.ArrayLike, x: AccelRef, axis: int = -1, zi: Any = None) -> Any:
    """Filter by a rational transfer function along an axis, as `scipy.signal.lfilter`.

    It is computed in blocks, by products of matrices: sums are made in another order than SciPy's. The filter
    should be stable. float32 coefficients and signals give float32; a list of Python floats is float64. An
    exponential average of weight ``w`` is ``lfilter([w], [1, w - 1], x)``.

    Args:
        b: Coefficients of the numerator, on the host.
        a: Coefficients of the denominator, on the host.
        x: The signals, real or complex.
        axis: The axis along which they are filtered.
        zi: States of the delays to begin with: of the shape of `x`, with ``max(len(a), len(b)) - 1``
            elements along the axis; on the host or the device. None for zeros.

    Returns:
        The filtered signals, of the shape of `x`. With `zi`, a pair of them and the last states.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: Coefficients are no vectors, ``a[0]`` is 0, there is no such axis, `x` has no elements, or
            `zi` has another shape.
    """
    given = [np.atleast_1d(np.asarray(each)) for each in (b, a)]
    kind = np.result_type(*given, np.float32)
    if any(each.ndim != 1 or not each.size for each in given) or kind.kind not in "fc" or not given[1][0]:
        raise ValueError(f"lfilter: b and a must be vectors of numbers, and a[0] not 0, got {b!r} and {a!r}")
    most = max(map(len, given))
    padded = np.array([[np.pad(each / given[1][0], (0, most - len(each))) for each in given]], kind)
    states = zi[None] if isinstance(zi, AccelRef) else zi if zi is None else np.asarray(zi)[None]
    made, last = await _filtered("lfilter", padded, x, axis, states)
    return made if zi is None else (made, last[0])


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
        The filtered signals, of the shape of `x`. With `zi`, a pair of them and the last states.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: `sos` has another shape, there is no such axis, `x` has no elements, or `zi` has another
            shape.
    """
    given = np.atleast_2d(np.asarray(sos))
    if given.ndim != 2 or given.shape[1] != 6 or given.dtype.kind not in "iufc" or (given[:, 3] != 1).any():
        raise ValueError(f"sosfilt: sos must have shape (n, 6), and ones as sos[:, 3], got {sos!r}")
    filters = given.reshape(-1, 2, 3).astype(np.result_type(given, np.float32))
    made = await _filtered("sosfilt", filters, x, axis, zi)
    return made[0] if zi is None else made
