"""Gradients of element-wise expressions, from the package and from the user.

`slopes_of` yields a gradient for each array argument of a call. How it is made depends on the argument:

* If the expression reads it element by element, its gradient is another expression (`_derived`), summed over
  the axes along which the argument was broadcast.
* If the expression loads elements by indices, each load adds a value to an element of the gradient
  (`_loaded`). Loads whose indices are shifts of the element's own become one gather. For the others, a
  scatter adds in order, or sorted sums do if the device's scatter has no fixed order. The function around a
  scatter has a rule (`_of_addition`), so gradients of any order exist.

Expressions are derived once for each combination of argument types, and cached.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..backends.base import AccelError, DType, NotSupportedError
from ..backends.base.expressions import ArgumentType, TypedExpression, Weak, evaluate, parse, unrolled
from ..derivatives._derive import Addition, DerivedSteps, additions, gradient
from ..derivatives._steps import text_of
from ..devices import AccelRef, ArrayFunction, Call
from ..devices.front._slots import Slot
from ..expressions import DECLARED, Elementwise, Scatter
from ._memo import memoized
from ._scatter import is_ordered, nothing, sorted_sums
from ._shifts import Shift, gather_text, shifts_of

__all__ = [
    "ADVICE",
    "PULLED",
    "Rule",
    "defaults_of",
    "elementwise_of",
    "kind_of",
    "numbers_of",
    "slopes_of",
    "summed_to",
]

arrays: Any = _arrays
nn_slopes = later("trio_accel.nn._slopes")

Rule: TypeAlias = "tuple[Any, Callable[[], Any]]"
"""An argument of a call, and a function that makes its gradient, which is called only if it is needed."""

ADVICE = "give one by ta.custom_gradient"
_NUMBERS = (int, float, complex, Slot)
PULLED: list[Callable[..., Any]] = []
"""Holds `_backward.pulled`, whose module imports this one."""
_MOST_ITERATIONS = 1 << 40
_MAX_LOADS = 32  # of an unrolled loop, because a kernel may read at most this many arrays
_WEAK: dict[type, Weak] = {
    int: Weak.int,
    float: Weak.float,
    complex: Weak.complex,
    bool: Weak.int,
    Slot: Weak.float,
}


def summed_to(g: Any, shape: Sequence[int]) -> Any:
    """Sum a gradient over the axes along which its array, of this shape, was broadcast."""
    if g.shape == tuple(shape):
        return g
    leading = len(g.shape) - len(shape)
    axes = [axis for axis in range(len(g.shape)) if axis < leading or shape[axis - leading] != g.shape[axis]]
    return arrays.reshape(arrays.sum(g, axis=tuple(axes)), tuple(shape)) if axes else g


@attrs.frozen(eq=False)
class _Expression:
    """The expression of a function.

    Attributes:
        elementwise: The expression.
        defaults: The default values of the function's parameters, by name.
        is_plain: Whether its gradient follows the dtypes of the arguments by NumPy's promotion, so that one
            gradient serves all dtypes.
    """

    elementwise: Elementwise[Any]
    defaults: dict[str, Any]
    is_plain: bool

    def arguments(self, call: Any) -> list[Any]:
        """Return a call's arguments for the inputs of the expression, in order."""
        named = call.named
        if named is None and len(call.args) == len(self.elementwise.inputs):
            return list(call.args)
        args = self.defaults | dict(zip(self.elementwise.inputs, call.args, strict=False)) | dict(named or {})
        return [args[name] for name in self.elementwise.inputs]


@memoized
def elementwise_of(function: ArrayFunction) -> _Expression | None:
    """Return the expression that a function computes for each element; None for other functions."""
    declared = DECLARED.get(function.number)
    if declared is None:
        expression = getattr(function.make, "__self__", None)
        return (
            _Expression(expression, {}, _is_plain(expression))
            if isinstance(expression, Elementwise)
            else None
        )
    expression = getattr(declared, "expression", None)
    if not isinstance(expression, Elementwise):
        return None
    return _Expression(expression, defaults_of(declared), _is_plain(expression))


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default values of a function's parameters, by name."""
    parameters = inspect.signature(function).parameters.items()
    return {
        name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty
    }


def _is_plain(elementwise: Elementwise[Any]) -> bool:
    """Return whether an expression computes only in the dtype of its arguments."""
    if any(elementwise.is_loaded(name) for name in elementwise.inputs) or any(elementwise.dtypes):
        return False
    if elementwise.precision is not None:
        # Its steps are widened, and so are the steps of the gradient.
        return True
    try:
        steps = elementwise.typed((DType.float64,) * len(elementwise.inputs)).steps
    except (TypeError, ValueError, AccelError):
        return False
    return all(step.function != "cast" and step.dtype in (DType.float64, DType.bool) for step in steps)


def slopes_of(call: Any, g: Any, *, is_exact: bool) -> Iterator[Rule] | None:
    """Yield the array arguments of an expression's call, with their gradients.

    Args:
        call: The call.
        g: The gradient of its result; for several results a list, with None for unused results.
        is_exact: Whether to derive for the arguments' own dtypes, because there may be complex numbers.
            Otherwise all floating dtypes share the gradient for float64.

    Returns:
        None if the function is not an expression.
    """
    expression = elementwise_of(call.function)
    return None if expression is None else _slopes(expression, call, g, is_exact=is_exact)


def _slopes(expression: _Expression, call: Any, g: Any, *, is_exact: bool) -> Iterator[Rule]:
    arguments = expression.arguments(call)
    # A call of several results, or of one that has a name, yields a call for each. These do not warn if they
    # are never awaited.
    operands: list[Any] = [*arguments, *g, *call] if isinstance(g, list) else [*arguments, g, call]
    for wrt, argument in enumerate(arguments):
        if isinstance(argument, (Call, AccelRef)):
            yield argument, partial(_slope, expression, call, operands, wrt, is_exact=is_exact)


def kind_of(argument: Any, *, is_exact: bool) -> ArgumentType:
    """Return the type for which to derive the expression by an argument."""
    weak = _WEAK.get(type(argument))
    if weak is not None:
        return DType.bool if type(argument) is bool else weak
    if is_exact or type(argument) is np.ndarray or isinstance(argument, np.generic):
        # The dtype of a host array is known without a look ahead.
        dtype = DType.of(argument.dtype)
        return dtype if is_exact or dtype.kind not in ("float", "complex") else DType.float64
    return DType.float64


def _slope(expression: _Expression, call: Any, operands: list[Any], wrt: int, *, is_exact: bool) -> Any:
    """Make the gradient of an argument, as a call.

    Args:
        expression: The expression.
        call: The call.
        operands: The arguments, the gradients of the results, and the results.
        wrt: The index of the argument.
        is_exact: See `slopes_of`.

    Raises:
        NotSupportedError: The expression has no derivative by this argument.
    """
    elementwise = expression.elementwise
    inputs = len(elementwise.inputs)
    arguments = operands[:inputs]
    reached = tuple([n for n in range(len(elementwise.outputs)) if operands[inputs + n] is not None])
    # A NumPy scalar has a dtype, which would determine the dtype of some gradients.
    is_exact = (
        is_exact
        or not expression.is_plain
        or True in [isinstance(argument, np.generic) for argument in arguments]
    )
    kinds = tuple([kind_of(argument, is_exact=is_exact) for argument in arguments])
    try:
        if elementwise.is_loaded(elementwise.inputs[wrt]):
            return _loaded(elementwise, kinds, wrt, reached, operands)
        derived, reads = _derived(elementwise, kinds, wrt, reached, is_exact)
    except (NotSupportedError, ValueError) as error:
        # The source of a derivative may be too long for an expression, or have too many nested loops.
        message = f"{call.function.name} has no gradient by {elementwise.inputs[wrt]}: {error}; {ADVICE}"
        raise NotSupportedError(message, operation=call.function.name) from None
    if derived is None and not reads:
        return arrays.zeros_like(arguments[wrt])
    slope = operands[reads[0]] if derived is None else derived(*[operands[n] for n in reads])
    has_only_one_array = [isinstance(x, _NUMBERS) for x in arguments].count(False) == 1 and not _has_shape(
        call
    )
    return slope if has_only_one_array else summed_to(slope, np.shape(arguments[wrt]))


def _has_shape(call: Any) -> bool:
    return call.named is not None and call.named.get("shape") is not None


def numbers_of(kinds: Sequence[ArgumentType]) -> frozenset[int]:
    return frozenset(n for n, kind in enumerate(kinds) if isinstance(kind, Weak))


@memoized
def _derived(
    elementwise: Elementwise[Any],
    kinds: tuple[ArgumentType, ...],
    wrt: int,
    reached: tuple[int, ...],
    is_exact: bool,
) -> tuple[Elementwise[Any] | None, tuple[int, ...]]:
    """Derive an expression by an argument.

    Returns:
        The gradient as an expression, and the numbers of the operands that it reads, as in `_slope`. The
        expression is None if the gradient is 0, which reads nothing, or if it equals the only operand read.
    """
    name = elementwise.inputs[wrt]
    is_real = not any(isinstance(kind, DType) and kind.kind == "complex" for kind in kinds)
    if name in elementwise.slopes and is_real:
        return _by_hand(elementwise, elementwise.slopes[name])
    program = gradient(
        elementwise.typed(kinds),
        len(kinds),
        wrt,
        numbers_of(kinds),
        reached=reached,
        has_result=_has_result(elementwise),
        passes_nan=elementwise.operation in nn_slopes.DERIVED,
    )
    if len(program.steps) == 1 and (not program.reads or _is_gradient(elementwise, program)):
        return None, program.reads
    return _elementwise(elementwise, program, is_exact=is_exact), program.reads


def _is_gradient(elementwise: Elementwise[Any], program: DerivedSteps) -> bool:
    """Return whether a program of one step reads the gradient of a result, and not an argument."""
    return program.reads[0] >= len(elementwise.inputs)


def _has_result(elementwise: Elementwise[Any]) -> bool:
    """Return whether the gradient may read the result, because it was not rounded after its computation."""
    return elementwise.precision is None and not any(elementwise.dtypes)


def _by_hand(elementwise: Elementwise[Any], text: str) -> tuple[Elementwise[Any], tuple[int, ...]]:
    """Return a declared gradient, as `_derived` does; it reads inputs, outputs and ``g`` by name."""
    names = (*elementwise.inputs, "g", *elementwise.outputs)
    inputs = parse(text).inputs
    slope = Elementwise[Any](
        text, inputs=inputs, operation=f"{elementwise.operation}.slope", precision=elementwise.precision
    )
    return slope, tuple(names.index(name) for name in inputs)


def _elementwise(elementwise: Elementwise[Any], program: DerivedSteps, *, is_exact: bool) -> Elementwise[Any]:
    """Return a program as an expression of the arguments that it reads."""
    arguments = _names(elementwise)
    return Elementwise[Any](
        text_of(program.steps, {"slope": program.outputs[0]}, arguments, is_typed=is_exact),
        inputs=[arguments[n] for n in program.reads],
        outputs="slope",
        operation=f"{elementwise.operation}.slope",
        precision=None if is_exact else elementwise.precision,
    )


def _names(elementwise: Elementwise[Any]) -> dict[int, str]:
    """Return names of arguments, gradients and results, by their numbers."""
    numbers = [str(number or "") for number in range(len(elementwise.outputs))]
    names = [f"a{n}" for n in range(len(elementwise.inputs))]
    return dict(enumerate([*names, *[f"g{n}" for n in numbers], *[f"y{n}" for n in numbers]]))


# Gradients of arrays from which elements are loaded by indices.


@attrs.frozen(eq=False)
class _Scattered:
    """An addition of values to elements of a gradient, as expressions.

    Attributes:
        addition: The addition.
        expressions: For the value and each index an expression, and the operands that it reads. None if the
            scatter computes it itself, because it loads from no array.
        scatter: The scatter. It can load only from the array that it changes.
        reads: The operands that the scatter reads element by element.
        shifts: The shifts of the indices; None if not all are shifts.
        value: The program of the value.
        added: Returns what the scatter has added to; its rule derives the addition.
    """

    addition: Addition
    expressions: tuple[tuple[Elementwise[Any], tuple[int, ...]] | None, ...]
    scatter: Scatter
    reads: tuple[int, ...]
    shifts: tuple[Shift, ...] | None
    value: DerivedSteps
    added: ArrayFunction


@memoized
def _additions(
    elementwise: Elementwise[Any], kinds: tuple[ArgumentType, ...], wrt: int, reached: tuple[int, ...]
) -> tuple[_Scattered, ...]:
    return _all_scattered(elementwise, elementwise.typed(kinds), kinds, wrt, reached)


@memoized
def _written_out(
    elementwise: Elementwise[Any], kinds: tuple[ArgumentType, ...], wrt: int, reached: tuple[int, ...]
) -> tuple[_Scattered, ...]:
    """Return the additions of an expression with unrolled short loops.

    The result is empty if the expression has no loop, or a loop that cannot be unrolled, or too many loads.
    """
    program = elementwise.typed(kinds)
    if not any(step.function == "loop" for step in program.steps):
        return ()
    program = unrolled(program)
    loads = [step for step in program.steps if step.function == "load" and step.value == wrt]
    if len(loads) > _MAX_LOADS or any(step.function == "loop" for step in program.steps):
        return ()
    return _all_scattered(elementwise, program, kinds, wrt, reached)


def _all_scattered(
    elementwise: Elementwise[Any],
    program: TypedExpression,
    kinds: tuple[ArgumentType, ...],
    wrt: int,
    reached: tuple[int, ...],
) -> tuple[_Scattered, ...]:
    terms = additions(
        program, len(kinds), wrt, numbers_of(kinds), reached=reached, has_result=_has_result(elementwise)
    )
    return tuple(_scattered(elementwise, addition) for addition in terms)


def _scattered(elementwise: Elementwise[Any], addition: Addition) -> _Scattered:
    program, arguments = addition.program, _names(elementwise)
    parts = [program.only(number) for number in program.outputs]
    names = ["value", *[f"j{axis}" for axis in range(len(parts) - 1)]]
    expressions = tuple(
        (_elementwise(elementwise, part, is_exact=True), part.reads) if part.loads else None for part in parts
    )
    apart = [name for name, expression in zip(names, expressions, strict=True) if expression is not None]
    inlined = {name: number for name, number in zip(names, program.outputs, strict=True) if name not in apart}
    rest = program.only(*inlined.values())
    text = text_of(rest.steps, dict(zip(inlined, rest.outputs, strict=True)), arguments, is_typed=True)
    # An index outside means the nearest element inside.
    nearest = ", ".join(f"minimum(maximum({name}, -n_{name}), n_{name} - 1)" for name in names[1:])
    scatter = Scatter(
        f"made[{nearest}]",
        "add",
        inputs=["made", *[arguments[n] for n in rest.reads], *apart, *[f"n_{name}" for name in names[1:]]],
        operation=f"{elementwise.operation}.slope",
        body=text,
        value="value",
    )
    shifts = None if addition.counts else shifts_of(program)
    rule = partial(_of_addition, elementwise, addition)
    added = ArrayFunction(f"{elementwise.operation}.slope", _first, "value", rule=rule)
    return _Scattered(addition, expressions, scatter, rest.reads, shifts, parts[0], added)


def _first(added: Any, *_: object) -> Any:
    return added


def _of_addition(elementwise: Elementwise[Any], addition: Addition, call: Any, g: Any) -> Iterator[Rule]:
    """Yield gradients of an addition: an added value has the gradient at its place.

    A scatter changes an array in place, which has no gradient, so this is the rule of the function around it.
    """
    added, slope, number, shape, loops, reads, operands = call.args
    (position, position_reads), (value, value_reads) = _position_and_value(elementwise, addition, number)
    by_number = dict(zip(reads, operands, strict=True))
    loads = addition.program.loads

    def wide(number: int, operand: Any) -> Any:
        return operand if number in loads or not loops else _with_loop_axes(operand, len(loops))

    def of_values() -> Any:
        arguments = [wide(number, by_number[number]) for number in position_reads]
        return arrays.take(arrays.reshape(g, (-1,)), position(*arguments, *g.shape, shape=shape))

    def compose(*leaves: Any) -> Any:
        replaced = by_number | dict(zip(active, leaves, strict=True))
        return value(*[wide(number, replaced[number]) for number in value_reads], shape=shape)

    active = [n for n in value_reads if isinstance(by_number[n], (Call, AccelRef))]
    slopes = functools.cache(lambda: PULLED[0](compose, [by_number[n] for n in active], of_values()))
    yield added, nothing
    if slope is not None:
        yield slope, lambda: g
    for n in reads:
        # The others only decide the place.
        yield by_number[n], partial(_nth, slopes, active.index(n)) if n in active else nothing


def _nth(make: Callable[[], Sequence[Any]], index: int) -> Any:
    return make()[index]


@memoized
def _position_and_value(
    elementwise: Elementwise[Any], addition: Addition, number: int
) -> tuple[tuple[Elementwise[Any], tuple[int, ...]], tuple[Elementwise[Any], tuple[int, ...]]]:
    """Return expressions for the position of an addition, in C order, and for its value.

    Args:
        elementwise: The expression.
        addition: The addition.
        number: The operand with the gradient of a result.

    Returns:
        Both expressions, with the operands that they read.
    """
    value, *indices = addition.program.outputs
    program, arguments = addition.program.only(*indices), _names(elementwise)
    names = {f"j{axis}": number for axis, number in enumerate(program.outputs)}
    # Read the gradient without an effect, because an operand determines the device of the computation.
    reads, g = tuple(sorted({*program.reads, number})), arguments[number]
    lines = [text_of(program.steps, names, arguments, is_typed=True), f"place = where({g} == {g}, 0, 0)"]
    for name in names:
        # An index outside means the nearest element inside, and a negative index counts from the end.
        lines += [f"{name} = minimum(maximum({name}, -n_{name}), n_{name} - 1)"]
        lines += [f"place = place * n_{name} + where({name} < 0, {name} + n_{name}, {name})"]
    position = Elementwise[Any](
        "\n".join(lines),
        inputs=[*[arguments[n] for n in reads], *[f"n_{name}" for name in names]],
        outputs="place",
        operation=f"{elementwise.operation}.slope",
    )
    value_program = addition.program.only(value)
    return (position, reads), (_elementwise(elementwise, value_program, is_exact=True), value_program.reads)


def _loaded(
    elementwise: Elementwise[Any],
    kinds: tuple[ArgumentType, ...],
    wrt: int,
    reached: tuple[int, ...],
    operands: Sequence[Any],
) -> Any:
    """Return the gradient of an array from which elements are loaded by indices."""
    x, shape = operands[wrt], operands[len(kinds) + reached[0]].shape
    terms = _written_out(elementwise, kinds, wrt, reached)
    if not terms or not all(_is_shifted(term, x, operands, shape) for term in terms):
        terms = _additions(elementwise, kinds, wrt, reached)
    shifted = [term for term in terms if _is_shifted(term, x, operands, shape)]
    slope = _gathered(elementwise, shifted, operands, x.shape) if shifted else None
    for term in terms:
        loops = tuple(_iterations(count, kinds, operands, shape) for count in term.addition.counts)
        if term not in shifted and 0 not in loops:
            slope = _scatter_one(elementwise, term, len(kinds) + reached[0], operands, loops, x, slope)
    return arrays.zeros_like(x) if slope is None else slope


def _is_shifted(term: _Scattered, x: Any, operands: Sequence[Any], shape: Sequence[int]) -> bool:
    """Return whether an addition can be part of a gather, because its indices are shifts that fit."""
    shifts = term.shifts
    if shifts is None or x.shape != shape:
        return False
    return all(shift.fits(extent, operands) for shift, extent in zip(shifts, x.shape, strict=True))


def _gathered(
    elementwise: Elementwise[Any],
    loads: Sequence[_Scattered],
    operands: Sequence[Any],
    shape: tuple[int, ...],
) -> Any:
    """Sum the gradients of loads with shifted indices, as one gather. Equal values are computed once."""
    values: dict[DerivedSteps, Any] = {}
    for load in loads:
        part = load.value
        if part not in values:
            reads = [operands[n] for n in part.reads]
            is_same = len(part.steps) == 1 and _is_gradient(elementwise, part)
            values[part] = reads[0] if is_same else _value_expression(elementwise, part)(*reads, shape=shape)
    names = {part: f"v{number}" for number, part in enumerate(values)}
    terms = tuple((names[load.value], load.shifts or ()) for load in loads)
    gather, extents = _gather(elementwise.operation, terms, len(shape))
    return gather(*values.values(), *[shape[axis] for axis in extents], shape=shape)


@memoized
def _value_expression(elementwise: Elementwise[Any], part: DerivedSteps) -> Elementwise[Any]:
    return _elementwise(elementwise, part, is_exact=True)


@functools.lru_cache(1024)
def _gather(
    operation: str, terms: tuple[tuple[str, tuple[Shift, ...]], ...], ndim: int
) -> tuple[Elementwise[Any], tuple[int, ...]]:
    """Return the expression of a gather, and the axes whose extents it reads."""
    text = gather_text(terms)
    extents = tuple(axis for axis in range(ndim) if f"n{axis}" in text)
    names = dict.fromkeys(name for name, _ in terms)
    expression = Elementwise[Any](
        text,
        inputs=[*names, *[f"n{axis}" for axis in extents]],
        outputs="slope",
        operation=f"{operation}.slope",
    )
    return expression, extents


def _scatter_one(
    elementwise: Elementwise[Any],
    term: _Scattered,
    number: int,
    operands: Sequence[Any],
    loops: tuple[int, ...],
    x: Any,
    slope: Any,
) -> Any:
    """Apply an addition to a gradient, by a scatter or by sorted sums.

    Args:
        elementwise: The expression.
        term: The addition.
        number: The operand with the gradient of a result.
        operands: All operands, as in `_slope`.
        loops: The iterations of each loop around the load, which become axes.
        x: The array from which elements are loaded.
        slope: The gradient so far; None for zeros.
    """
    g, loads = operands[number], term.addition.program.loads
    shape = (*g.shape, *loops)

    @functools.cache
    def wide(number: int) -> Any:
        return (
            operands[number]
            if number in loads or not loops
            else _with_loop_axes(operands[number], len(loops))
        )

    if is_ordered(g):
        apart = [part[0](*map(wide, part[1]), shape=shape) for part in term.expressions if part]
        zeros = arrays.zeros_like(x) if slope is None else slope
        added = term.scatter(zeros, *map(wide, term.reads), *apart, *x.shape, shape=shape)
        reads = tuple(sorted({*term.addition.program.reads, number}))
        return Call[Any](
            term.added, (added, slope, number, shape, loops, reads, [operands[n] for n in reads])
        )
    flat, value = _position_and_value(elementwise, term.addition, number)
    positions, values = (
        arrays.reshape(part(*map(wide, reads), *extents, shape=shape), (-1,))
        for (part, reads), extents in ((flat, x.shape), (value, ()))
    )
    total = sorted_sums(positions, values, x.shape)
    return total if slope is None else slope + total


def _with_loop_axes(x: Any, loops: int) -> Any:
    """Return an array with an additional last axis of one element for each loop."""
    if isinstance(x, _NUMBERS) or not np.shape(x):
        return x
    return arrays.reshape(x, (*np.shape(x), *(1,) * loops))


def _iterations(
    program: DerivedSteps, kinds: Sequence[ArgumentType], operands: Sequence[Any], shape: Sequence[int]
) -> int:
    """Return the maximum number of iterations of a loop over all elements.

    Raises:
        NotSupportedError: The number depends on elements of arrays, or on another loop, or is too large.
    """
    steps = program.steps
    if any(
        step.function in ("load", "loop")
        or (step.function == "argument" and not isinstance(kinds[int(step.value.real)], Weak))
        for step in steps
    ):
        raise NotSupportedError("elements or another loop decide how often the loop runs")
    axes = sorted({int(step.value.real) for step in steps if step.function == "index"})
    indices = {axis: _indices(shape, axis) for axis in axes}
    typed = TypedExpression(steps, program.outputs, axes=tuple(axes))
    arguments = [
        np.asarray(operand)[()] if isinstance(operand, _NUMBERS) else None
        for operand in operands[: len(kinds)]
    ]
    (counts,) = evaluate(typed, arguments, indices)
    count = int(np.max(counts, initial=0))
    # A count beyond int64 has wrapped around.
    if count * math.prod(shape) > _MOST_ITERATIONS or np.min(counts, initial=0) < 0:
        raise NotSupportedError(
            "the gradient of a load in a loop needs an element for each iteration within the loop's bounds, "
            f"even if it breaks before: at most {_MOST_ITERATIONS} for all elements of the result; choose "
            "closer bounds"
        )
    return count


def _indices(shape: Sequence[int], axis: int) -> Any:
    """Return the indices along an axis, in a shape that broadcasts against all axes."""
    dim = axis % len(shape)
    return np.arange(shape[dim]).reshape([-1 if k == dim else 1 for k in range(len(shape))])
