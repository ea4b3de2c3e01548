"""Recursive filters as products of matrices.

A filter is a linear system with a state z: ``y = C z + D x``, and then ``z = A z + B x``. Its response to a
block of a signal is a product with a Toeplitz matrix, and what the state adds. States at the ends of blocks
follow from one another in the same way, in groups of groups. So a signal takes a few products, whose order
its length alone fixes.

Source: C. W. Barnes and S. Shinnaka, "Block-shift invariance and block implementation of discrete-time
filters", 1980.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import scipy.linalg

from ..arrays import asarray, concat, flip, moveaxis, pad, reshape
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import axis_of, check_ref

__all__ = ["PadType", "filtfilt", "lfilter", "sosfilt", "sosfiltfilt"]

_Host: TypeAlias = npt.NDArray[Any]
# Elements of a block, and states that are found by one product.
_BLOCK, _GROUP = 64, 16


@attrs.frozen(eq=False)
class _System:
    """A filter in blocks, as matrices from the right.

    Attributes:
        response: Of a block to what it takes in, of shape (block, block).
        reads: Of element k to the state ahead of the block, of shape (order, block + 1).
        writes: Of the state to an element k before it, of shape (block, order).
        powers: Of the state to that k elements before, of shape (block + 1, order, order).
        steady: The state for a constant signal of 1.
    """

    response: _Host
    reads: _Host
    writes: _Host
    powers: _Host
    steady: _Host


@functools.lru_cache(64)
def _system(sections: bytes, shape: tuple[int, ...], kind: str, dtype: DType) -> _System:
    """Make the matrices of sections in series: of each, the transposed direct form II."""
    a, b, c, d = np.zeros((0, 0)), np.zeros(0), np.zeros(0), np.float64(1)
    for numerator, denominator in np.frombuffer(sections, kind).reshape(shape):
        order = len(numerator) - 1
        own = np.eye(order, k=1, dtype=denominator.dtype)
        own[:, :1] -= denominator[1:, None]
        into = numerator[1:] - denominator[1:] * numerator[0]
        a = np.block([[a, np.zeros((len(a), order))], [np.outer(into, c), own]])
        b = np.concatenate([b, into * d])
        c = np.concatenate([numerator[0] * c, np.eye(1, order)[0]])
        d = numerator[0] * d
    powers = np.array(list(itertools.accumulate([a] * _BLOCK, np.matmul, initial=np.eye(len(a)))))
    gains = np.concatenate([[d], c @ powers[:-1] @ b])
    steady = np.linalg.pinv(np.eye(len(a)) - a) @ b
    first = np.append(gains[0], np.zeros(_BLOCK - 1))
    made = scipy.linalg.toeplitz(first, gains[:_BLOCK]), (c @ powers).T, powers @ b, powers, steady[None]
    return _System(*[np.ascontiguousarray(each, dtype.dtype) for each in made])


@functools.lru_cache(256)
def _ahead(power: bytes, order: int, dtype: DType) -> tuple[_Host, _Host, _Host]:
    """Make what states of a group have of those ahead, what they have of the first, and the next power."""
    one = np.frombuffer(power, dtype.dtype).reshape(order, order)
    start = np.eye(order, dtype=one.dtype)
    powers = np.array(list(itertools.accumulate([one] * _GROUP, np.matmul, initial=start)))
    place = np.arange(_GROUP + 1)
    far = place - place[:, None]
    whole = np.where((far >= 0)[..., None, None], powers[far], 0).transpose(0, 3, 1, 2)
    whole = np.ascontiguousarray(whole).reshape((_GROUP + 1) * order, -1)
    return whole, np.ascontiguousarray(whole[:order, order:]), powers[-1]


async def _states(power: _Host, given: AccelRef, first: AccelRef) -> AccelRef:
    """Compute ``z[p + 1] = power @ z[p] + given[p]``.

    Args:
        power: The matrix, of shape (n, n).
        given: What is added, of shape (lines, count, n).
        first: ``z[0]``, of shape (lines, n).

    Returns:
        The states, of shape (lines, count + 1, n).
    """
    lines, count, order = given.shape
    matrix, of_one, following = _ahead(power.tobytes(), order, given.dtype)
    start = (await first.copy()).reshape((lines, 1, order))
    if count <= _GROUP:
        whole = await concat([start, given], axis=1)
        size = (count + 1) * order
        return (await (whole.reshape((lines, size)) @ matrix[:size, :size])).reshape(whole.shape)
    groups, size = -(-count // _GROUP), _GROUP * order
    full = await pad(given, ((0, 0), (0, groups * _GROUP - count), (0, 0)))
    own = await (full.reshape((lines * groups, size)) @ matrix[:size, :size])
    ends = await own.reshape((lines, groups, _GROUP, order))[:, :, -1].copy()
    before = await _states(following, ends, first)
    carried = (await before[:, :groups].copy()).reshape((lines * groups, order))
    made = await (own + carried @ of_one)
    return (await concat([start, made.reshape((lines, groups * _GROUP, order))], axis=1))[:, : count + 1]


async def _filtered(system: _System, x: AccelRef, state: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Filter lines of shape (lines, n), from states of shape (lines, order); return also the last states."""
    (lines, count), order = x.shape, state.shape[1]
    blocks, rest = divmod(count, _BLOCK)
    reads, writes, parts = system.reads, system.writes, list[AccelRef]()
    if blocks:
        head = await reshape(x[:, : blocks * _BLOCK], (lines * blocks, _BLOCK))
        given = await (head @ writes[_BLOCK - 1 :: -1])
        states = await _states(system.powers[-1], given.reshape((lines, blocks, order)), state)
        begun = (await states[:, :blocks].copy()).reshape((lines * blocks, order))
        made = await (head @ system.response + begun @ reads[:, :_BLOCK])
        parts.append(made.reshape((lines, blocks * _BLOCK)))
        state = await states[:, blocks].copy()
    if rest:
        tail = x[:, blocks * _BLOCK :]
        parts.append(await (tail @ system.response[:rest, :rest] + state @ reads[:, :rest]))
        state = await (state @ system.powers[rest].T + tail @ writes[rest - 1 :: -1])
    return (await concat(parts, axis=1) if len(parts) > 1 else parts[0]), state


async def _rows_of(
    name: str, sections: _Host, x: AccelRef, axis: int, zi: Any = None
) -> tuple[AccelRef, Callable[[AccelRef], AccelRef], int, _System]:
    """Check the signals, and lay them out as rows; return also what undoes that, the axis, and the system."""
    check_ref(name, "x", x)
    place = axis_of(name, x, axis)
    if not x.size:
        raise ValueError(f"{name}: x must have elements, got shape {x.shape}")
    given = [np.dtype(each.dtype) for each in (x, sections, zi) if each is not None]
    dtype = DType.of(np.result_type(*given, np.float32))
    system = _system(sections.tobytes(), sections.shape, sections.dtype.str, dtype)
    moved = moveaxis(x, place, -1)
    rows = await reshape(await moved.cast(dtype), (-1, x.shape[place]))
    return rows, lambda made: moveaxis(made.reshape(moved.shape), -1, place), place, system


async def _forwards(name: str, sections: _Host, x: AccelRef, axis: int, zi: Any) -> tuple[AccelRef, AccelRef]:
    """Filter along an axis; `zi` has the shape (sections, ..., order, ...). Return also the last states."""
    if zi is not None and not isinstance(zi, AccelRef):
        zi = np.asarray(zi)
    rows, back, place, system = await _rows_of(name, sections, x, axis, zi)
    shape = (len(sections), *x.shape[:place], sections.shape[2] - 1, *x.shape[place + 1 :])
    start = await x.device.zeros(shape, rows.dtype) if zi is None else zi
    if start.shape != shape:
        raise ValueError(f"{name}: zi must have shape {shape}, sections first, got {start.shape}")
    start = await asarray(x.device, start, dtype=rows.dtype)
    # Of each row, its sections one behind another.
    aligned = moveaxis(start, (0, place + 1), (-2, -1))
    made, last = await _filtered(system, rows, await reshape(aligned, (rows.shape[0], -1)))
    return back(made), moveaxis((await last.copy()).reshape(aligned.shape), (-2, -1), (0, place + 1))


async def _both_ways(
    name: str, sections: _Host, x: AccelRef, axis: int, padtype: str | None, padlen: int
) -> AccelRef:
    """Filter forwards and backwards along an axis, from the state for a constant signal."""
    if padtype not in ("odd", "even", "constant", None):
        raise ValueError(f"{name}: padtype must be 'odd', 'even', 'constant' or None, got {padtype!r}")
    rows, back, _, system = await _rows_of(name, sections, x, axis)
    count = rows.shape[1]
    edge = whole(name, "padlen", padlen) if padtype else 0
    if not 0 <= edge < count:
        raise ValueError(f"{name}: padlen must be from 0 to {count - 1}, below the length, got {edge}")
    width = ((0, 0), (edge, edge))
    if padtype in ("odd", "constant"):
        ends = await pad(rows, width, mode="edge")
        rows = ends if padtype == "constant" else await (2 * ends - pad(rows, width, mode="reflect"))
    elif padtype:
        rows = await pad(rows, width, mode="reflect")
    for _ in range(2):
        made, _ = await _filtered(system, rows, await (rows[:, :1] @ system.steady))
        rows = await flip(made, axis=1).copy()
    return back(await rows[:, edge : edge + count].copy())


def _transfer(name: str, b: npt.ArrayLike, a: npt.ArrayLike) -> _Host:
    """Make one section of the coefficients of a filter."""
    given = [np.atleast_1d(np.asarray(each)) for each in (b, a)]
    is_vector = [each.ndim == 1 and each.size and each.dtype.kind in "iufc" for each in given]
    if not all(is_vector) or not given[1][0]:
        raise ValueError(f"{name}: b and a must be vectors of numbers, and a[0] not 0, got {b!r} and {a!r}")
    most, kind = max(2, *map(len, given)), np.result_type(*given, np.float32)
    return np.array([[np.pad(each / given[1][0], (0, most - len(each))) for each in given]], kind)


def _of_sos(name: str, sos: npt.ArrayLike) -> _Host:
    """Check sections of second order."""
    given = np.atleast_2d(np.asarray(sos))
    if given.ndim != 2 or given.shape[1] != 6 or given.dtype.kind not in "iufc" or (given[:, 3] != 1).any():
        raise ValueError(f"{name}: sos must have shape (n, 6), and ones as sos[:, 3], got {sos!r}")
    return given.reshape(-1, 2, 3).astype(np.result_type(given, np.float32))


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
        zi: States of the delays to begin with: of the shape of `x`, with ``max(len(a), len(b)) - 1`` elements
            along the axis; on the host or the device. None for zeros.

    Returns:
        The filtered signals, of the shape of `x`. With `zi`, a pair of them and the last states.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: Coefficients are no vectors, ``a[0]`` is 0, there is no such axis, `x` has no elements, or
            `zi` has another shape.
    """
    given = zi[None] if isinstance(zi, AccelRef) else zi if zi is None else np.asarray(zi)[None]
    made, last = await _forwards("lfilter", _transfer("lfilter", b, a), x, axis, given)
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
    made = await _forwards("sosfilt", _of_sos("sosfilt", sos), x, axis, zi)
    return made[0] if zi is None else made


PadType: TypeAlias = Literal["odd", "even", "constant"]
"""What is put at the ends of a signal: it mirrored in its end points, mirrored, or its first and last
elements."""


@composed
async def filtfilt(
    b: npt.ArrayLike,
    a: npt.ArrayLike,
    x: AccelRef,
    axis: int = -1,
    padtype: PadType | None = "odd",
    padlen: int | None = None,
) -> AccelRef:
    """Filter forwards and backwards along an axis, without a delay, as `scipy.signal.filtfilt` by padding.

    Args:
        b: Coefficients of the numerator, on the host.
        a: Coefficients of the denominator, on the host.
        x: The signals; see `lfilter`.
        axis: The axis along which they are filtered.
        padtype: What is put at both ends; None for nothing.
        padlen: How many elements of it; by default ``3 * max(len(a), len(b))``.

    Returns:
        The filtered signals, of the shape of `x`.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: See `lfilter`; another `padtype`, or the axis has no more elements than `padlen`.
    """
    sections = _transfer("filtfilt", b, a)
    edge = 3 * sections.shape[2] if padlen is None else padlen
    return await _both_ways("filtfilt", sections, x, axis, padtype, edge)


@composed
async def sosfiltfilt(
    sos: npt.ArrayLike,
    x: AccelRef,
    axis: int = -1,
    padtype: PadType | None = "odd",
    padlen: int | None = None,
) -> AccelRef:
    """Filter forwards and backwards by sections of second order, as `scipy.signal.sosfiltfilt`.

    Args:
        sos: Sections, of shape (n, 6), on the host.
        x: The signals; see `lfilter`.
        axis: The axis along which they are filtered.
        padtype: What is put at both ends; None for nothing.
        padlen: How many elements of it; by default three times the taps of the whole filter.

    Returns:
        The filtered signals, of the shape of `x`.

    Raises:
        TypeError, ValueError: See `filtfilt` and `sosfilt`.
    """
    sections = _of_sos("sosfiltfilt", sos)
    taps = 2 * len(sections) + 1 - int((sections[:, :, 2] == 0).sum(axis=0).min())
    return await _both_ways("sosfiltfilt", sections, x, axis, padtype, 3 * taps if padlen is None else padlen)
