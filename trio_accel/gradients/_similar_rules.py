"""Gradients of similar matrices in Schur's and Hessenberg's forms.

A small change of a matrix turns its unitary factor Z by an antihermitian matrix W: ``dZ = Z @ W``. With
``E = Z^H @ dA @ Z``, the form changes by ``E + form @ W - W @ form``. This is zero at the zeros of the form,
which determines W except for the phases of the columns. The upper triangle of W does not affect these zeros,
so they are linear equations for the lower triangle.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..devices import Call
from ._backward import RULES, bound, refuse
from ._elementwise import Rule
from ._factor_rules import added, column, on_diagonal, over_gaps, row
from ._rules import adjoint, conjugate

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
linalg = later("trio_accel.linalg")

# The recursion of Hessenberg's form is six calls a column, and a chain has 4096 calls at most.
_MAX_COLUMNS = 256


def _of_turns(form: Any, z: Any, of_form: Any, of_z: Any) -> Any:
    """Return W's gradient, given the gradients of the form and Z."""
    slope = None if of_z is None else adjoint(z) @ of_z
    if of_form is not None:
        back = adjoint(form)
        slope = added(slope, back @ of_form - of_form @ back)
    return slope - adjoint(slope)


def _schur(call: Any, g: Any) -> Iterator[Rule]:
    """Use the vectors of the form, which are also triangular, so that eigenvalues must differ.

    A block of two rows has equal elements on its diagonal, which determines how its columns are turned.
    """
    of_form, of_z = g

    def slope() -> Any:
        form, z = call[0], call[1]
        take_below, values, above = partial(arrays.tril, k=-1), linalg.diagonal(form), of_form
        if form.dtype.kind != "complex":
            is_linked = form * np.eye(form.shape[-1], k=-1, dtype=form.dtype.dtype) != 0
            take_below = partial(_without, is_linked)
            squares = arrays.where(is_linked, -form * form.mT, 0)
            values = values + 1j * _pairs(arrays.sqrt(squares))
            if above is not None:
                above = above - take_below(above)
            turns = _of_turns(form, z, above, of_z)
            sums = arrays.where(is_linked, 2 * (form + form.mT), 1)
            above = added(above, -on_diagonal(_pairs(arrays.where(is_linked, turns / sums, 0))))
        elif above is not None:
            above = arrays.triu(above)
        vectors = _in_order(form, values)
        turns = take_below(_of_turns(form, z, above, of_z))
        turns = turns if turns.dtype == vectors.dtype else turns.cast(vectors.dtype)
        turned = adjoint(linalg.solve(vectors, adjoint(turns)) @ vectors)
        inside = take_below(over_gaps(turned, conjugate(values)))
        inside = linalg.solve(adjoint(vectors), inside @ adjoint(vectors))
        if form.dtype.kind != "complex":
            inside = arrays.real(inside)
        return z @ added(above, inside) @ adjoint(z)

    yield bound(call)["a"], slope


def _without(is_linked: Any, x: Any) -> Any:
    """Return what is below the diagonal, and not in a block."""
    return arrays.where(is_linked, 0, arrays.tril(x, k=-1))


def _pairs(x: Any) -> Any:
    """Return elements below the diagonal for the first row of a block, and their negatives for the second."""
    return arrays.sum(x, axis=-2) - arrays.sum(x, axis=-1)


def _in_order(form: Any, values: Any) -> Any:
    """Return the eigenvectors in the order of the eigenvalues on the diagonal."""
    factors = linalg.eig(form)
    nearest = arrays.argmin(arrays.abs(column(values) - row(factors[0])), axis=-1)
    return arrays.take_along_axis(factors[1], row(nearest), axis=-1)


def _hessenberg(call: Any, g: Any) -> Iterator[Rule]:
    """By one column after the other, from the last: no element next to the diagonal may be zero."""
    args = bound(call)
    a = args["a"]
    count = a.shape[-1]
    if count > _MAX_COLUMNS:
        raise refuse(
            call.function.name, f"its recursion is for up to {_MAX_COLUMNS} columns, and there are {count}"
        )
    of_form, of_q = g if args["calc_q"] else (g, None)

    def slope() -> Any:
        factors = call if args["calc_q"] else linalg.hessenberg(a, calc_q=True)
        above = None if of_form is None else arrays.triu(of_form, k=-1)
        if count < 3:
            # The factor only has phases.
            if isinstance(of_q, Call):
                of_q.silence()
            return None if above is None else factors[1] @ above @ adjoint(factors[1])
        form, q = factors[0], factors[1]
        return q @ added(above, _below(adjoint(form), _of_turns(form, q, above, of_q))) @ adjoint(q)

    yield a, slope


def _below(back: Any, turns: Any) -> Any:
    """Return the gradient for the zeros of the form, given the gradient of W, whose first column is 0."""
    count = back.shape[-1]
    slope: Any = None
    for k in range(count - 2, 0, -1):
        vector = turns[..., k : k + 1]
        if slope is not None:
            vector = vector + back @ slope[..., :1] - slope @ back[..., k : count - 2, k : k + 1]
        is_below = np.arange(count)[:, None] > k
        vector = arrays.where(is_below, vector, 0) / back[..., k - 1 : k, k : k + 1]
        slope = vector if slope is None else arrays.concat([vector, slope], axis=-1)
    return arrays.pad(slope, [(0, 0)] * (len(back.shape) - 1) + [(0, 2)])


RULES.update({"linalg.hessenberg": _hessenberg, "linalg.schur": _schur})
