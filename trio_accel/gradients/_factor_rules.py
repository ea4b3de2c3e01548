"""Gradients of factorizations. Their rules get a gradient for each result, and None for an unused one.

A factor is only determined up to its gauge, such as the sign of a vector, and a rule is right for functions
that do not depend on the gauge. The gradient of vectors is NaN or infinite for equal eigenvalues or singular
values.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..devices import gather
from ._backward import RULES, bound, refuse
from ._elementwise import Rule
from ._rules import adjoint, composition, conjugate

__all__ = ["added", "column", "hermitian_part", "on_diagonal", "over_gaps", "row"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
linalg = later("trio_accel.linalg")


def row(x: Any) -> Any:
    return arrays.expand_dims(x, axis=-2)


def column(x: Any) -> Any:
    return arrays.expand_dims(x, axis=-1)


def over_gaps(x: Any, values: Any) -> Any:
    """Divide element i, j of matrices by ``values[j] - values[i]``, with zeros on the diagonal."""
    is_diagonal = np.eye(x.shape[-1], dtype=bool)
    return arrays.where(is_diagonal, 0, x / arrays.where(is_diagonal, 1, row(values) - column(values)))


def added(*terms: Any) -> Any:
    """Add terms, of which some may be None; returns None if all are."""
    total: Any = None
    for term in terms:
        total = term if total is None else total if term is None else total + term
    return total


def on_diagonal(x: Any) -> Any:
    return None if x is None else row(x) * np.eye(x.shape[-1], dtype=x.dtype.dtype)


def hermitian_part(x: Any, turn: Callable[[Any], Any] = adjoint) -> Any:
    """Return the Hermitian part of matrices, or the symmetric one."""
    return 0.5 * (x + turn(x))


def _eigvalsh(call: Any, g: Any) -> Iterator[Rule]:
    yield from _hermitian(call, g, None)


def _eigh(call: Any, g: Any) -> Iterator[Rule]:
    yield from _hermitian(call, *g)


def _hermitian(call: Any, of_values: Any, of_vectors: Any) -> Iterator[Rule]:
    """The gradients are Hermitian, whichever triangle is read. The inverse of the vectors is ``v^H @ b``."""
    args = bound(call)
    a, b = args["a"], args["b"]
    is_whole = call.function.name == "linalg.eigh"
    factors = cache(lambda: call if is_whole else linalg.eigh(a, args["UPLO"], b=b))

    def of_matrix() -> Any:
        v = factors()[1]
        if of_vectors is None:
            return (v * row(of_values)) @ adjoint(v)
        inside = hermitian_part(over_gaps(adjoint(v) @ of_vectors, factors()[0]))
        return v @ added(inside, on_diagonal(of_values)) @ adjoint(v)

    def of_other() -> Any:
        values, v = factors()[0], factors()[1]
        shared = None if of_values is None else of_values * values
        if of_vectors is None:
            return -(v * row(shared)) @ adjoint(v)
        turned = adjoint(v) @ of_vectors
        inside = hermitian_part(over_gaps(turned, values) * row(values))
        lengths = 0.5 * arrays.real(linalg.diagonal(turned))
        return -(v @ (inside + on_diagonal(added(lengths, shared))) @ adjoint(v))

    yield a, of_matrix
    yield b, of_other


def _eig(call: Any, g: Any) -> Iterator[Rule]:
    yield bound(call)["a"], lambda: _general(call, *g)


def _eigvals(call: Any, g: Any) -> Iterator[Rule]:
    """The order with vectors may differ from the order without: equal values have equal gradients."""
    a = bound(call)["a"]

    def slope() -> Any:
        factors = linalg.eig(a)
        nearest = arrays.argmin(arrays.abs(column(factors[0]) - row(call)), axis=-1)
        return _general(factors, arrays.take_along_axis(g, nearest, axis=-1), None)

    yield a, slope


def _general(factors: Any, of_values: Any, of_vectors: Any) -> Any:
    """Boeddeker et al., On the computation of complex-valued gradients (2017): vectors have length 1."""
    back, inside = adjoint(factors[1]), on_diagonal(of_values)
    if of_vectors is not None:
        turned = back @ of_vectors
        lengths = arrays.real(linalg.diagonal(turned))
        turned = turned - (back @ factors[1]) * row(lengths)
        inside = added(over_gaps(turned, conjugate(factors[0])), inside)
    return linalg.solve(back, inside @ back)


def _svdvals(call: Any, g: Any) -> Iterator[Rule]:
    yield from _singular(None, bound(call)["x"], None, g, None)


def _svd(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, parts = args["a"], g if args["compute_uv"] else (None, g, None)
    has_vectors = parts[0] is not None or parts[2] is not None
    rows, columns = x.shape[-2:]
    if args["full_matrices"] and parts[0 if rows > columns else 2] is not None and rows != columns:
        vectors = f"the columns of U beyond {columns}" if rows > columns else f"the rows of Vh beyond {rows}"
        raise refuse("linalg.svd", f"{vectors} are not unique; pass full_matrices=False")

    def factors() -> tuple[Any, Any, Any]:
        if not args["full_matrices"] or rows == columns:
            return call[0], call[1], call[2]
        # The rule only reads the unique factors, so that it also has a gradient.
        s, unique = call[1], call[2 if rows > columns else 0]
        if rows > columns:
            return (x @ adjoint(unique)) / row(s), s, unique
        return unique, s, (adjoint(unique) @ x) / column(s)

    yield from _singular(factors if has_vectors else None, x, *parts)


def _singular(
    factors: Callable[[], tuple[Any, Any, Any]] | None, x: Any, of_u: Any, of_s: Any, of_vh: Any
) -> Iterator[Rule]:
    """Townsend, Differentiating the singular value decomposition (2016)."""

    def slope() -> Any:
        if factors is None:
            decomposition = linalg.svd(x, full_matrices=False)
            return (decomposition[0] * row(of_s)) @ decomposition[2]
        u, s, vh = factors()
        inside = phase_part = right = None
        if of_u is not None:
            turned = adjoint(u) @ of_u
            inside = (turned - adjoint(turned)) * row(s)
            if x.dtype.kind == "complex":
                phases = 1j * arrays.imag(linalg.diagonal(turned)) / s
                phase_part = on_diagonal(phases)
        if of_vh is not None:
            turned = vh @ adjoint(of_vh)
            inside = added(inside, (turned - adjoint(turned)) * column(s))
        inside = added(over_gaps(inside, s * s), on_diagonal(of_s), phase_part)
        result = u @ inside @ vh
        if of_u is not None and x.shape[-2] > x.shape[-1]:
            outside = of_u / row(s)
            result = result + (outside - u @ (adjoint(u) @ outside)) @ vh
        if of_vh is not None and x.shape[-1] > x.shape[-2]:
            right = of_vh / column(s)
            result = result + u @ (right - (right @ adjoint(vh)) @ vh)
        return result

    yield x, slope


def _qr(call: Any, g: Any) -> Iterator[Rule]:
    """Seeger et al., Auto-differentiating linear algebra (2017); wide matrices begin with square ones."""
    args = bound(call)
    a, mode = args["a"], args["mode"]
    rows, columns = a.shape[-2:]
    if rows < columns:
        yield from composition(_wide_qr)(call, g)
        return
    of_q, of_r = g if mode != "r" else (None, g)
    if mode == "complete" and rows > columns and of_q is not None:
        raise refuse("linalg.qr", f"the columns of Q beyond {columns} are not unique; pass mode='reduced'")

    def slope() -> Any:
        factors = linalg.qr(a) if mode == "r" or rows > columns else call
        q, r = factors[0], factors[1]
        inside = None if of_r is None else of_r[..., :columns, :] @ adjoint(r)
        if of_q is not None:
            inside = added(inside, -(adjoint(q) @ of_q))
        upper = arrays.triu(inside, k=1)
        diagonal = arrays.real(linalg.diagonal(inside))
        product = q @ (upper + adjoint(upper) + on_diagonal(diagonal))
        return adjoint(linalg.solve(r, adjoint(added(product, of_q))))

    yield a, slope


def _wide_qr(a: Any, mode: str) -> Any:
    rows = a.shape[-2]
    q, first = linalg.qr(a[..., :rows])
    r = arrays.concat([first, adjoint(q) @ a[..., rows:]], axis=-1)
    return r if mode == "r" else gather(q, r)


def _slogdet(call: Any, g: Any) -> Iterator[Rule]:
    a = bound(call)["a"]
    of_sign, of_logarithm = g

    def slope() -> Any:
        factor = of_logarithm
        if of_sign is not None and a.dtype.kind == "complex":
            factor = added(factor, 1j * arrays.imag(conjugate(call[0]) * of_sign))
        if factor is None:
            return None
        return arrays.reshape(factor, (*factor.shape, 1, 1)) * adjoint(linalg.inv(a))

    yield a, slope


RULES.update(
    {
        "linalg.eig": _eig,
        "linalg.eigh": _eigh,
        "linalg.eigvals": _eigvals,
        "linalg.eigvalsh": _eigvalsh,
        "linalg.qr": _qr,
        "linalg.slogdet": _slogdet,
        "linalg.svd": _svd,
        "linalg.svdvals": _svdvals,
    }
)
