"""Sums of products by their axes, and products without sums (D164)."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from ..backends.base import DType, DTypeLike
from ..backends.base.contract.subscripts import Optimize
from ..devices import AccelRef, Operand, bounded_integer, composed, device_of, is_several, said
from ..devices.base._views import NoViewError
from ..expressions import (
    Contract,
    Contracting,
    ContractionFactor,
    Elementwise,
    Groups,
    Out,
    Reduction,
    Track,
    axis_of,
    check_operands,
    on_device,
    permuted,
    viewed,
)
from ._blas import matmul
from ._views import check_matrices, diagonal

__all__ = ["cross", "einsum", "kron", "outer", "tensordot", "trace", "vecdot"]

_multiply = functools.partial(Elementwise[AccelRef], "x * y")
_OUTER = _multiply(operation="linalg.outer")
_KRON = _multiply(operation="linalg.kron")
_sum = functools.cache(Reduction)


@composed
async def vecdot(x1: Operand, x2: Operand, /, *, axis: int = -1, out: Out = None) -> AccelRef:
    """Sum products of vectors, as `numpy.linalg.vecdot`: ``conj(x1) * x2`` along an axis.

    One launch. float16, bfloat16 and float32 are added in float64, and rounded once; integers wrap around.

    Args:
        x1: Array of a numeric dtype.
        x2: Array of the same dtype; the shapes broadcast.
        axis: Axis of the vectors, of equal length.
        out: Array to write to, with the same kind of dtype: the result is converted to it.

    Returns:
        The sums, with the dtype of the operands, and of their shape without the axis.

    Raises:
        ValueError: Lengths that differ, even if one is 1, or an axis out of range.
    """
    dtype = check_operands("vecdot", x1=x1, x2=x2)
    first, second = _axis_last("vecdot", x1, axis), _axis_last("vecdot", x2, axis)
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"vecdot: the vectors must have the same length, got shapes {x1.shape} and {x2.shape} "
            f"with axis {axis}"
        )
    text = "conj(x) * y" if dtype.kind == "complex" else "x * y"
    return await _sum(text, "sum", dtype=dtype.value, operation="linalg.vecdot")(
        first, second, axis=-1, out=out
    )


@composed
async def outer(x1: Operand, x2: Operand, /, *, out: Out = None) -> AccelRef:
    """Multiply all elements of two vectors, as `numpy.linalg.outer`; one launch.

    Args:
        x1: Vector of shape (m,).
        x2: Vector of shape (n,), of the same dtype.
        out: Array to write to, with the same kind of dtype: the result is converted to it.

    Returns:
        The products, of shape (m, n).
    """
    check_operands("outer", x1=x1, x2=x2)
    for name, array in (("x1", x1), ("x2", x2)):
        if len(array.shape) != 1:
            raise ValueError(f"outer: {name} must be a vector, got shape {array.shape}")
    return await _OUTER(x1[:, None], x2[None, :], out=out)


@composed
async def kron(a: Operand, b: Operand) -> AccelRef:
    """Kronecker product, as `numpy.kron`: each element of one array times all of the other; one launch.

    Args:
        a: Array of any shape; the operand with fewer axes gets leading axes of one element.
        b: Array of the same dtype.

    Returns:
        The products: the length of each axis is the product of the lengths in `a` and `b`.
    """
    check_operands("kron", a=a, b=b)
    axes = max(a.ndim, b.ndim)
    a, b = (array[(None,) * (axes - array.ndim)] for array in (a, b))
    product = await _KRON(a[(slice(None), None) * axes], b[(None, slice(None)) * axes])
    return product.reshape([first * second for first, second in zip(a.shape, b.shape, strict=True)])


@composed
async def cross(x1: Operand, x2: Operand, /, *, axis: int = -1) -> AccelRef:
    """Compute cross products of three-element vectors, as `numpy.linalg.cross`; one launch.

    Args:
        x1: Array of a numeric dtype.
        x2: Array of the same dtype; the shapes broadcast, but for the axis.
        axis: Axis that holds the vectors.

    Returns:
        The vectors, along the same axis.

    Raises:
        ValueError: Vectors do not have three elements, or an axis is out of range.
    """
    check_operands("cross", x1=x1, x2=x2)
    first, second = _axis_last("cross", x1, axis), _axis_last("cross", x2, axis)
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        shape = ()
    if first.shape[-1:] != (3,) or second.shape[-1:] != (3,) or not shape:
        raise ValueError(
            f"cross: axis {axis} must have three elements, and the others must broadcast, got shapes "
            f"{x1.shape} and {x2.shape}"
        )
    vectors = (viewed(operand, lambda array: np.broadcast_to(array, shape)) for operand in (first, second))
    product = await _cross(len(shape))(*vectors, shape=shape)
    axis_index = normalize_axis_index(axis, len(shape))
    order = list(range(len(shape) - 1))
    order.insert(axis_index, len(shape) - 1)
    return on_device(permuted(product, order))


@composed
async def trace(
    x: Operand, /, *, offset: int = 0, dtype: DTypeLike | None = None, out: Out = None
) -> AccelRef:
    """Sum the diagonals of matrices, as `numpy.linalg.trace`; one launch.

    Args:
        x: Array of shape (..., m, n).
        offset: The diagonal, see `diagonal`.
        dtype: Type that the elements are converted to before they are added; by default the dtype of `x`, and
            int64 or uint64 for integers.
        out: Array to write to, with the same kind of dtype: the result is converted to it.

    Returns:
        The sums, of shape (...); 0 for a diagonal that there is not.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
    """
    check_matrices("trace", x)
    along = diagonal(on_device(x), offset=offset)
    kind = None if dtype is None else DType.of(dtype).value
    return await _sum("x", "sum", dtype=kind, operation="linalg.trace")(along, axis=-1, out=out)


@composed
async def tensordot(
    x1: Operand, x2: Operand, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> AccelRef:
    """Sum products over axes of two arrays, as `numpy.tensordot`; by one `matmul`.

    If the axes of an operand cannot be merged in place, it is one `ta.tensor.contract`, but integer operands
    are copied first. Without axes to add along, it is one launch that multiplies.

    Args:
        x1: Array of a dtype that `matmul` takes.
        x2: Array of the same dtype.
        axes: The number of axes: the last axes of `x1` and the first axes of `x2`, in order. Or the axes of
            `x1`, and the axes of `x2`.

    Returns:
        The sums: first the other axes of `x1`, then the other axes of `x2`.

    Raises:
        ValueError: Axes are out of range, are named twice, or differ in length.
    """
    name = "tensordot"
    check_operands(name, x1=x1, x2=x2)
    pair: Any = axes
    if not is_several(axes):
        count = bounded_integer(name, "axes", axes)
        if not 0 <= count <= min(x1.ndim, x2.ndim):
            raise ValueError(f"{name}: axes must be from 0 to {min(x1.ndim, x2.ndim)}, got {axes}")
        pair = range(x1.ndim - count, x1.ndim), range(count)
    try:
        first, second = (normalize_axis_tuple(of, x.ndim) for of, x in zip(pair, (x1, x2), strict=True))
    except (ValueError, OverflowError) as error:
        raise said(f"{name}: axes {axes} of shapes {x1.shape} and {x2.shape}", error) from None
    if [x1.shape[axis] for axis in first] != [x2.shape[axis] for axis in second]:
        raise ValueError(f"{name}: shapes {x1.shape} and {x2.shape} differ along axes {first} and {second}")
    # An axis to add along has one number in both.
    lhs = ContractionFactor(tuple(range(x1.ndim)), x1)
    pairs = dict(zip(second, first, strict=True))
    # Axes of the second operand have the labels of their partners, or else numbers below 0.
    rhs = ContractionFactor(tuple(pairs.get(axis, -1 - axis) for axis in range(x2.ndim)), x2)
    keep = frozenset[object]({*lhs.labels, *rhs.labels} - set(first))
    return on_device((await _CONTRACTING.pair(lhs, rhs, keep)).array)


@composed
async def einsum(
    subscripts: str, /, *operands: Operand, optimize: Optimize = "auto", memory_limit: int | None = None
) -> AccelRef:
    """Sum of products by Einstein's convention, as `numpy.einsum`: ``einsum("ij,jk->ik", a, b)``.

    More than two operands are multiplied in the order that opt_einsum finds. Each step is one launch: a
    product of elements where nothing is added, a sum of products where nothing else is left, and else
    `matmul`, or `ta.tensor.contract` where the axes of an operand cannot be merged where they lie. For
    integers such an operand is copied first. An axis that no other has is added along first. The arrays
    between the steps are released as the next one is done.

    Args:
        subscripts: One letter for each axis of each operand, terms separated by commas. ``...`` means axes
            that broadcast. A letter twice in a term takes the diagonal. After ``->`` are the letters of the
            result, in order; by default the letters that appear once, sorted.
        *operands: Arrays of one dtype, one for each term. An axis of one element broadcasts.
        optimize: The search for the order, by opt_einsum's names, such as ``"optimal"`` or ``"greedy"``; or
            the order itself, as `opt_einsum.contract_path` returns it.
        memory_limit: The most bytes that intermediate arrays, and the result, may take at a time; copies of
            operands are not included. None for the device's memory.

    Returns:
        The result. It is a view if nothing of a single operand is added; in general a view of new memory with
        any strides.

    Raises:
        TypeError: There is no operand.
        ValueError: A term does not fit its operand, a letter after ``->`` is in no term or twice, lengths
            differ, or the order is not valid.
        OutOfMemoryError: No order was found that fits into memory. Nothing was launched.
    """
    return await _CONTRACTING.sum(subscripts, operands, optimize, memory_limit)


async def _multiplied(
    lhs: ContractionFactor, rhs: ContractionFactor, groups: Groups, track: Track
) -> AccelRef:
    """Multiply stacks of matrices; other layouts go to the actor of tensors, in one launch."""
    batch, rows, columns, inner = groups.batch, groups.rows, groups.columns, groups.inner
    has_letters = len({*lhs.labels, *rhs.labels}) <= len(string.ascii_letters)
    stacks: list[Operand] = []
    for factor, *sides in (lhs, rows, inner), (rhs, inner, columns):
        view = factor.along((*batch, *sides[0], *sides[1]))
        shape = (*factor.extents(batch), *(math.prod(factor.extents(side)) for side in sides))
        try:
            stacks.append(view.reshape(shape))
        except NoViewError:
            if has_letters and DType.of(view.dtype).is_inexact:
                return await device_of("einsum", lhs.array, rhs.array).ask(Contract.of(lhs, rhs, groups))
            stacks.append(track(await on_device(view).copy()).reshape(shape))
    product = await matmul(*stacks)
    return product.reshape(lhs.extents([*batch, *rows]) + rhs.extents(columns))


_CONTRACTING = Contracting("linalg.einsum", _multiplied)


def _axis_last(name: str, x: Operand, axis: int) -> Operand:
    """View an array with one axis as the last one."""
    axis_index = axis_of(name, x, axis)
    return permuted(x, [*(number for number in range(x.ndim) if number != axis_index), axis_index])


@functools.cache
def _cross(axes: int) -> Elementwise[AccelRef]:
    """Make the cross product along the last of `axes` axes."""
    *stack_indices, vector_index = [f"i({axis})" for axis in range(axes)]
    first, second = (", ".join([*stack_indices, f"({vector_index} + {step}) % 3"]) for step in (1, 2))
    return Elementwise(
        f"x[{first}] * y[{second}] - x[{second}] * y[{first}]", inputs="xy", operation="linalg.cross"
    )
