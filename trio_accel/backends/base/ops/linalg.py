"""Specifications of the dense linear algebra operations."""

from __future__ import annotations

from typing import Literal

import attrs

from ._spec import ArraySpec, NumberRole, OperationSpec, exact, number, reads, updates, writes

__all__ = ["AxpySpec", "DotSpec", "GemmSpec", "MatmulSpec", "Nrm2Spec", "ScalSpec", "Transpose"]

Transpose = Literal["N", "T", "C"]
"""As it is, transposed, or transposed and conjugated: the BLAS's letters."""


@attrs.define(on_setattr=None, unsafe_hash=True)
class MatmulSpec(OperationSpec):
    """``out = a @ b`` with the shape rules of `numpy.matmul` for operands of one or more axes.

    All three have one dtype. ``out`` is C-contiguous and overlaps neither operand.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()


@attrs.define(on_setattr=None, unsafe_hash=True)
class GemmSpec(OperationSpec):
    """``c = alpha * op(a) @ op(b) + beta * c`` for matrices of one dtype (BLAS ``gemm``).

    Where beta is 0, c is not read: it may hold anything. It overlaps neither a nor b.
    """

    alpha: complex = number(NumberRole.FACTOR, "c")
    beta: complex = number(NumberRole.FACTOR, "c")
    transpose_a: Transpose = exact()
    transpose_b: Transpose = exact()
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    c: ArraySpec = updates()


@attrs.define(on_setattr=None, unsafe_hash=True)
class AxpySpec(OperationSpec):
    """``y = alpha * x + y`` for arrays of one shape and dtype (BLAS ``axpy``)."""

    alpha: complex = number(NumberRole.FACTOR, "y")
    x: ArraySpec = reads()
    y: ArraySpec = updates()


@attrs.define(on_setattr=None, unsafe_hash=True)
class ScalSpec(OperationSpec):
    """``x = alpha * x`` (BLAS ``scal``)."""

    alpha: complex = number(NumberRole.FACTOR, "x")
    x: ArraySpec = updates()


@attrs.define(on_setattr=None, unsafe_hash=True)
class DotSpec(OperationSpec):
    """``out = sum(x * y)`` of two vectors, unconjugated (BLAS ``dot``, ``dotu``); ``out`` has no axes."""

    x: ArraySpec = reads()
    y: ArraySpec = reads()
    out: ArraySpec = writes()


@attrs.define(on_setattr=None, unsafe_hash=True)
class Nrm2Spec(OperationSpec):
    """``out = sqrt(sum(abs(x)**2))`` without needless overflow (BLAS ``nrm2``); ``out`` is real, no axes."""

    x: ArraySpec = reads()
    out: ArraySpec = writes()
