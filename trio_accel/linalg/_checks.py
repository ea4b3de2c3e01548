"""Checks that several operations share."""

from __future__ import annotations

import math

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.checks import NATIVE
from ..backends.base.ops import ArraySpec, StatusArray, common_shape
from ..devices import AccelRef, Operand, Planner

__all__ = [
    "accumulated", "column", "factors", "matrices", "matrix", "overwritten", "same_dtype", "same_length",
    "sides", "status_of", "updated", "vector",
]  # fmt: skip


def same_dtype(name: str, **arrays: ArraySpec) -> DType:
    """Require one dtype of all arrays: devices do not convert silently."""
    first, *others = arrays.values()
    for other in others:
        if other.dtype is not first.dtype:
            given = ", ".join(f"{argument} {array.dtype}" for argument, array in arrays.items())
            raise TypeError(f"{name}: operands must have one dtype, got {given}; use cast()")
    return first.dtype


def vector(name: str, argument: str, array: ArraySpec, length: int | None = None) -> None:
    """Require a single axis, and a length if it is known."""
    if array.ndim != 1:
        raise ValueError(f"{name}: {argument} must have one axis, got shape {array.shape}")
    if length is not None and array.shape != (length,):
        raise ValueError(f"{name}: {argument} must have shape ({length},), got {array.shape}")


def matrix(planner: Planner, operand: Operand, argument: str = "a", *, is_square: bool = False) -> ArraySpec:
    """Take an operand that is one matrix."""
    array = planner.read(argument, operand)
    if array.ndim != 2 or (is_square and array.shape[0] != array.shape[1]):
        what = "be square" if is_square and array.ndim == 2 else "have two axes"
        raise ValueError(f"{planner.name}: {argument} must {what}, got shape {array.shape}")
    return array


def updated(
    planner: Planner, argument: str, ref: AccelRef, like: tuple[tuple[int, ...], DType], **others: ArraySpec
) -> ArraySpec:
    """Take an array of a shape and dtype that is changed in place, and shares no memory with the others."""
    array = planner.update(argument, ref)
    if (array.shape, array.dtype) != like:
        raise ValueError(
            f"{planner.name}: {argument} must have shape {like[0]} and dtype {like[1]}, "
            f"got shape {array.shape} and dtype {array.dtype}"
        )
    planner.distinct(argument, array, **others)
    return array


def factors(planner: Planner, alpha: complex, beta: complex, dtype: DType) -> tuple[complex, complex]:
    """Take the factors of a product and of what it is added to."""
    return planner.factor("alpha", alpha, dtype), planner.factor("beta", beta, dtype)


def accumulated(
    planner: Planner,
    argument: str,
    ref: AccelRef | None,
    beta: complex,
    shape: tuple[int, ...],
    **others: ArraySpec,
) -> tuple[AccelRef, ArraySpec]:
    """Take what a product is added to: the caller's array, or a new one without a beta."""
    dtype = same_dtype(planner.name, **others)
    if ref is not None:
        return ref, updated(planner, argument, ref, (shape, dtype), **others)
    if beta != 0:
        raise ValueError(f"{planner.name}: beta must be 0 without {argument}, got {beta!r}")
    ref = planner.output(shape, dtype)
    return ref, ref.spec


def overwritten(
    planner: Planner, ref: AccelRef | None, source: ArraySpec, shape: tuple[int, ...], **others: ArraySpec
) -> tuple[AccelRef, ArraySpec]:
    """Take the result of an operation in place: a new array, or the caller's, which may be the source."""
    dtype = same_dtype(planner.name, **others)
    if ref is None:
        ref = planner.output(shape, dtype)
        return ref, ref.spec
    array = updated(planner, "out", ref, (shape, dtype))
    apart = {name: other for name, other in others.items() if other is not source or other != array}
    planner.distinct("out", array, **apart)
    return ref, array


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
    stack = common_shape(a.shape[:-2], b.shape[:-2])
    if stack is None or b.shape[-1 if is_vector else -2 :][:1] != (rows,):
        raise ValueError(
            f"{planner.name}: b must have shape ({rows},) or (..., {rows}, k) with leading axes that "
            f"broadcast, got {factor} of shape {a.shape} and b of shape {b.shape}"
        )
    x = planner.output((*stack, *b.shape[-1 if is_vector else -2 :]), dtype)
    return (column(b), column(x.spec), x) if is_vector else (b, x.spec, x)


def column(vectors: ArraySpec) -> ArraySpec:
    """Vectors as matrices of one column."""
    step = vectors.dtype.itemsize
    return attrs.evolve(vectors, shape=(*vectors.shape, 1), strides=(*vectors.strides, step))
