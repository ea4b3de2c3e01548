"""Typed expressions, evaluated by NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ._functions import FUNCTIONS
from ._typing import Step, TypedExpression

__all__ = ["evaluate"]

_UFUNCS = {function.name: function.ufunc for function in FUNCTIONS.values() if function.ufunc is not None}


def _power(base: Any, exponent: Any) -> Any:
    """Compute a power: NumPy's, but of whole numbers with a negative exponent, which NumPy refuses."""
    if exponent.dtype.kind != "i" or not (exponent < 0).any():
        return np.power(base, exponent)
    inverse = np.where(np.abs(base) == 1, np.where(exponent & 1, base, 1), 0).astype(base.dtype)
    return np.where(exponent < 0, inverse, np.power(base, np.maximum(exponent, 0)))


def _log1p(x: Any) -> Any:
    """Compute it by NumPy, but of small complex numbers, whose real part NumPy loses."""
    made = np.asarray(np.log1p(x))
    if made.dtype.kind == "c":
        near = np.maximum(np.abs(x.real), np.abs(x.imag)) < 0.5
        np.copyto(made.real, 0.5 * np.log1p(x.imag * x.imag + x.real * x.real + 2 * x.real), where=near)
    return made


_OTHERS: dict[str, Any] = {
    "where": np.where, "real": np.real, "imag": np.imag, "power": _power, "log1p": _log1p,
}  # fmt: skip


_NOTHING: Mapping[int, Any] = MappingProxyType({})


def evaluate(
    expression: TypedExpression,
    arguments: Sequence[Any],
    indices: Mapping[int, npt.NDArray[Any]] = _NOTHING,
    loaded: Mapping[int, npt.NDArray[Any]] = _NOTHING,
) -> list[npt.NDArray[Any]]:
    """Compute the results for arrays that broadcast, and NumPy scalars.

    Args:
        expression: The typed expression.
        arguments: Arrays or numbers of the types that it was typed for; Python numbers as their carriers.
            Arguments that are only loaded from are not looked at.
        indices: By their axes, indices of the elements of the result.
        loaded: By their numbers, the arguments that elements are loaded from.

    Returns:
        The results, which may be arguments, or broadcast.
    """
    values: list[Any] = []
    left = _last_uses(expression)
    with np.errstate(all="ignore"):
        for number, step in enumerate(expression.steps):
            if step.function == "index":
                value: Any = indices[int(step.value.real)]
            elif step.function == "load":
                value = _load(loaded[int(step.value.real)], [values[number] for number in step.steps])
            else:
                value = _value(step, values, arguments)
            values.append(value)
            for used in left[number]:
                # Large temporaries make way for the next ones.
                values[used] = None
    return [np.asarray(values[number]) for number in expression.outputs]


def _last_uses(expression: TypedExpression) -> list[list[int]]:
    """By step, what no later step needs."""
    last = dict[int, int]()
    for number, step in enumerate(expression.steps):
        last.update(dict.fromkeys(step.steps, number))
    found: list[list[int]] = [[] for _ in expression.steps]
    for used, number in last.items():
        if used not in expression.outputs:
            found[number].append(used)
    return found


def _load(array: npt.NDArray[Any], indices: Sequence[Any]) -> Any:
    """Load elements: a negative index counts from the end, and one outside of the array is the nearest."""
    clipped = [
        np.clip(index, -extent, extent - 1) for index, extent in zip(indices, array.shape, strict=True)
    ]
    return array[tuple(clipped)]


def _value(step: Step, values: list[Any], arguments: Sequence[Any]) -> Any:
    dtype = step.dtype.dtype
    if step.function == "argument":
        return np.asarray(arguments[int(step.value.real)], dtype)
    if step.function == "constant":
        return np.array(step.value, dtype)
    given = [values[number] for number in step.steps]
    if step.function == "cast":
        return given[0].astype(dtype)
    return (_OTHERS.get(step.function) or _UFUNCS[step.function])(*given)
