"""Typed expressions, evaluated by NumPy; and indices that are checked before their use (D146)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..contract.dtypes import HostArray, Ints
from ..contract.errors import OutOfRangeError
from ..contract.ops import Reduce, StatusArray
from ..contract.values import by_way_of_int64, number_array
from ._expression import FUNCTIONS, SPECIAL
from ._pieces import REDUCING, reduced_in_pieces
from ._steps import Pass, TypedExpression, TypedStep

__all__ = [
    "CHECK_WORDS",
    "Overflow",
    "check_words",
    "evaluate",
    "numpy_function",
    "places_of",
    "scatter_program",
    "word_of",
]

CHECK_WORDS = 3
"""Status words of a kernel: `word_of` one load that had an index outside, and that index, of 64 bits."""

_MOST_AXES = 64


def word_of(load: int, axis: int) -> int:
    """Return the status word for the index of a load along an axis.

    Args:
        load: Number of the step.
        axis: The axis of the loaded array.
    """
    return 1 + load * _MOST_AXES + axis


def check_words(expression: TypedExpression, shapes: Sequence[Ints], words: StatusArray) -> None:
    """Look at the status words of a kernel.

    Args:
        expression: The expression.
        shapes: Shapes of the arrays that it loads from, in order.
        words: The status words that the kernel has written.

    Raises:
        OutOfRangeError: An index was out of range.
    """
    if words[0]:
        load, axis = divmod(int(words[0]) - 1, _MOST_AXES)
        source = int(expression.steps[load].value.real)
        shape = shapes[[number for number, _ in expression.loads].index(source)]
        raise _outside(expression, load, axis, int(words[1:].view(np.int64)[0]), shape)


def check_places(expression: TypedExpression, load: int, indices: Sequence[Any], shape: Ints) -> list[Any]:
    """Require that indices are within an array; an index ``i(axis)`` is clipped to the array instead.

    Args:
        expression: The expression.
        load: Number of the step that loads or stores.
        indices: An array of indices for each axis.
        shape: The shape of the array.

    Returns:
        The indices, all in range.

    Raises:
        OutOfRangeError: An index is out of range; the error names the first one.
    """
    valid_indices: list[Any] = []
    for axis, (step, index, extent) in enumerate(
        zip(expression.steps[load].indices, indices, shape, strict=True)
    ):
        if expression.steps[step].function == "index":
            valid_indices.append(np.clip(index, -extent, extent - 1))
            continue
        valid_indices.append(index)
        if index.size and (index.min() < -extent or index.max() >= extent):
            first = index[(index < -extent) | (index >= extent)][0]
            raise _outside(expression, load, axis, int(first), shape)
    return valid_indices


def places_of(expression: TypedExpression) -> TypedExpression:
    """Make an expression of a load's indices, for an expression with a load and a value as its results.

    Returns:
        An expression whose results are the indices, followed by the value. Nothing is loaded.
    """
    load, value = expression.outputs
    steps, step = list(expression.steps), expression.steps[load]
    steps[load] = TypedStep("constant", step.dtype, (), 0)
    return attrs.evolve(expression, steps=tuple(steps), outputs=(*step.steps, value))


def scatter_program(expression: TypedExpression, reduce: Reduce) -> TypedExpression:
    """Turn an expression with an element and a value as its results into a program that combines them."""
    index_program, load = places_of(expression), expression.steps[expression.outputs[0]]
    *indices, value = index_program.outputs
    step = TypedStep(f"store_{reduce}", expression.steps[value].dtype, (value, *indices), load.value)
    return attrs.evolve(index_program, steps=(*index_program.steps, step), outputs=())


def _outside(expression: TypedExpression, load: int, axis: int, index: int, shape: Ints) -> OutOfRangeError:
    step, names = expression.steps[load], expression.checked
    array, index_step = names[int(step.value.real)], expression.steps[step.indices[axis]]
    # An index is converted to int64 before it is used.
    while index_step.function in ("cast", "minimum"):
        index_step = expression.steps[index_step.steps[0]]
    holder = f"{names[int(index_step.value.real)]}: " if index_step.function == "argument" else ""
    return OutOfRangeError(
        f"{holder}{index} is outside axis {axis} of {array}, which has length {shape[axis]}",
        index=index,
        axis=axis,
        length=shape[axis],
    )


Overflow: TypeAlias = Literal["ignore", "raise"]
"""Steps that over- or underflow are ignored, or raise `FloatingPointError`."""

# A ufunc computes only the function of its own name, not others with the same types.
_UFUNCS = {
    function.name: function.ufunc
    for function in FUNCTIONS.values()
    if function.ufunc is not None and function.ufunc.__name__ == function.name
}


def _power(base: Any, exponent: Any) -> Any:
    """Compute a power by NumPy, except for integers with negative exponents, which NumPy refuses."""
    if exponent.dtype.kind != "i" or not (exponent < 0).any():
        return np.power(base, exponent)
    inverse = np.where(np.abs(base) == 1, np.where(exponent & 1, base, 1), 0).astype(base.dtype)
    return np.where(exponent < 0, inverse, np.power(base, np.maximum(exponent, 0)))


def _log1p(x: Any) -> Any:
    """Compute it by NumPy, except for small complex numbers, because NumPy loses their real part."""
    result: Any = np.asarray(np.log1p(x))
    if result.dtype.kind == "c":
        is_small = np.maximum(np.abs(x.real), np.abs(x.imag)) < 0.5
        np.copyto(result.real, 0.5 * np.log1p(x.imag * x.imag + x.real * x.real + 2 * x.real), where=is_small)
    return result


def _expm1(x: Any) -> Any:
    """Compute it by NumPy, except for zero and non-finite complex numbers, because C99 differs there."""
    result = np.asarray(np.expm1(x))
    if result.dtype.kind == "c":
        np.copyto(result, np.exp(x) - 1, where=~np.isfinite(x) | (x == 0))
    return result


def _floor_divide(x1: Any, x2: Any) -> Any:
    """Compute it by NumPy, except for infinite numbers, because the standard rounds all quotients alike."""
    result = np.asarray(np.floor_divide(x1, x2))
    if result.dtype.kind not in "biu":
        # The quotient is infinite, zero or NaN, so there is nothing to round.
        np.divide(x1, x2, out=result, where=np.isinf(x1) | np.isinf(x2))
    return result


def _chosen(ufunc: Any, x1: Any, x2: Any) -> Any:
    """Compute `fmax` or `fmin` by NumPy, but of two zeros the second one, where NumPy finds either."""
    result = np.asarray(ufunc(x1, x2))
    if result.dtype.char in "fd":
        np.copyto(result, x2, where=x1 == x2)
    return result


def _nextafter(x1: Any, x2: Any) -> Any:
    """Compute it by NumPy, but from one zero to the other, where NumPy's of float16 stays."""
    result = np.asarray(np.nextafter(x1, x2))
    np.copyto(result, x2, where=x1 == x2)
    return result


def _tanh(x: Any) -> Any:
    """Compute it by NumPy, but of infinite complex numbers, where the standard has another zero than C99."""
    result: Any = np.asarray(np.tanh(x))
    if result.dtype.kind == "c":
        np.copysign(result.imag, x.imag, out=result.imag, where=np.isinf(x.real))
    return result


def _tan(x: Any) -> Any:
    """Compute it by NumPy, except for infinite complex numbers, to match the hyperbolic tangent."""
    result: Any = np.asarray(np.tan(x))
    if result.dtype.kind == "c":
        np.copysign(result.real, x.real, out=result.real, where=np.isinf(x.imag))
    return result


def _special(name: str, x: Any) -> Any:
    """Compute a function of SciPy's, which knows no type below float32."""
    # It is slow to import, and rarely used.
    import scipy.special

    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return np.asarray(getattr(scipy.special, name)(wide)).astype(x.dtype, copy=False)


_NON_UFUNCS: dict[str, Any] = {
    "where": np.where,
    "real": np.real,
    "imag": np.imag,
    "stop_gradient": np.positive,
    "power": _power,
    "log1p": _log1p,
    "expm1": _expm1,
    "floor_divide": _floor_divide,
    "nextafter": _nextafter,
    "tanh": _tanh,
    "tan": _tan,
    "fmax": partial(_chosen, np.fmax),
    "fmin": partial(_chosen, np.fmin),
    **{name: partial(_special, function) for name, function in SPECIAL.items()},
}


def numpy_function(name: str) -> Any:
    """Return how NumPy computes a function of elements, which has the values of the standard."""
    return _NON_UFUNCS.get(name) or _UFUNCS[name]


_NOTHING: Mapping[int, Any] = MappingProxyType({})


@attrs.frozen(eq=False)
class ComputedIndices:
    """Elements of an array at computed indices; whole lines of it for an index of the result, ``i(k)``.

    NumPy copies lines about five times as fast as single elements.

    Attributes:
        array: The array, with the axes first that are not copied as lines.
        index: Indices for these axes, followed by slices.
        order: The axes of the result in the order of these.
    """

    array: HostArray
    index: tuple[Any, ...]
    order: Ints

    @classmethod
    def of(cls, array: HostArray, indices: Sequence[Any], steps: Sequence[TypedStep]) -> ComputedIndices:
        """Find the lines.

        Args:
            array: The array.
            indices: One for each of its axes, inside of it.
            steps: The steps that made these.
        """
        ndim = max(index.ndim for index in indices)
        single_elements = cls(array, tuple(indices), tuple(range(ndim)))
        lines = {
            axis: int(np.argmax(index.shape))
            for axis, (index, step) in enumerate(zip(indices, steps, strict=True))
            if step.function == "index" and index.size > 1
            # If the places are not consecutive, some indices were out of range.
            if index.flat[-1] - index.flat[0] == index.size - 1
        }
        line_axes, indexed_axes = (
            list(lines.values()),
            [axis for axis in range(len(indices)) if axis not in lines],
        )
        if not lines or len(set(line_axes)) < len(line_axes):
            return single_elements
        axis_indices: list[Any] = []
        for index in [indices[axis] for axis in indexed_axes]:
            if index.ndim and any(index.shape[axis] > 1 and index.strides[axis] for axis in line_axes):
                # Each line has indices of its own.
                return single_elements
            axis_indices.append(
                index[tuple([0 if axis in line_axes else slice(None) for axis in range(index.ndim)])]
            )
        axis_indices += [slice(int(indices[axis].flat[0]), int(indices[axis].flat[-1]) + 1) for axis in lines]
        rest = [axis for axis in range(ndim) if axis not in line_axes]
        return cls(array.transpose([*indexed_axes, *lines]), tuple(axis_indices), (*rest, *line_axes))

    def load(self) -> Any:
        """Take the elements: an array that broadcasts to the result."""
        value = self.array[self.index]
        value = value[(None,) * (len(self.order) - value.ndim) + (...,)]
        return value.transpose(np.argsort(self.order))

    def aligned(self, values: HostArray) -> HostArray:
        """Order the axes of values like the axes of ``array[index]``."""
        return values.transpose(self.order) if values.ndim else values


def evaluate(
    expression: TypedExpression,
    arguments: Sequence[Any],
    indices: Mapping[int, HostArray] = _NOTHING,
    loaded: Mapping[int, HostArray] = _NOTHING,
    out: HostArray | None = None,
    overflow: Overflow = "ignore",
    *,
    shape: Ints = (),
    axes: Ints = (),
) -> list[HostArray]:
    """Compute the results for arrays that broadcast, and NumPy scalars.

    Args:
        expression: The typed expression.
        arguments: Arrays or numbers of the types that it was typed for; Python numbers as their carriers.
            Arguments for loads and stores only are ignored here.
        indices: Indices of the result's elements, by axis.
        loaded: The arguments for loads and stores, by number.
        out: An array for the only result, used if the function that makes the result can write to it.
        overflow: Whether a step that over- or underflows raises `FloatingPointError`.
        shape: The shape of all arrays after broadcasting; needed for reductions and stores.
        axes: The axes to reduce, from 0 on, in order.

    Returns:
        The results, which may be arguments, or broadcast. A result that depends on elements only by
        reductions has one element along `axes`.

    Raises:
        OutOfRangeError: A checked index is out of range.
        FloatingPointError: A step over- or underflows, and `overflow` is ``"raise"``.
    """
    evaluation = _Evaluation(expression, arguments, indices, loaded, out, shape, axes)
    values: dict[int, Any] = {}
    with np.errstate(divide="ignore", invalid="ignore", over=overflow, under=overflow):
        evaluation.run_pass(expression.passes[None], values)
    return [np.asarray(values[number]) for number in expression.outputs]


@attrs.define(eq=False)
class _Active:
    """The elements for which a loop still runs, flattened.

    Attributes:
        carried: The variables of the loop.
        values: The values of steps, by number; a value shared by all elements has no axis.
        positions: The positions of these elements among all elements.
        final_values: The final values of the variables, for all elements.
    """

    carried: Sequence[int]
    values: dict[int, Any]
    positions: npt.NDArray[np.int64]
    final_values: Sequence[HostArray]

    def end(self, condition: Any, numbers: Sequence[int]) -> None:
        """End the loop for some elements, with these steps as the values of its variables."""
        ends = np.broadcast_to(condition, self.positions.shape)
        if not ends.any():
            return
        for final, number in zip(self.final_values, numbers, strict=True):
            final[self.positions[ends]] = np.broadcast_to(self.values[number], ends.shape)[ends]
        goes = ~ends
        self.positions = self.positions[goes]
        # Compute only the other elements from here on, because each costs time.
        self.values.update({n: value[goes] for n, value in self.values.items() if np.ndim(value)})


@attrs.define(eq=False)
class _Evaluation:
    """One evaluation; see `evaluate` for its fields."""

    expression: TypedExpression
    arguments: Sequence[Any]
    indices: Mapping[int, HostArray]
    loaded: Mapping[int, HostArray]
    out: HostArray | None
    shape: Ints
    axes: Ints
    _last_uses: Mapping[int, Sequence[int]] = _NOTHING
    # The active elements of the innermost loop that ends element by element.
    _active: _Active | None = None

    def run_pass(self, steps: Pass, values: dict[int, Any]) -> None:
        """Compute the steps of a pass."""
        around, self._last_uses = self._last_uses, steps.last_uses
        self._run(steps.numbers, values)
        self._last_uses = around

    def _run(self, numbers: Sequence[int], values: dict[int, Any]) -> None:
        """Compute steps one after another."""
        position, active = 0, self._active
        while position < len(numbers) and (active is None or active.positions.size):
            number = numbers[position]
            step = self.expression.steps[number]
            if step.function in ("loop", "fold"):
                (self._loop if step.function == "loop" else self._fold)(number, step, values)
                # All steps of its body follow in this list.
                position += int(step.value.real) - number
                number = int(step.value.real)
            elif step.function == "break" and active is not None:
                active.end(values[step.steps[1]], step.steps[2:])
            else:
                values[number] = self._value(number, step, values)
            for used in self._last_uses.get(number, ()):
                # Large temporaries make way for the next ones.
                values.pop(used, None)
            position += 1

    def _loop(self, number: int, step: TypedStep, values: dict[int, Any]) -> None:
        """Run a loop: of all elements at once if its range is the same for all, and none ends early."""
        steps, end = self.expression.steps, int(step.value.real)
        start, stop, *carried = step.steps
        body, updates = range(number + 1, end), steps[end].steps[1:]
        has_break = any(steps[inner].steps[0] == number for inner in body if steps[inner].function == "break")
        if not has_break and np.ndim(values[start]) == np.ndim(values[stop]) == 0:
            for index in range(int(values[start]), int(values[stop])):
                values[number] = np.int64(index)
                self._run(body, values)
                values.update(zip(carried, [values[update] for update in updates], strict=True))
            return
        active, shape = self._flattened(number, step, values)
        active_values = active.values
        around, self._active = self._active, active
        active.end(active_values[number] >= active_values[stop], carried)
        while active.positions.size:
            self._run(body, active_values)
            if active.positions.size:
                active_values.update(zip(carried, [active_values[update] for update in updates], strict=True))
            for temporary in body:
                active_values.pop(temporary, None)
            active_values[number] = active_values[number] + 1
            active.end(active_values[number] >= active_values[stop], carried)
        self._active = around
        values.update(
            (variable, final.reshape(shape))
            for variable, final in zip(carried, active.final_values, strict=True)
        )

    def _flattened(self, number: int, step: TypedStep, values: Mapping[int, Any]) -> tuple[_Active, Any]:
        """Flatten all values that a loop reads; return the elements and their former shape."""
        carried = step.steps[2:]
        within = self.expression.steps[number : int(step.value.real) + 1]
        read = {operand for inner in within for operand in inner.steps if operand < number}
        shapes = [np.shape(values[operand]) for operand in read]
        if any(inner.function in _STORES for inner in within):
            # Each element stores, even if the loop reads no elements.
            shapes.append(self.shape if self._active is None else self._active.positions.shape)
        shape = np.broadcast_shapes(*shapes)

        def flat(value: Any) -> HostArray:
            return np.broadcast_to(value, shape).reshape(-1)

        taken = {
            operand: flat(values[operand]) if np.ndim(values[operand]) else values[operand]
            for operand in read
        }
        final_values = [flat(values[variable]).copy() for variable in carried]
        taken[number] = flat(values[step.steps[0]])
        return _Active(carried, taken, np.arange(taken[number].size), final_values), shape

    def _value(self, number: int, step: TypedStep, values: Mapping[int, Any]) -> Any:
        match step.function:
            case "argument":
                value: Any = np.asarray(self.arguments[int(step.value.real)], step.dtype.dtype)
            case "constant":
                value = number_array(step.value, step.dtype)
            case "index":
                value = self.indices[int(step.value.real)]
            case "count":
                value = np.int64(math.prod(self.shape[axis] for axis in self.axes))
            case "carried" | "result":
                value = values[step.steps[0]]
            case "left" | "right":
                value = values[step.steps[0]][step.function == "right"]
            case name if name in _METHODS:
                value = getattr(self, _METHODS[name])(number, step, values)
            case _:
                value = self._call(number, step, [values[operand] for operand in step.steps])
        return value

    def _call(self, number: int, step: TypedStep, operands: Sequence[Any]) -> Any:
        dtype = step.dtype.dtype
        if step.function == "cast":
            return by_way_of_int64(operands[0], dtype).astype(dtype, copy=False)
        function = _NON_UFUNCS.get(step.function)
        if function is not None:
            return function(*operands)
        # Large arrays are not written twice.
        is_fit = self.out is not None and number == self.expression.outputs[0] and self.out.dtype == dtype
        return _UFUNCS[step.function](*operands, out=self.out if is_fit else None)

    def _valid_indices(
        self, number: int, step: TypedStep, values: Mapping[int, Any], shape: Ints
    ) -> list[Any]:
        """Return indices inside of an array. An index outside is refused or becomes the nearest one."""
        indices = [values[index] for index in step.indices]
        if self.expression.checked:
            return check_places(self.expression, number, indices, shape)
        return [np.clip(index, -extent, extent - 1) for index, extent in zip(indices, shape, strict=True)]

    def _load(self, number: int, step: TypedStep, values: Mapping[int, Any]) -> Any:
        array = self.loaded[int(step.value.real)]
        indices = self._valid_indices(number, step, values, array.shape)
        if self._active is not None:
            # Indices of the result are none of lines here.
            return array[tuple(indices)]
        return ComputedIndices.of(
            array, indices, [self.expression.steps[index] for index in step.indices]
        ).load()

    def _store(self, number: int, step: TypedStep, values: Mapping[int, Any]) -> None:
        array, value = self.loaded[int(step.value.real)], values[step.steps[0]]
        indices = self._valid_indices(number, step, values, array.shape)
        shape = self.shape if self._active is None else self._active.positions.shape
        if np.broadcast_shapes(*map(np.shape, indices)) != shape:
            # Each element stores, even if several have the same place.
            value, *indices = (np.broadcast_to(operand, shape) for operand in (value, *indices))
        elements = ComputedIndices(array, tuple(indices), tuple(range(len(shape))))
        if self._active is None:
            elements = ComputedIndices.of(
                array, indices, [self.expression.steps[index] for index in step.indices]
            )
        target, index, value = elements.array, elements.index, elements.aligned(np.asarray(value))
        combine = _STORES[step.function]
        if combine is None:
            target[index] = value
        else:
            combine.at(target, index, value)

    def _mapped(self, number: int, step: TypedStep, operands: Mapping[int, Any], shape: Ints) -> HostArray:
        """Run the pass of a reduction for its operands, or for a piece of them."""
        values = dict(operands)
        self.run_pass(self.expression.passes[number], values)
        result: HostArray = np.asarray(values[step.steps[0]])
        # A broadcast array is read-only, and `argmax` copies those first.
        return result if result.shape == shape else np.broadcast_to(result, shape)

    def _operands(self, number: int, values: Mapping[int, Any]) -> dict[int, Any]:
        return {operand: values[operand] for operand in self.expression.passes[None].operands[number]}

    def _reduce(self, number: int, step: TypedStep, values: Mapping[int, Any]) -> Any:
        name, operands = step.function.removeprefix("reduce_"), self._operands(number, values)
        if name not in REDUCING:
            return self._keepdims(getattr(np, name)(self._in_front(number, step, operands), axis=0))
        result = reduced_in_pieces(
            getattr(np, REDUCING[name]),
            step.dtype.dtype,
            partial(self._mapped, number, step),
            operands,
            self.shape,
            self.axes,
            is_there=step.steps[0] in operands,
        )
        return self._keepdims(result)

    def _in_front(self, number: int, step: TypedStep, operands: Mapping[int, Any]) -> HostArray:
        """Return the operand of a reduction, with the reduced axes joined as the first axis."""
        values = self._mapped(number, step, operands, self.shape)
        retained_axes = [axis for axis in range(values.ndim) if axis not in self.axes]
        count = math.prod(self.shape[axis] for axis in self.axes)
        return values.transpose(*self.axes, *retained_axes).reshape(
            count, *[self.shape[axis] for axis in retained_axes]
        )

    def _keepdims(self, value: Any) -> HostArray:
        """Insert axes of one element in place of the reduced axes."""
        shape = [1 if axis in self.axes else extent for axis, extent in enumerate(self.shape)]
        return np.asarray(value).reshape(shape)

    def _fold(self, number: int, step: TypedStep, values: dict[int, Any]) -> None:
        """Combine elements pair by pair."""
        end, flat = int(step.value.real), self._in_front(number, step, self._operands(number, values))
        end_step = self.expression.steps[end]
        if not len(flat):
            flat = np.full((1, *flat.shape[1:]), np.asarray(end_step.value).astype(flat.dtype))
        while len(flat) > 1:
            half = len(flat) // 2
            pair = {**values, number: (flat[:half], flat[half : 2 * half])}
            self._run(range(number + 1, end), pair)
            combined = np.broadcast_to(pair[end_step.steps[1]], flat[:half].shape)
            flat = np.concatenate([combined, flat[2 * half :]]) if len(flat) % 2 else combined
        values[end] = self._keepdims(flat[0])


_STORES = {
    "store_set": None,
    "store_add": np.add,
    "store_multiply": np.multiply,
    "store_min": np.minimum,
    "store_max": np.maximum,
}

# Methods for steps that need more than the values of their operands.
_METHODS = {
    "load": "_load",
    **{f"reduce_{name}": "_reduce" for name in (*REDUCING, "argmin", "argmax")},
    **dict.fromkeys(_STORES, "_store"),
}
