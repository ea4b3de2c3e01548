"""Expressions with loops, run by Python itself: one element after another, with NumPy's numbers."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NAMES = "sqrt exp sin floor minimum maximum where clip isnan float32 float64 int32 int64 conj remainder"


def _identity(dtype: np.dtype[Any], *, is_least: bool) -> Any:
    if dtype.kind == "b":
        return np.bool_(is_least)
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).max if is_least else np.iinfo(dtype).min)
    return dtype.type(np.inf if is_least else -np.inf)


def _folded(combine: Callable[[Any, Any], Any], first: Callable[[Any], Any]) -> Callable[..., Any]:
    def fold(values: Iterable[Any]) -> Any:
        # Results of no values follow from their dtype, which only the expression knows.
        every = [*values]
        return functools.reduce(combine, every, first(every[0])) if every else None

    return fold


def _widened(value: Any) -> Any:
    """NumPy's dtype of a sum: 64 bits for integers."""
    if isinstance(value, np.generic) and value.dtype.kind in "biu":
        return np.uint64(0) if value.dtype.kind == "u" else np.int64(0)
    return 0


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _folded(lambda a, b: a + type(a)(b) if isinstance(a, np.integer) else a + b, _widened),
    "prod": _folded(
        lambda a, b: a * type(a)(b) if isinstance(a, np.integer) else a * b, lambda v: _widened(v) + 1
    ),
    "min": _folded(np.minimum, lambda v: _identity(np.asarray(v).dtype, is_least=True)),
    "max": _folded(np.maximum, lambda v: _identity(np.asarray(v).dtype, is_least=False)),
}


class _Loaded:
    """An array that takes the nearest index for an index out of range, and acts as a number without any."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getitem__(self, at: Any) -> Any:
        places = at if isinstance(at, tuple) else (at,)
        extents = self._array.shape
        return self._array[tuple([max(-n, min(int(k), n - 1)) for k, n in zip(places, extents, strict=True)])]


def by_python(
    text: str,
    arguments: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    loaded: Mapping[str, Array] = {},
    shape: tuple[int, ...] | None = None,
    names: Mapping[str, Any] = {},
) -> list[list[Any]]:
    """Run the text for each element.

    Args:
        text: Statements, or one expression with the result ``out``.
        arguments: Arrays to read element by element, and numbers.
        outputs: Names of the results.
        loaded: Arrays that elements are loaded from.
        shape: Of the result, if there is no array of elements.
        names: More names.

    Returns:
        For each element, in C order, the results; None if no value determines the dtype.
    """
    text = textwrap.dedent(text).strip("\n")
    if "\n" not in text and "=" not in text.replace("==", "").replace("<=", "").replace(">=", ""):
        text = f"out = {text}"
    code = compile(text, "<expression>", "exec")
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    shape = np.broadcast_shapes(*[array.shape for array in arrays.values()]) if shape is None else shape
    spread = {name: np.broadcast_to(array, shape) for name, array in arrays.items()}
    functions = {name: getattr(np, name) for name in _NAMES.split()}
    found: list[list[Any]] = []
    with np.errstate(all="ignore"):
        for place in np.ndindex(*shape):
            values = {**functions, **REDUCTIONS, "inf": np.inf, "nan": np.nan, **arguments, **names}
            values |= {name: array[place] for name, array in spread.items()}
            values |= {name: _Loaded(array) for name, array in loaded.items()}
            values["i"] = place.__getitem__
            exec(code, values)
            found.append([values[name] for name in outputs])
    return found
