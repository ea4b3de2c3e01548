"""Specification of tensor contractions."""

from __future__ import annotations

from functools import lru_cache

from ..dtypes import Ints
from ..subscripts import extents_of, parse_subscripts
from ._array import ArraySpec, NumberRole, exact, number, reads, writes
from ._signature import check_one_dtype, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = ["ContractionSpec", "contraction_terms"]

_ARGUMENTS = ("a", "b")


@specification
class ContractionSpec(OperationSpec):
    """``out = alpha * sum(a * b) + beta * c``, by letters of the axes.

    All arrays have one dtype. `out` overlaps neither `a` nor `b`; it may be `c` itself.

    Attributes:
        subscripts: Letters of the axes of `a`, `b` and the result: ``"ik,kj->ij"``. Each letter is in at
            least two of them, and never twice in one.
        alpha: Factor of the sums.
        beta: Factor of `c`; if it is 0, `c` is not read.
        a: The left factor.
        b: The right factor.
        c: The array to add, with the shape of the result.
        out: The result.
    """

    subscripts: str = exact()
    alpha: complex = number(NumberRole.FACTOR, "out")
    beta: complex = number(NumberRole.FACTOR, "out")
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    c: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()

    @property
    def terms(self) -> tuple[str, str, str]:
        """Letters of `a`, `b` and `out`."""
        inputs, _, out = self.subscripts.partition("->")
        a, _, b = inputs.partition(",")
        return a, b, out

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, c, out = self.a, self.b, self.c, self.out
        *_, shape = contraction_terms(name, self.subscripts, a.shape, b.shape)
        if out.shape != shape or (c is not None and c.shape != shape):
            refuse_shapes(name, self, f"c and out must have shape {shape}", a=a, b=b, c=c or out, out=out)
        check_one_dtype(name, self, a=a, b=b, c=c or out, out=out)
        if c is None and self.beta:
            raise ValueError(f"{name}: beta must be 0 without c, got {self.beta!r}")


@lru_cache
def contraction_terms(name: str, subscripts: str, a: Ints, b: Ints) -> tuple[str, str, str, Ints]:
    """Parse the subscripts of a contraction: the letters for both arrays and the result, and its shape.

    Raises:
        TypeError, ValueError: The subscripts are not valid, or do not fit the shapes.
    """
    (lhs, rhs), output = parse_subscripts(name, subscripts, (a, b), _ARGUMENTS)
    for term in (lhs, rhs):
        repeated = sorted({letter for letter in term if term.count(letter) > 1})
        if repeated:
            raise ValueError(
                f"{name}: subscripts {subscripts!r}: {repeated[0]!r} is twice in the term {term!r}; einsum "
                "takes diagonals"
            )
    for letter in sorted({*lhs, *rhs}):
        if (letter in lhs) + (letter in rhs) + (letter in output) < 2:
            raise ValueError(
                f"{name}: subscripts {subscripts!r}: {letter!r} is in one term alone; add along it before: "
                "reduce"
            )
    extents = extents_of(name, (lhs, rhs), (a, b), _ARGUMENTS)
    for letter, extent in (*zip(lhs, a, strict=True), *zip(rhs, b, strict=True)):
        if extent != extents[letter]:
            raise ValueError(
                f"{name}: subscripts {subscripts!r}: {letter!r} has one element in one array and "
                f"{extents[letter]} in the other; einsum broadcasts"
            )
    return lhs, rhs, output, tuple([extents[letter] for letter in output])
