"""Expressions on the CPU: NumPy, in pieces that fit into the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...base.expressions import (
    Argument,
    ElementwiseRecipe,
    ReductionRecipe,
    evaluate,
    evaluate_reduction,
    unpack_scalars,
)
from ...base.kernels import Call, kernel
from ...base.ops import ElementwiseSpec, ReductionSpec
from ..kit._pieces import pieces
from ..runtime._memory import HostArray

__all__ = ["elementwise", "reduce"]


@kernel(ElementwiseSpec, backend="cpu")
def elementwise(spec: ElementwiseSpec, call: Call) -> None:
    """Compute pieces one after another."""
    arrays = [call.array(array) for array in spec.arrays]
    results = [call.array(result) for result in spec.results]
    recipe = ElementwiseRecipe.decode(spec.recipe)
    expression, scalars = recipe.typed, _scalars(recipe.arguments, spec.scalars)
    if not results[0].size:
        return
    for piece in pieces(*results, *arrays):
        given = _arguments(recipe.arguments, piece[len(results) :], scalars)
        made = evaluate(expression, list(given))
        if len(made) > 1:
            # A result that is an argument as it is may lie where another result is written.
            made = [value if value.flags.owndata else value.copy() for value in made]
        for out, value in zip(piece, made, strict=False):
            np.copyto(out, value)


@kernel(ReductionSpec, backend="cpu")
def reduce(spec: ReductionSpec, call: Call) -> None:
    """Reduce an array; the mapped values are one temporary array."""
    arrays, out = [call.array(array) for array in spec.arrays], call.array(spec.out)
    recipe = ReductionRecipe.decode(spec.recipe)
    given = _arguments(recipe.arguments, arrays, _scalars(recipe.arguments, spec.scalars))
    made = evaluate_reduction(recipe.typed, list(given), spec.arrays[0].shape, spec.axes)
    np.copyto(out, made.reshape(out.shape))


def _scalars(arguments: Sequence[Argument], data: bytes) -> list[Any]:
    return unpack_scalars(data, [argument.dtype for argument in arguments if not argument.is_array])


def _arguments(
    arguments: Sequence[Argument], arrays: Sequence[HostArray], scalars: Sequence[Any]
) -> Iterator[Any]:
    """Arrays and scalars in the order of the expression's inputs."""
    next_array, next_scalar = iter(arrays), iter(scalars)
    for argument in arguments:
        yield next(next_array if argument.is_array else next_scalar)
