"""Elements at the places in arrays of indices: taken to a new array, or changed in place.

Indices are integers of any dtype; negative ones count from the end. The device checks them before it uses
them. An index outside of its axis fails the operation with an `OutOfRangeError`, which is also an
`IndexError`. If the result, or the array of values, has no elements, no index is checked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import get_args

import attrs

from ..backends.base import DType, DTypeLike, Ints
from ..backends.base.contract.ops import ArraySpec, Reduce, common_shape
from ..devices import AccelRef, Operand, composed, refuse_value
from ..expressions import Elementwise, ExpressionArgument, Out, Scatter, axis_of, check_array
from ._checks import bounded_integers, placed

__all__ = [
    "gather_nd",
    "one_hot",
    "put",
    "put_along_axis",
    "scatter",
    "scatter_nd",
    "take",
    "take_along_axis",
    "unravel_index",
]


@composed
async def take(x: Operand, indices: Operand, axis: int | None = None, *, out: Out = None) -> AccelRef:
    """Take elements along an axis, as the array API standard's ``take``: ``x[:, indices]`` for axis 1.

    Args:
        x: The array.
        indices: Indices along the axis, of any shape.
        axis: The axis, from the end for a negative one; None for an array with one axis.
        out: Array to write to.

    Returns:
        The elements: the shape of `x`, with the axis replaced by the shape of `indices`.

    Raises:
        TypeError: `x` or `indices` is not an array, or `indices` is not of integers.
        ValueError: An axis out of range, or is empty while the result is not; `out` of another shape, or that
            shares memory with an argument.
        OutOfRangeError: An index is outside of the axis.
    """
    return await _gather("arrays.take", x, _along("arrays.take", x, indices, axis), out)


@composed
async def take_along_axis(x: Operand, indices: Operand, axis: int = -1, *, out: Out = None) -> AccelRef:
    """Take elements along an axis, each line by its own indices, as `numpy.take_along_axis`.

    Args:
        x: The array.
        indices: Indices along the axis, with as many axes as `x`. The other axes broadcast.
        axis: The axis.
        out: Array to write to.

    Returns:
        The elements: the shape that both broadcast to, with as many along the axis as there are indices.

    Raises:
        TypeError, ValueError, OutOfRangeError: As of `take`; or shapes that do not broadcast.
    """
    name = "arrays.take_along_axis"
    return await _gather(name, x, _lines(name, x, indices, axis), out)


@composed
async def gather_nd(x: Operand, indices: Sequence[Operand], *, out: Out = None) -> AccelRef:
    """Take elements by several arrays of indices, which broadcast: ``x[i, j]`` of NumPy.

    Args:
        x: The array.
        indices: A tuple of arrays, for the first axes of `x`.
        out: Array to write to.

    Returns:
        The elements: the shape that the indices broadcast to, and then the other axes of `x`.

    Raises:
        TypeError, ValueError, OutOfRangeError: As of `take`; or more arrays than axes.
    """
    return await _gather("arrays.gather_nd", x, _together("arrays.gather_nd", x, indices), out)


@composed
async def put(x: AccelRef, indices: Operand, values: ExpressionArgument, axis: int | None = None) -> AccelRef:
    """Set elements along an axis in place: ``x[:, indices] = values`` for axis 1.

    Any one of several values for one element stays.

    Args:
        x: The array.
        indices: Indices along the axis, of any shape.
        values: An array, which broadcasts to the shape that ``take(x, indices, axis)`` has; or a number.
        axis: The axis; None for an array with one axis.

    Returns:
        `x`.

    Raises:
        TypeError: An argument is not an array, `indices` is not of integers, or `values` of another kind than
            `x`.
        ValueError: An axis out of range, or is empty; shapes that do not broadcast; a number that the dtype
            cannot hold; or `x` shares memory with an argument.
        OutOfRangeError: An index is outside of the axis. `x` is damaged then.
    """
    return await _scatter("arrays.put", x, _along("arrays.put", x, indices, axis), values, "set")


@composed
async def put_along_axis(
    x: AccelRef, indices: Operand, values: ExpressionArgument, axis: int = -1, *, reduce: Reduce = "set"
) -> AccelRef:
    """Set elements along an axis in place, each line by its own indices, as `numpy.put_along_axis`.

    Args:
        x: The array.
        indices: Indices along the axis, with as many axes as `x`. The other axes broadcast.
        values: An array, which broadcasts to the shape that ``take_along_axis(x, indices, axis)`` has; or a
            number.
        axis: The axis.
        reduce: See `scatter`.

    Returns:
        `x`.

    Raises:
        TypeError, ValueError, OutOfRangeError: As of `scatter`.
    """
    name = "arrays.put_along_axis"
    return await _scatter(name, x, _lines(name, x, indices, axis), values, reduce)


@composed
async def scatter(
    x: AccelRef,
    indices: Operand,
    values: ExpressionArgument,
    axis: int | None = None,
    *,
    reduce: Reduce = "set",
) -> AccelRef:
    """Combine values with elements along an axis in place, such as ``numpy.add.at(x, indices, values)``.

    Values for one element come in any order. A sum of floating numbers may differ from call to call, and with
    "set" any of the values stays. Integers wrap around. Each step is rounded to the dtype of `x`.

    Args:
        x: The array.
        indices: Indices along the axis, of any shape.
        values: An array, which broadcasts to the shape that ``take(x, indices, axis)`` has; or a number.
        axis: The axis; None for an array with one axis.
        reduce: "set", "add", "multiply", "min" or "max".

    Returns:
        `x`.

    Raises:
        TypeError: See `put`; or "min" and "max" of complex numbers.
        ValueError: See `put`, or another `reduce`.
        NotSupportedError: CUDA does not multiply complex128.
        OutOfRangeError: An index is outside of the axis. `x` is damaged then.
    """
    return await _scatter("arrays.scatter", x, _along("arrays.scatter", x, indices, axis), values, reduce)


@composed
async def scatter_nd(
    x: AccelRef, indices: Sequence[Operand], values: ExpressionArgument, *, reduce: Reduce = "set"
) -> AccelRef:
    """Combine values with elements in place, by several arrays of indices: ``x[i, j] = values`` of NumPy.

    Args:
        x: The array.
        indices: A tuple of arrays, for the first axes of `x`; they broadcast.
        values: An array, which broadcasts to the shape of ``gather_nd(x, indices)``; or a number.
        reduce: See `scatter`.

    Returns:
        `x`.

    Raises:
        TypeError, ValueError, NotSupportedError, OutOfRangeError: As of `scatter`.
    """
    name = "arrays.scatter_nd"
    return await _scatter(name, x, _together(name, x, indices), values, reduce)


@composed
async def one_hot(x: Operand, length: int, *, dtype: DTypeLike = "float32", out: Out = None) -> AccelRef:
    """Make a vector for each element: 1 at the element's index, and 0 elsewhere.

    A negative element, or one not below `length`, gets a vector of zeros.

    Args:
        x: The indices.
        length: Length of the vectors.
        dtype: Dtype of the result.
        out: Array to write to.

    Returns:
        The vectors: the shape of `x`, and then `length`.

    Raises:
        TypeError: `x` is not an array, or devices lack this dtype.
        ValueError: A negative `length`, or `out` of another shape.
    """
    check_array("arrays.one_hot", x=x)
    expression = _elementwise("i(-1) == x", dtypes=DType.of(dtype).value, operation="arrays.one_hot")
    return await expression(_spread(x, 1), shape=(*x.shape, length), out=out)


@composed
async def unravel_index(x: Operand, shape: int | Sequence[int]) -> tuple[AccelRef, ...]:
    """Find the indices of elements along each axis from those in C order, as `numpy.unravel_index` does.

    Args:
        x: Indices in C order, integers. They are not checked: if an index is out of range, so is its index
            along the first axis.
        shape: Shape of the indexed array.

    Returns:
        The indices along each axis, of int64, with the shape of `x`: one launch makes all.

    Raises:
        TypeError: `x` does not have integers.
        ValueError: `shape` has no axes, or one without elements.
    """
    name = "arrays.unravel_index"
    extents = bounded_integers(name, "shape", shape)
    [x] = await placed(name, x=x)
    if x.dtype.kind not in ("int", "uint"):
        raise TypeError(f"{name}: x must have an integer dtype, got {x.dtype}")
    if not extents or min(extents) < 1:
        raise ValueError(f"{name}: shape must have axes of at least one element, got {shape!r}")
    steps = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    return await _unravelled(len(steps))(x, *steps, *extents[1:])


@attrs.frozen
class _Places:
    """Places of an array's elements.

    Attributes:
        element: The element of ``x``, as an expression.
        shape: The shape of all places.
        indices: Arrays of indices by their names in the expression; they broadcast to that shape.
    """

    element: str
    shape: Ints
    indices: dict[str, Operand]


def _along(name: str, x: Operand, indices: Operand, axis: int | None) -> _Places:
    """Return the places of indices along one axis; the other axes stay."""
    check_array(name, x=x, indices=indices)
    if axis is None and x.ndim != 1:
        raise ValueError(f"{name}: x of shape {x.shape} has not one axis: say which, axis=...")
    axis_index = axis_of(name, x, 0 if axis is None else axis)
    subscripts = [
        f"i({dimension if dimension < axis_index else dimension + indices.ndim - 1})"
        for dimension in range(x.ndim)
    ]
    subscripts[axis_index] = "indices"
    shape = (*x.shape[:axis_index], *indices.shape, *x.shape[axis_index + 1 :])
    return _Places(
        f"x[{', '.join(subscripts)}]", shape, {"indices": _spread(indices, x.ndim - axis_index - 1)}
    )


def _lines(name: str, x: Operand, indices: Operand, axis: int) -> _Places:
    """Return the places of indices for each line along an axis."""
    check_array(name, x=x, indices=indices)
    if x.ndim != indices.ndim:
        raise ValueError(
            f"{name}: x and indices must have as many axes, got shapes {x.shape} and {indices.shape}"
        )
    axis_index = axis_of(name, x, axis)
    shape = common_shape((*x.shape[:axis_index], 1, *x.shape[axis_index + 1 :]), indices.shape)
    if shape is None:
        raise ValueError(
            f"{name}: shapes {x.shape} of x and {indices.shape} of indices do not broadcast beside "
            f"axis {axis_index}"
        )
    subscripts = [
        "0" if extent != shape[dimension] else f"i({dimension})" for dimension, extent in enumerate(x.shape)
    ]
    subscripts[axis_index] = "indices"
    return _Places(f"x[{', '.join(subscripts)}]", shape, {"indices": indices})


def _together(name: str, x: Operand, indices: Sequence[Operand]) -> _Places:
    """Return the places for arrays of indices that are combined for the first axes."""
    if not isinstance(indices, (tuple, list)):
        raise TypeError(f"{name}: indices must be a tuple of arrays, got {type(indices).__name__}")
    named = {f"indices_{number}": array for number, array in enumerate(indices)}
    check_array(name, x=x, **named)
    if not 0 < len(indices) <= x.ndim:
        raise ValueError(
            f"{name}: indices must be one array for each of the first axes of x, which has shape {x.shape}; "
            f"got {len(indices)}"
        )
    shape = common_shape(*[array.shape for array in indices])
    if shape is None:
        shapes = ", ".join(str(array.shape) for array in indices)
        raise ValueError(f"{name}: the shapes {shapes} of indices do not broadcast to one")
    rest = x.shape[len(indices) :]
    subscripts = ", ".join([*named, *[f"i({len(shape) + number})" for number in range(len(rest))]])
    spread = {key: _spread(array, len(rest)) for key, array in named.items()}
    return _Places(f"x[{subscripts}]", (*shape, *rest), spread)


async def _gather(name: str, x: Operand, selection: _Places, out: Out) -> AccelRef:
    inputs = ("x", *selection.indices)
    expression = _elementwise(selection.element, inputs=inputs, operation=name, is_checked=True)
    return await expression(x, *selection.indices.values(), shape=selection.shape, out=out)


async def _scatter(
    name: str, x: AccelRef, selection: _Places, values: ExpressionArgument, reduce: Reduce
) -> AccelRef:
    if reduce not in get_args(Reduce):
        refuse_value(name, "reduce", get_args(Reduce), reduce)
    expression = _scattering(selection.element, reduce, inputs=("x", *selection.indices), operation=name)
    return await expression(x, *selection.indices.values(), values, shape=selection.shape)


# The same for all calls with as many axes.
_elementwise = functools.cache(Elementwise[AccelRef])
_scattering = functools.cache(Scatter)


@functools.cache
def _unravelled(ndim: int) -> Elementwise[tuple[AccelRef, ...]]:
    steps, extents = ([f"{name}{axis}" for axis in range(ndim)] for name in "se")
    formulas = [f"y{axis} = int64(x) // s{axis}" + f" % e{axis}" * (axis > 0) for axis in range(ndim)]
    return Elementwise(
        "; ".join(formulas),
        inputs=("x", *steps, *extents[1:]),
        outputs=[f"y{axis}" for axis in range(ndim)],
        operation="arrays.unravel_index",
    )


def _spread(indices: Operand, count: int) -> Operand:
    """Return a view with `count` additional last axes of one element."""
    shape = (*indices.shape, *(1,) * count)
    if not isinstance(indices, AccelRef):
        return indices.reshape(shape)
    # `AccelRef.reshape` does the same, but asks NumPy for the strides, which takes as long as the rest of a
    # call.
    spec = indices.spec
    strides = (*spec.strides, *(spec.dtype.itemsize,) * count)
    return AccelRef(indices.block, ArraySpec(spec.block, spec.offset, spec.dtype, shape, strides))
