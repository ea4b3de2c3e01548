"""Gradients of factorizations, whose rules get a gradient for each result, and None for one nobody uses.

A factor is known but for its gauge, such as the sign of a vector, and a rule is right for functions that do
not depend on it. The gradient of vectors is NaN or infinite where eigenvalues or singular values are equal.
"""

# Operands are calls and arrays, whose results are known when they are awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import linalg as _linalg
from ..devices import gather
from ._backward import RULES, bound, refuse
from ._elementwise import Rule
from ._rules import adjoint, composition, conjugate

__all__: list[str] = []

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays
linalg: Any = _linalg


def _row(x: Any) -> Any:
    return arrays.expand_dims(x, axis=-2)


def _column(x: Any) -> Any:
    return arrays.expand_dims(x, axis=-1)


def _over_gaps(x: Any, values: Any) -> Any:
    """Divide element i, j of matrices by ``values[j] - values[i]``, with zeros on the diagonal."""
    is_diagonal = np.eye(x.shape[-1], dtype=bool)
    return arrays.where(is_diagonal, 0, x / arrays.where(is_diagonal, 1, _row(values) - _column(values)))


def _sum(*terms: Any) -> Any:
    """Add terms, of which some may be None; returns None if all are."""
    total: Any = None
    for one in terms:
        total = one if total is None else total if one is None else total + one
    return total


def _on_diagonal(x: Any) -> Any:
    return None if x is None else _row(x) * np.eye(x.shape[-1], dtype=x.dtype.dtype)


def _eigvalsh(call: Any, g: Any) -> Iterator[Rule]:
    yield from _hermitian(call, g, None)


def _eigh(call: Any, g: Any) -> Iterator[Rule]:
    yield from _hermitian(call, *g)


def _hermitian(call: Any, of_values: Any, of_vectors: Any) -> Iterator[Rule]:
    at = bound(call)
    if at["b"] is not None:
        raise refuse(call.function.name, "the generalised problem has no rule")

    def slope() -> Any:
        made = linalg.eigh(at["a"], at["UPLO"]) if call.function.name == "linalg.eigvalsh" else call
        v = made[1]
        if of_vectors is None:
            return (v * _row(of_values)) @ adjoint(v)
        turned = adjoint(v) @ of_vectors
        # The gradient is Hermitian, whichever triangle is read.
        inside = _over_gaps(0.5 * (turned - adjoint(turned)), made[0])
        return v @ _sum(inside, _on_diagonal(of_values)) @ adjoint(v)

    yield at["a"], slope


def _eig(call: Any, g: Any) -> Iterator[Rule]:
    """Boeddeker et al., On the computation of complex-valued gradients (2017): vectors have length 1."""
    of_values, of_vectors = g

    def slope() -> Any:
        back, inside = adjoint(call[1]), _on_diagonal(of_values)
        if of_vectors is not None:
            turned = back @ of_vectors
            lengths = arrays.real(linalg.diagonal(turned))
            turned = turned - (back @ call[1]) * _row(lengths)
            inside = _sum(_over_gaps(turned, conjugate(call[0])), inside)
        return linalg.solve(back, inside @ back)

    yield bound(call)["a"], slope


def _svdvals(call: Any, g: Any) -> Iterator[Rule]:
    yield from _singular(call, bound(call)["x"], None, g, None)


def _svd(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, parts = at["a"], g if at["compute_uv"] else (None, g, None)
    has_vectors = parts[0] is not None or parts[2] is not None
    if at["full_matrices"] and has_vectors and x.shape[-1] != x.shape[-2]:
        raise refuse("linalg.svd", "the full matrices are not unique; pass full_matrices=False")
    yield from _singular(call if has_vectors else None, x, *parts)


def _singular(call: Any, x: Any, of_u: Any, of_s: Any, of_vh: Any) -> Iterator[Rule]:
    """Townsend, Differentiating the singular value decomposition (2016)."""

    def slope() -> Any:
        made = call if of_u is not None or of_vh is not None else linalg.svd(x, full_matrices=False)
        u, vh = made[0], made[2]
        if made is not call:
            return (u * _row(of_s)) @ vh
        s = made[1]
        inside = left = right = None
        if of_u is not None:
            turned = adjoint(u) @ of_u
            inside = (turned - adjoint(turned)) * _row(s)
            if x.dtype.kind == "complex":
                phases = 1j * arrays.imag(linalg.diagonal(turned)) / s
                left = _on_diagonal(phases)
        if of_vh is not None:
            turned = vh @ adjoint(of_vh)
            inside = _sum(inside, (turned - adjoint(turned)) * _column(s))
        inside = _sum(_over_gaps(inside, s * s), _on_diagonal(of_s), left)
        result = u @ inside @ vh
        if of_u is not None and x.shape[-2] > x.shape[-1]:
            outside = of_u / _row(s)
            result = result + (outside - u @ (adjoint(u) @ outside)) @ vh
        if of_vh is not None and x.shape[-1] > x.shape[-2]:
            right = of_vh / _column(s)
            result = result + u @ (right - (right @ adjoint(vh)) @ vh)
        return result

    yield x, slope


def _qr(call: Any, g: Any) -> Iterator[Rule]:
    """Seeger et al., Auto-differentiating linear algebra (2017); wide matrices begin with square ones."""
    at = bound(call)
    a, mode = at["a"], at["mode"]
    rows, columns = a.shape[-2:]
    if rows < columns:
        yield from composition(_wide_qr)(call, g)
        return
    of_q, of_r = g if mode != "r" else (None, g)
    if mode == "complete" and rows > columns and of_q is not None:
        raise refuse("linalg.qr", "the complete Q is not unique; pass mode='reduced'")

    def slope() -> Any:
        made = linalg.qr(a) if mode == "r" or rows > columns else call
        q, r = made[0], made[1]
        inside = None if of_r is None else of_r[..., :columns, :] @ adjoint(r)
        if of_q is not None:
            inside = _sum(inside, -(adjoint(q) @ of_q))
        upper = arrays.triu(inside, k=1)
        diagonal = arrays.real(linalg.diagonal(inside))
        whole = q @ (upper + adjoint(upper) + _on_diagonal(diagonal))
        return adjoint(linalg.solve(r, adjoint(_sum(whole, of_q))))

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
            factor = _sum(factor, 1j * arrays.imag(conjugate(call[0]) * of_sign))
        if factor is None:
            return None
        return arrays.reshape(factor, (*factor.shape, 1, 1)) * adjoint(linalg.inv(a))

    yield a, slope


RULES.update({
    "linalg.eig": _eig, "linalg.eigh": _eigh, "linalg.eigvalsh": _eigvalsh, "linalg.qr": _qr,
    "linalg.slogdet": _slogdet, "linalg.svd": _svd, "linalg.svdvals": _svdvals,
})  # fmt: skip
