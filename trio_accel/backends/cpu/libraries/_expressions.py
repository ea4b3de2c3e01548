"""Expressions on the CPU: NumPy, in pieces that fit into the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...base.expressions import (
    Argument,
    SpecializedExpression,
    SpecializedReduction,
    evaluate,
    evaluate_reduction,
    unpack_scalars,
)
from ...base.kernels import kernel
from ...base.ops import ElementwiseSpec, ReductionSpec
from ..kit._pieces import pieces
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work

__all__ = ["elementwise", "reduce"]


@kernel(ElementwiseSpec, backend="cpu")
def elementwise(spec: ElementwiseSpec, memory: CpuMemory) -> Work:
    """Take views; pieces are computed one after another."""
    arrays = [memory.view(array) for array in spec.arrays]
    results = [memory.view(result) for result in spec.results]

    def work() -> None:
        specialized = SpecializedExpression.decode(spec.expression)
        expression, scalars = specialized.typed, _scalars(specialized.arguments, spec.scalars)
        if not results[0].size:
            return
        for piece in pieces(*results, *arrays):
            given = _arguments(specialized.arguments, piece[len(results) :], scalars)
            made = evaluate(expression, list(given))
            if len(made) > 1:
                # A result that is an argument as it is may lie where another result is written.
                made = [value if value.flags.owndata else value.copy() for value in made]
            for out, value in zip(piece, made, strict=False):
                np.copyto(out, value)

    return work


@kernel(ReductionSpec, backend="cpu")
def reduce(spec: ReductionSpec, memory: CpuMemory) -> Work:
    """Take views; the mapped values are one temporary array."""
    arrays, out = [memory.view(array) for array in spec.arrays], memory.view(spec.out)
    shape = spec.arrays[0].shape

    def work() -> None:
        specialized = SpecializedReduction.decode(spec.reduction)
        given = _arguments(specialized.arguments, arrays, _scalars(specialized.arguments, spec.scalars))
        made = evaluate_reduction(specialized.typed, list(given), shape, spec.axes)
        np.copyto(out, made.reshape(out.shape))

    return work


def _scalars(arguments: Sequence[Argument], data: bytes) -> list[Any]:
    return unpack_scalars(data, [argument.dtype for argument in arguments if not argument.is_array])


def _arguments(
    arguments: Sequence[Argument], arrays: Sequence[HostArray], scalars: Sequence[Any]
) -> Iterator[Any]:
    """Arrays and scalars in the order of the expression's inputs."""
    next_array, next_scalar = iter(arrays), iter(scalars)
    for argument in arguments:
        yield next(next_array if argument.is_array else next_scalar)
