"""Gradients of triangular factors, and of solutions by them.

A small change of a matrix does not change the order of its rows, so an exchange of rows is a constant.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ._backward import RULES, bound
from ._elementwise import Rule, summed_to
from ._factor_rules import added, hermitian_part
from ._rules import adjoint, composition, conjugate

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
linalg = later("trio_accel.linalg")


def _lower(factors: Any) -> Any:
    """Return the lower factors of packed factors, which are made square by columns of the identity."""
    rows, columns = factors.shape[-2:]
    below = arrays.tril(factors, k=-1)
    if rows > columns:
        below = arrays.pad(below, [(0, 0)] * (len(factors.shape) - 1) + [(0, rows - columns)])
    return below + np.eye(rows, dtype=factors.dtype.dtype)


def _lu(call: Any, g: Any) -> Iterator[Rule]:
    """Wide matrices begin with square ones, and tall ones have more rows in the lower factor.

    All of it is from the factors and pivots of the call, because a library may choose other pivots for
    another matrix.
    """
    a = bound(call)["a"]
    rows, columns = a.shape[-2:]
    count = min(rows, columns)

    def slope() -> Any:
        factors, pivots, of_factors = call[0], call[1], g[0]
        lower, upper = _lower(factors[..., :count]), arrays.triu(factors[..., :count, :count])
        of_square = of_factors[..., :count]
        of_lower = arrays.tril(of_square, k=-1)
        if rows < columns:
            # The other columns are solutions with the lower factor.
            solved = linalg.solve(adjoint(lower), of_factors[..., count:])
            of_lower = of_lower - arrays.tril(solved @ adjoint(factors[..., count:]), k=-1)
        below = arrays.tril(adjoint(lower) @ of_lower, k=-1)
        above = arrays.triu(arrays.triu(of_square[..., :count, :]) @ adjoint(upper))
        if rows > columns:
            above = arrays.pad(above, [(0, 0)] * (len(a.shape) - 2) + [(0, rows - columns), (0, 0)])
            extra_pivots = np.broadcast_to(
                np.arange(columns, rows, dtype=np.int32), (*a.shape[:-2], rows - columns)
            )
            pivots = arrays.concat([pivots, extra_pivots], axis=-1)
        inside = adjoint(linalg.solve(upper, adjoint(below + above)))
        if rows < columns:
            inside = arrays.concat([inside, of_factors[..., count:]], axis=-1)
        # The upper factor of these is the identity.
        return linalg.lu_solve([lower, pivots], inside, 2)

    yield a, slope


def _lu_solve(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    lu_and_piv, b, trans = args["lu_and_piv"], args["b"], args["trans"]
    factors, pivots = lu_and_piv

    def of_factors() -> Any:
        identity = arrays.zeros_like(factors) + np.eye(factors.shape[-1], dtype=factors.dtype.dtype)
        exchanged = linalg.lu_solve([identity, pivots], of_matrix(factors))
        below = exchanged @ adjoint(arrays.triu(factors))
        return arrays.tril(below, k=-1) + arrays.triu(adjoint(_lower(factors)) @ exchanged)

    of_right, of_matrix = _solution(call, g, b, trans, partial(linalg.lu_solve, lu_and_piv))
    yield b, of_right
    if isinstance(lu_and_piv, (list, tuple)):
        yield factors, of_factors
    else:
        # It is a call of `lu`, with both of its results.
        yield lu_and_piv, lambda: [of_factors(), None]


def _solution(
    call: Any, g: Any, b: Any, trans: Any, solve: Callable[..., Any]
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what makes the gradients of the right side, and of a matrix like another one.

    Args:
        call: The solution.
        g: Its gradient.
        b: The right side.
        trans: Which of the matrix, its transpose and its conjugate transpose was solved with.
        solve: Solves with the same matrix: called with a right side, and one of these.
    """
    is_vector = len(b.shape) == 1
    letter = {0: "N", 1: "T", 2: "C"}.get(trans, trans)

    def back() -> Any:
        if letter == "T":
            return conjugate(solve(conjugate(g), 0))
        return solve(g, 2 if letter == "N" else 0)

    slope = cache(back)

    def of_matrix(matrix: Any) -> Any:
        x, z = (arrays.expand_dims(vector, axis=-1) if is_vector else vector for vector in (call, slope()))
        product = z @ adjoint(x) if letter == "N" else x @ adjoint(z)
        return -summed_to(conjugate(product) if letter == "T" else product, matrix.shape)

    return lambda: summed_to(slope(), b.shape), of_matrix


def _solve_triangular(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    a, b, is_lower, is_unit = args["a"], args["b"], args["lower"], args["unit_diagonal"]

    def solve(right: Any, trans: int) -> Any:
        return linalg.solve_triangular(a, right, trans, is_lower, is_unit)

    of_right, of_matrix = _solution(call, g, b, args["trans"], solve)
    yield b, of_right
    triangle = partial(arrays.tril, k=-int(is_unit)) if is_lower else partial(arrays.triu, k=int(is_unit))
    yield a, lambda: triangle(of_matrix(a))


def _cho_solve(c_and_lower: Any, b: Any) -> Any:
    factor, is_lower = c_and_lower
    first, then = ("N", "C") if is_lower else ("C", "N")
    return linalg.solve_triangular(
        factor, linalg.solve_triangular(factor, b, first, is_lower), then, is_lower
    )


def _ldl(call: Any, g: Any) -> Iterator[Rule]:
    """The outer factor has the identity in place of each block: the derivative is zero there."""
    args = bound(call)
    turn = adjoint if args["hermitian"] else _transposed
    of_outer, of_blocks, _ = g

    def slope() -> Any:
        outer, blocks = call[0], call[1]
        is_block = arrays.logical_or(blocks != 0, np.eye(blocks.shape[-1], dtype=bool))
        inside = None if of_blocks is None else arrays.where(is_block, of_blocks, 0)
        if of_outer is not None:
            turned = adjoint(outer) @ of_outer
            outside = arrays.where(is_block, 0, arrays.tril(turned) if args["lower"] else arrays.triu(turned))
            inside = added(inside, adjoint(linalg.solve(blocks, adjoint(outside))))
        back = adjoint(outer)
        return hermitian_part(turn(linalg.solve(back, turn(linalg.solve(back, inside)))), turn)

    yield args["a"], slope


def _transposed(x: Any) -> Any:
    return x.mT


RULES.update(
    {
        "linalg.cho_solve": composition(_cho_solve),
        "linalg.ldl": _ldl,
        "linalg.lu": _lu,
        "linalg.lu_solve": _lu_solve,
        "linalg.solve_triangular": _solve_triangular,
    }
)
