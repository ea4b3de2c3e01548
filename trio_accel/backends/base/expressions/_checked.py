"""Indices that are checked before they are used (D146): one outside of its axis fails the operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ..contract.errors import OutOfRangeError
from ..contract.ops import StatusArray
from ._typing import Step, TypedExpression

__all__ = ["CHECK_WORDS", "check_places", "check_words", "places_of", "word_of"]

CHECK_WORDS = 3
"""Status words of a kernel: `word_of` one load that had an index outside, and that index, of 64 bits."""

_MOST_AXES = 64


def word_of(load: int, axis: int) -> int:
    """Return the status word for an index that a load has along an axis.

    Args:
        load: Number of the step.
        axis: The axis of the array that is loaded from.
    """
    return 1 + load * _MOST_AXES + axis


def check_words(expression: TypedExpression, shapes: Sequence[tuple[int, ...]], words: StatusArray) -> None:
    """Look at the status words of a kernel.

    Args:
        expression: The expression.
        shapes: Of the arrays that it loads from, in order.
        words: What the kernel has written.

    Raises:
        OutOfRangeError: There was an index outside.
    """
    if words[0]:
        load, axis = divmod(int(words[0]) - 1, _MOST_AXES)
        source = int(expression.steps[load].value.real)
        shape = shapes[[number for number, _ in expression.loads].index(source)]
        raise _outside(expression, load, axis, int(words[1:].view(np.int64)[0]), shape)


def check_places(
    expression: TypedExpression, load: int, indices: Sequence[Any], shape: tuple[int, ...]
) -> None:
    """Require that indices are within an array.

    Args:
        expression: The expression.
        load: Number of the step that loads.
        indices: An array of indices for each axis.
        shape: Of the array that is loaded from.

    Raises:
        OutOfRangeError: One is not; it tells of the first one.
    """
    for axis, (step, index, extent) in enumerate(
        zip(expression.steps[load].steps, indices, shape, strict=True)
    ):
        if expression.steps[step].function == "index" or not index.size:
            continue
        if index.min() < -extent or index.max() >= extent:
            first = index[(index < -extent) | (index >= extent)][0]
            raise _outside(expression, load, axis, int(first), shape)


def places_of(expression: TypedExpression) -> TypedExpression:
    """Take the indices of a load, where an expression has a load and a value as its results.

    Returns:
        An expression whose results are the indices, and then the value. Nothing is loaded.
    """
    load, value = expression.outputs
    steps, step = list(expression.steps), expression.steps[load]
    steps[load] = Step("constant", step.dtype, (), 0)
    return attrs.evolve(expression, steps=tuple(steps), outputs=(*step.steps, value))


def _outside(
    expression: TypedExpression, load: int, axis: int, index: int, shape: tuple[int, ...]
) -> OutOfRangeError:
    step, names = expression.steps[load], expression.checked
    array, where = names[int(step.value.real)], expression.steps[step.steps[axis]]
    # An index is converted to int64 before it is used.
    while where.function in ("cast", "minimum"):
        where = expression.steps[where.steps[0]]
    holder = f"{names[int(where.value.real)]}: " if where.function == "argument" else ""
    return OutOfRangeError(
        f"{holder}{index} is outside axis {axis} of {array}, which has length {shape[axis]}",
        index=index,
        axis=axis,
        length=shape[axis],
    )
