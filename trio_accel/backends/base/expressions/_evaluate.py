"""Typed expressions, evaluated by NumPy; and indices that are checked before they are used (D146)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..contract.errors import OutOfRangeError
from ..contract.ops import StatusArray
from ..contract.values import number_array
from ._expression import FUNCTIONS, SPECIAL
from ._typing import Step, TypedExpression

__all__ = [
    "CHECK_WORDS", "Overflow", "Places", "check_places", "check_words", "evaluate", "places_of", "word_of",
]  # fmt: skip

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
        shapes: Shapes of the arrays that it loads from, in order.
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
        shape: The shape of the array that is loaded from.

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


Overflow: TypeAlias = Literal["ignore", "raise"]
"""Steps that over- or underflow are ignored, or raise `FloatingPointError`."""

_UFUNCS = {function.name: function.ufunc for function in FUNCTIONS.values() if function.ufunc is not None}


def _power(base: Any, exponent: Any) -> Any:
    """Compute a power: NumPy's, but of whole numbers with a negative exponent, which NumPy refuses."""
    if exponent.dtype.kind != "i" or not (exponent < 0).any():
        return np.power(base, exponent)
    inverse = np.where(np.abs(base) == 1, np.where(exponent & 1, base, 1), 0).astype(base.dtype)
    return np.where(exponent < 0, inverse, np.power(base, np.maximum(exponent, 0)))


def _log1p(x: Any) -> Any:
    """Compute it by NumPy, but of small complex numbers, whose real part NumPy loses."""
    made: Any = np.asarray(np.log1p(x))
    if made.dtype.kind == "c":
        near = np.maximum(np.abs(x.real), np.abs(x.imag)) < 0.5
        np.copyto(made.real, 0.5 * np.log1p(x.imag * x.imag + x.real * x.real + 2 * x.real), where=near)
    return made


def _expm1(x: Any) -> Any:
    """Compute it by NumPy, but of complex numbers that are zero or not finite, where C99 says otherwise."""
    made = np.asarray(np.expm1(x))
    if made.dtype.kind == "c":
        np.copyto(made, np.exp(x) - 1, where=~np.isfinite(x) | (x == 0))
    return made


def _floor_divide(x1: Any, x2: Any) -> Any:
    """Compute it by NumPy, but of infinite numbers, whose quotient the standard rounds as any other."""
    made = np.asarray(np.floor_divide(x1, x2))
    if made.dtype.kind not in "biu":
        # It is infinite, zero or NaN: there is nothing to round.
        np.divide(x1, x2, out=made, where=np.isinf(x1) | np.isinf(x2))
    return made


def _nextafter(x1: Any, x2: Any) -> Any:
    """Compute it by NumPy, but from one zero to the other, where NumPy's of float16 stays."""
    made = np.asarray(np.nextafter(x1, x2))
    np.copyto(made, x2, where=x1 == x2)
    return made


def _tanh(x: Any) -> Any:
    """Compute it by NumPy, but of infinite complex numbers, where the standard has another zero than C99."""
    made: Any = np.asarray(np.tanh(x))
    if made.dtype.kind == "c":
        np.copysign(made.imag, x.imag, out=made.imag, where=np.isinf(x.real))
    return made


def _tan(x: Any) -> Any:
    """Compute it by NumPy, but of infinite complex numbers, as it goes with the hyperbolic tangent."""
    made: Any = np.asarray(np.tan(x))
    if made.dtype.kind == "c":
        np.copysign(made.real, x.real, out=made.real, where=np.isinf(x.imag))
    return made


def _special(name: str, x: Any) -> Any:
    """Compute a function of SciPy's, which knows no type below float32."""
    # It is slow to import, and rarely used.
    import scipy.special

    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return np.asarray(getattr(scipy.special, name)(wide)).astype(x.dtype, copy=False)


_OTHERS: dict[str, Any] = {
    "where": np.where, "real": np.real, "imag": np.imag, "power": _power, "log1p": _log1p, "expm1": _expm1,
    "floor_divide": _floor_divide, "nextafter": _nextafter, "tanh": _tanh, "tan": _tan,
    **{name: partial(_special, function) for name, function in SPECIAL.items()},
}  # fmt: skip


_NOTHING: Mapping[int, Any] = MappingProxyType({})


@attrs.frozen(eq=False)
class Places:
    """Elements of an array at computed indices: lines of it where an index is that of the result, ``i(k)``.

    NumPy copies lines about five times as fast as elements by themselves.

    Attributes:
        array: The array, with the axes first that are not taken as lines.
        index: Indices for it, and then slices.
        order: The axes of the result in the order of these.
    """

    array: npt.NDArray[Any]
    index: tuple[Any, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, array: npt.NDArray[Any], indices: Sequence[Any], steps: Sequence[Step]) -> Places:
        """Find the lines.

        Args:
            array: The array.
            indices: One for each of its axes, inside of it.
            steps: The steps that made these.
        """
        ndim = max(index.ndim for index in indices)
        whole = cls(array, tuple(indices), tuple(range(ndim)))
        lines = {
            place: int(np.argmax(index.shape))
            for place, (index, step) in enumerate(zip(indices, steps, strict=True))
            if step.function == "index" and index.size > 1
            # Places that are not one after the other were outside.
            if index.flat[-1] - index.flat[0] == index.size - 1
        }
        kept, others = list(lines.values()), [place for place in range(len(indices)) if place not in lines]
        if not lines or len(set(kept)) < len(kept):
            return whole
        found: list[Any] = []
        for index in [indices[place] for place in others]:
            if index.ndim and any(index.shape[axis] > 1 and index.strides[axis] for axis in kept):
                # Each line has indices of its own.
                return whole
            found.append(index[tuple([0 if axis in kept else slice(None) for axis in range(index.ndim)])])
        found += [slice(int(indices[place].flat[0]), int(indices[place].flat[-1]) + 1) for place in lines]
        rest = [axis for axis in range(ndim) if axis not in kept]
        return cls(array.transpose([*others, *lines]), tuple(found), (*rest, *kept))

    def load(self) -> Any:
        """Take the elements: an array that broadcasts to the result."""
        value = self.array[self.index]
        value = value[(None,) * (len(self.order) - value.ndim) + (...,)]
        return value.transpose(np.argsort(self.order))

    def aligned(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Order the axes of values as those of ``array[index]``."""
        return values.transpose(self.order) if values.ndim else values


def evaluate(
    expression: TypedExpression,
    arguments: Sequence[Any],
    indices: Mapping[int, npt.NDArray[Any]] = _NOTHING,
    loaded: Mapping[int, npt.NDArray[Any]] = _NOTHING,
    out: npt.NDArray[Any] | None = None,
    overflow: Overflow = "ignore",
) -> list[npt.NDArray[Any]]:
    """Compute the results for arrays that broadcast, and NumPy scalars.

    Args:
        expression: The typed expression.
        arguments: Arrays or numbers of the types that it was typed for; Python numbers as their carriers.
            Arguments that are only loaded from are not looked at.
        indices: Indices of the elements of the result, by their axes.
        loaded: The arguments that elements are loaded from, by their numbers.
        out: Where the only result is made, if the function that makes it can write there.
        overflow: Whether a step that over- or underflows raises `FloatingPointError`.

    Returns:
        The results, which may be arguments, or broadcast.

    Raises:
        OutOfRangeError: An index that is checked is outside.
        FloatingPointError: A step over- or underflows, and that is to be raised.
    """
    values: list[Any] = []
    left = _last_uses(expression)
    with np.errstate(divide="ignore", invalid="ignore", over=overflow, under=overflow):
        for number, step in enumerate(expression.steps):
            if step.function == "index":
                value: Any = indices[int(step.value.real)]
            elif step.function == "load":
                value = _load(expression, number, loaded[int(step.value.real)], values)
            else:
                is_last = out is not None and number == expression.outputs[0]
                value = _value(step, values, arguments, out if is_last else None)
            values.append(value)
            for used in left[number]:
                # Large temporaries make way for the next ones.
                values[used] = None
    return [np.asarray(values[number]) for number in expression.outputs]


def _last_uses(expression: TypedExpression) -> list[list[int]]:
    """List, for each step, the values that no later step needs."""
    last = dict[int, int]()
    for number, step in enumerate(expression.steps):
        last.update(dict.fromkeys(step.steps, number))
    found: list[list[int]] = [[] for _ in expression.steps]
    for used, number in last.items():
        if used not in expression.outputs:
            found[number].append(used)
    return found


def _load(expression: TypedExpression, number: int, array: npt.NDArray[Any], values: Sequence[Any]) -> Any:
    """Load elements: an index outside of the array is refused, or is the nearest one inside."""
    steps = expression.steps[number].steps
    at = [values[index] for index in steps]
    if expression.checked:
        check_places(expression, number, at, array.shape)
    else:
        at = [np.clip(index, -extent, extent - 1) for index, extent in zip(at, array.shape, strict=True)]
    return Places.of(array, at, [expression.steps[index] for index in steps]).load()


def _value(step: Step, values: list[Any], arguments: Sequence[Any], out: npt.NDArray[Any] | None) -> Any:
    dtype = step.dtype.dtype
    if step.function == "argument":
        return np.asarray(arguments[int(step.value.real)], dtype)
    if step.function == "constant":
        return number_array(step.value, step.dtype)
    given = [values[number] for number in step.steps]
    if step.function == "cast":
        return given[0].astype(dtype)
    other = _OTHERS.get(step.function)
    if other is not None:
        return other(*given)
    # Large arrays are not written twice.
    is_fit = out is not None and out.dtype == dtype
    return _UFUNCS[step.function](*given, out=out if is_fit else None)
