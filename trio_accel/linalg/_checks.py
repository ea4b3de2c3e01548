"""Checks that several operations share."""

from __future__ import annotations

import math

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.checks import NATIVE
from ..backends.base.ops import ArraySpec, StatusArray
from ..devices import AccelRef, Operand, Planner

__all__ = ["matrices", "same_dtype", "same_length", "sides", "status_of", "vector"]


def same_dtype(name: str, **arrays: ArraySpec) -> DType:
    """Require one dtype of all arrays: devices do not convert silently."""
    first, *others = arrays.values()
    for other in others:
        if other.dtype is not first.dtype:
            given = ", ".join(f"{argument} {array.dtype}" for argument, array in arrays.items())
            raise TypeError(f"{name}: operands must have one dtype, got {given}; use cast()")
    return first.dtype


def vector(name: str, argument: str, array: ArraySpec) -> None:
    """Require a single axis."""
    if array.ndim != 1:
        raise ValueError(f"{name}: {argument} must have one axis, got shape {array.shape}")


def same_length(name: str, x: ArraySpec, y: ArraySpec) -> None:
    """Require one shape of both arrays."""
    if x.shape != y.shape:
        raise ValueError(f"{name}: x and y must have one shape, got {x.shape} and {y.shape}")


def matrices(planner: Planner, argument: str, operand: Operand, *, is_square: bool = False) -> ArraySpec:
    """Take an operand of a solver: a matrix or a stack of them, as `numpy.linalg` takes it.

    Raises:
        numpy.linalg.LinAlgError: It has fewer than two axes, or the matrices have to be square and are not.
        TypeError: It is of a dtype that solvers do not have.
    """
    array = planner.read(argument, operand)
    shape = array.shape
    if len(shape) < 2:
        raise np.linalg.LinAlgError(
            f"{planner.name}: {argument} must be at least two-dimensional, got shape {shape}"
        )
    if is_square and shape[-1] != shape[-2]:
        raise np.linalg.LinAlgError(
            f"{planner.name}: last 2 dimensions of {argument} must be square, got shape {shape}"
        )
    if array.dtype not in NATIVE:
        allowed = ", ".join(map(str, NATIVE))
        raise TypeError(
            f"{planner.name}: {argument} has dtype {array.dtype}; allowed: {allowed} (use cast())"
        )
    return array


def status_of(planner: Planner, a: ArraySpec) -> StatusArray:
    """Make a status word for each matrix of a stack."""
    return planner.status(math.prod(a.shape[:-2]))


def sides(
    planner: Planner, a: ArraySpec, operand: Operand, *, factor: str = "a"
) -> tuple[ArraySpec, ArraySpec, AccelRef]:
    """Take right-hand sides by the rules of NumPy 2, where only an array of one axis is a vector.

    Returns:
        The right-hand sides and the solution, both as stacks of matrices; and the reference of the solution.

    Raises:
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that differ.
    """
    b = planner.read("b", operand)
    dtype = same_dtype(planner.name, **{factor: a}, b=b)
    rows, is_vector = a.shape[-1], len(b.shape) == 1
    stack = _common(a.shape[:-2], b.shape[:-2])
    if stack is None or b.shape[-1 if is_vector else -2 :][:1] != (rows,):
        raise ValueError(
            f"{planner.name}: b must have shape ({rows},) or (..., {rows}, k) with leading axes that "
            f"broadcast, got {factor} of shape {a.shape} and b of shape {b.shape}"
        )
    x = planner.output((*stack, *b.shape[-1 if is_vector else -2 :]), dtype)
    return (_column(b), _column(x.spec), x) if is_vector else (b, x.spec, x)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(first, second)
    except ValueError:
        return None


def _column(vectors: ArraySpec) -> ArraySpec:
    """Vectors as matrices of one column."""
    step = vectors.dtype.itemsize
    return attrs.evolve(vectors, shape=(*vectors.shape, 1), strides=(*vectors.strides, step))
