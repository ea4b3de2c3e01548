"""Gradients of element-wise expressions: the package's own, and the user's."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import AccelError, DType, NotSupportedError
from ..backends.base.expressions import ArgumentType, TypedExpression, Weak, evaluate, parse, unrolled
from ..derivatives._derive import Addition, DerivedSteps, additions, gradient
from ..derivatives._steps import text_of
from ..devices import AccelRef, ArrayFunction, Call
from ..devices.front._slots import Slot
from ..expressions import DECLARED, Elementwise, Scatter
from ..nn._slopes import DERIVED
from ._scatter import is_ordered, sorted_sums
from ._shifts import Shift, gather_text, shifts_of

__all__ = ["ADVICE", "Rule", "elementwise_of", "slopes_of", "summed_to"]

arrays: Any = _arrays

Rule: TypeAlias = "tuple[Any, Callable[[], Any]]"
"""An argument of a call, and a function that makes its gradient, which is called only if it is needed."""

ADVICE = "give one by ta.custom_gradient"
_NUMBERS = (int, float, complex, Slot)
# The most arrays that one kernel may read, and so the most loads of an unrolled loop.
_MAX_LOADS = 32
_WEAK: dict[type, Weak] = {
    int: Weak.int,
    float: Weak.float,
    complex: Weak.complex,
    bool: Weak.int,
    Slot: Weak.float,
}


def summed_to(g: Any, shape: Sequence[int]) -> Any:
    """Sum over the axes along which an array of a shape was broadcast."""
    if g.shape == tuple(shape):
        return g
    ahead = len(g.shape) - len(shape)
    axes = [axis for axis in range(len(g.shape)) if axis < ahead or shape[axis - ahead] < g.shape[axis]]
    return arrays.reshape(arrays.sum(g, axis=tuple(axes)), tuple(shape)) if axes else g


@attrs.frozen(eq=False)
class _Expression:
    """An expression, and the arguments of its function.

    Attributes:
        elementwise: The expression.
        names: The parameters of the function that are inputs, in order.
        defaults: The values of optional inputs.
        is_plain: Whether its gradient follows the dtypes of the arguments by NumPy's promotion, so that one
            gradient serves all dtypes.
    """

    elementwise: Elementwise[Any]
    defaults: dict[str, Any]
    is_plain: bool

    def arguments(self, call: Any) -> list[Any]:
        named = call.named
        if named is None and len(call.args) == len(self.elementwise.inputs):
            return list(call.args)
        given = (
            self.defaults | dict(zip(self.elementwise.inputs, call.args, strict=False)) | dict(named or {})
        )
        return [given[name] for name in self.elementwise.inputs]


@functools.lru_cache(2048)
def elementwise_of(function: ArrayFunction) -> _Expression | None:
    """Return the expression that a function computes for each element; None for other functions."""
    declared = DECLARED.get(function)
    if declared is None:
        own = getattr(function.make, "__self__", None)
        return _Expression(own, {}, _is_plain(own)) if isinstance(own, Elementwise) else None
    own = getattr(declared, "expression", None)
    if not isinstance(own, Elementwise):
        return None
    parameters = inspect.signature(declared).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    return _Expression(own, defaults, _is_plain(own))


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
    """Yield the arguments of an expression's call, with their gradients.

    Args:
        call: The call.
        g: The gradient of its result; for several results a list, with None for unused ones.
        is_exact: Whether dtypes are checked, because there may be complex numbers.

    Returns:
        None for another function.
    """
    found = elementwise_of(call.function)
    return None if found is None else _slopes(found, call, g, is_exact=is_exact)


def _slopes(found: _Expression, call: Any, g: Any, *, is_exact: bool) -> Iterator[Rule]:
    arguments = found.arguments(call)
    # Parts of the call that nobody uses end without a warning.
    is_one = len(found.elementwise.outputs) == 1
    given = [*arguments, g, call] if is_one else [*arguments, *g, *call]
    for place, one in enumerate(arguments):
        if isinstance(one, (Call, AccelRef)):
            yield one, partial(_slope, found, call, given, place, is_exact=is_exact)


def _kind(one: Any, *, is_exact: bool) -> ArgumentType:
    weak = _WEAK.get(type(one))
    if weak is not None:
        return DType.bool if type(one) is bool else weak
    if is_exact or type(one) is np.ndarray or isinstance(one, np.generic):
        # An array of the host is there, so that its dtype is known at once.
        dtype = DType.of(one.dtype)
        return dtype if is_exact or dtype.kind not in ("float", "complex") else DType.float64
    return DType.float64


def _slope(found: _Expression, call: Any, given: list[Any], place: int, *, is_exact: bool) -> Any:
    own = found.elementwise
    inputs = len(own.inputs)
    arguments = given[:inputs]
    reached = tuple([n for n in range(len(own.outputs)) if given[inputs + n] is not None])
    # NumPy's numbers have dtypes, which would determine the dtype of some gradients.
    is_exact = is_exact or not found.is_plain or True in [isinstance(one, np.generic) for one in arguments]
    kinds = tuple([_kind(one, is_exact=is_exact) for one in arguments])
    try:
        if own.is_loaded(own.inputs[place]):
            return _added(own, kinds, place, reached, given)
        made, reads = _derived(own, kinds, place, reached, is_exact)
    except (NotSupportedError, ValueError) as error:
        # A derived text may be longer, or have more loops in each other, than an expression may.
        told = f"{call.function.name} has no gradient by {own.inputs[place]}: {error}; {ADVICE}"
        raise NotSupportedError(told, operation=call.function.name) from None
    if made is None and not reads:
        return arrays.zeros_like(arguments[place])
    slope = given[reads[0]] if made is None else made(*[given[n] for n in reads])
    is_alone = [isinstance(one, _NUMBERS) for one in arguments].count(False) == 1 and not _has_shape(call)
    return slope if is_alone else summed_to(slope, np.shape(arguments[place]))


def _has_shape(call: Any) -> bool:
    return call.named is not None and call.named.get("shape") is not None


def _numbers(kinds: Sequence[ArgumentType]) -> frozenset[int]:
    return frozenset(n for n, kind in enumerate(kinds) if isinstance(kind, Weak))


@functools.lru_cache(4096)
def _derived(
    own: Elementwise[Any],
    kinds: tuple[ArgumentType, ...],
    place: int,
    reached: tuple[int, ...],
    is_exact: bool,
) -> tuple[Elementwise[Any] | None, tuple[int, ...]]:
    """Return the gradient by an argument, and which of the arguments, gradients and results it reads.

    It is None where it is 0, which reads nothing, and where it is the gradient of a result itself.
    """
    name = own.inputs[place]
    if name in own.slopes:
        return _by_hand(own, own.slopes[name])
    program = gradient(
        own.typed(kinds),
        len(kinds),
        place,
        _numbers(kinds),
        reached=reached,
        has_result=_has_result(own),
        passes_nan=own.operation in DERIVED,
    )
    if len(program.steps) == 1 and (not program.reads or _is_gradient(own, program)):
        return None, program.reads
    return _elementwise(own, program, is_exact=is_exact), program.reads


def _is_gradient(own: Elementwise[Any], program: DerivedSteps) -> bool:
    """Return whether a program of one step is the gradient of a result."""
    return program.reads[0] >= len(own.inputs)


def _has_result(own: Elementwise[Any]) -> bool:
    """Return whether the result has all digits of its computation."""
    return own.precision is None and not any(own.dtypes)


def _by_hand(own: Elementwise[Any], text: str) -> tuple[Elementwise[Any], tuple[int, ...]]:
    names = (*own.inputs, "g", *own.outputs)
    inputs = parse(text).inputs
    made = Elementwise[Any](text, inputs=inputs, operation=f"{own.operation}.slope", precision=own.precision)
    return made, tuple(names.index(one) for one in inputs)


def _elementwise(own: Elementwise[Any], program: DerivedSteps, *, is_exact: bool) -> Elementwise[Any]:
    """Return a program as an expression of the arguments that it reads."""
    arguments = _names(own)
    return Elementwise[Any](
        text_of(program.steps, {"slope": program.outputs[0]}, arguments, is_typed=is_exact),
        inputs=[arguments[n] for n in program.reads],
        outputs="slope",
        operation=f"{own.operation}.slope",
        precision=None if is_exact else own.precision,
    )


def _names(own: Elementwise[Any]) -> dict[int, str]:
    """Return names of arguments, gradients and results, by their numbers."""
    numbers = [str(number or "") for number in range(len(own.outputs))]
    names = [f"a{n}" for n in range(len(own.inputs))]
    return dict(enumerate([*names, *[f"g{n}" for n in numbers], *[f"y{n}" for n in numbers]]))


# Gradients of arrays that elements are loaded from.


@attrs.frozen(eq=False)
class _Scattered:
    """An addition, as expressions.

    Attributes:
        addition: The addition.
        made: For its value and each of its indices an expression, and the arguments that it reads; None if
            the scatter computes it itself.
        scatter: The scatter. It can only load from the array that it changes.
        reads: The other arguments that it reads.
        shifts: The shifts of the indices, if all are shifts.
        value: The program of the value.
    """

    addition: Addition
    made: tuple[tuple[Elementwise[Any], tuple[int, ...]] | None, ...]
    scatter: Scatter
    reads: tuple[int, ...]
    shifts: tuple[Shift, ...] | None
    value: DerivedSteps


@functools.lru_cache(1024)
def _additions(
    own: Elementwise[Any], kinds: tuple[ArgumentType, ...], place: int, reached: tuple[int, ...]
) -> tuple[_Scattered, ...]:
    return _all_scattered(own, own.typed(kinds), kinds, place, reached)


@functools.lru_cache(1024)
def _written_out(
    own: Elementwise[Any], kinds: tuple[ArgumentType, ...], place: int, reached: tuple[int, ...]
) -> tuple[_Scattered, ...]:
    """Return the additions of an expression with unrolled short loops; none if nothing is gained."""
    program = own.typed(kinds)
    if not any(step.function == "loop" for step in program.steps):
        return ()
    program = unrolled(program)
    loads = [step for step in program.steps if step.function == "load" and step.value == place]
    if len(loads) > _MAX_LOADS or any(step.function == "loop" for step in program.steps):
        return ()
    return _all_scattered(own, program, kinds, place, reached)


def _all_scattered(
    own: Elementwise[Any],
    program: TypedExpression,
    kinds: tuple[ArgumentType, ...],
    place: int,
    reached: tuple[int, ...],
) -> tuple[_Scattered, ...]:
    found = additions(
        program, len(kinds), place, _numbers(kinds), reached=reached, has_result=_has_result(own)
    )
    return tuple(_scattered(own, one) for one in found)


def _scattered(own: Elementwise[Any], addition: Addition) -> _Scattered:
    program, arguments = addition.program, _names(own)
    parts = [program.only(number) for number in program.outputs]
    names = ["value", *[f"j{axis}" for axis in range(len(parts) - 1)]]
    made = tuple(
        (_elementwise(own, part, is_exact=True), part.reads) if part.loads else None for part in parts
    )
    apart = [name for name, one in zip(names, made, strict=True) if one is not None]
    inlined = {name: number for name, number in zip(names, program.outputs, strict=True) if name not in apart}
    rest = program.only(*inlined.values())
    text = text_of(rest.steps, dict(zip(inlined, rest.outputs, strict=True)), arguments, is_typed=True)
    # An index outside is the nearest one.
    nearest = ", ".join(f"minimum(maximum({name}, -n_{name}), n_{name} - 1)" for name in names[1:])
    scatter = Scatter(
        f"made[{nearest}]",
        "add",
        inputs=["made", *[arguments[n] for n in rest.reads], *apart, *[f"n_{name}" for name in names[1:]]],
        operation=f"{own.operation}.slope",
        body=text,
        value="value",
    )
    shifts = None if addition.counts else shifts_of(program)
    return _Scattered(addition, made, scatter, rest.reads, shifts, parts[0])


@functools.lru_cache(1024)
def _sorted(
    own: Elementwise[Any], addition: Addition, number: int
) -> tuple[tuple[Elementwise[Any], tuple[int, ...]], tuple[Elementwise[Any], tuple[int, ...]]]:
    """Return the place of an addition, in C order, and its value, given the number of a gradient."""
    value, *indices = addition.program.outputs
    program, arguments = addition.program.only(*indices), _names(own)
    names = {f"j{axis}": number for axis, number in enumerate(program.outputs)}
    # An operand determines the device of the computation.
    reads, g = tuple(sorted({*program.reads, number})), arguments[number]
    lines = [text_of(program.steps, names, arguments, is_typed=True), f"place = where({g} == {g}, 0, 0)"]
    for name in names:
        # An index outside becomes the nearest one inside, and a negative index counts from the end.
        lines += [f"{name} = minimum(maximum({name}, -n_{name}), n_{name} - 1)"]
        lines += [f"place = place * n_{name} + where({name} < 0, {name} + n_{name}, {name})"]
    place = Elementwise[Any](
        "\n".join(lines),
        inputs=[*[arguments[n] for n in reads], *[f"n_{name}" for name in names]],
        outputs="place",
        operation=f"{own.operation}.slope",
    )
    whole = addition.program.only(value)
    return (place, reads), (_elementwise(own, whole, is_exact=True), whole.reads)


def _added(
    own: Elementwise[Any],
    kinds: tuple[ArgumentType, ...],
    place: int,
    reached: tuple[int, ...],
    given: Sequence[Any],
) -> Any:
    """Return the gradient of an array that elements are loaded from."""
    x, shape = given[place], given[len(kinds) + reached[0]].shape
    found = _written_out(own, kinds, place, reached)
    if not found or not all(_is_shifted(one, x, given, shape) for one in found):
        found = _additions(own, kinds, place, reached)
    shifted = [one for one in found if _is_shifted(one, x, given, shape)]
    made = _gathered(own, shifted, given, x.shape) if shifted else None
    for one in found:
        loops = tuple(_iterations(count, kinds, given, shape) for count in one.addition.counts)
        if one not in shifted and 0 not in loops:
            made = _scatter_one(own, one, len(kinds) + reached[0], given, loops, x, made)
    return arrays.zeros_like(x) if made is None else made


def _is_shifted(one: _Scattered, x: Any, given: Sequence[Any], shape: Sequence[int]) -> bool:
    shifts = one.shifts
    if shifts is None or x.shape != shape:
        return False
    return all(shift.fits(extent, given) for shift, extent in zip(shifts, x.shape, strict=True))


def _gathered(
    own: Elementwise[Any],
    loads: Sequence[_Scattered],
    given: Sequence[Any],
    shape: tuple[int, ...],
) -> Any:
    """Sum the gradients of loads with shifted indices."""
    values: dict[DerivedSteps, Any] = {}
    for one in loads:
        part = one.value
        if part not in values:
            reads = [given[n] for n in part.reads]
            is_same = len(part.steps) == 1 and _is_gradient(own, part)
            values[part] = reads[0] if is_same else _whole(own, part)(*reads, shape=shape)
    names = {part: f"v{number}" for number, part in enumerate(values)}
    terms = tuple((names[one.value], one.shifts or ()) for one in loads)
    gather, extents = _gather(own.operation, terms, len(shape))
    return gather(*values.values(), *[shape[axis] for axis in extents], shape=shape)


@functools.lru_cache(1024)
def _whole(own: Elementwise[Any], part: DerivedSteps) -> Elementwise[Any]:
    return _elementwise(own, part, is_exact=True)


@functools.lru_cache(1024)
def _gather(
    operation: str, terms: tuple[tuple[str, tuple[Shift, ...]], ...], ndim: int
) -> tuple[Elementwise[Any], tuple[int, ...]]:
    """Return the expression of a gather, and the axes with extents that it reads."""
    text = gather_text(terms)
    extents = tuple(axis for axis in range(ndim) if f"n{axis}" in text)
    names = dict.fromkeys(name for name, _ in terms)
    made = Elementwise[Any](
        text,
        inputs=[*names, *[f"n{axis}" for axis in extents]],
        outputs="slope",
        operation=f"{operation}.slope",
    )
    return made, extents


def _scatter_one(
    own: Elementwise[Any],
    one: _Scattered,
    number: int,
    given: Sequence[Any],
    loops: tuple[int, ...],
    x: Any,
    made: Any,
) -> Any:
    """Add an addition by a scatter, where a gradient has a number."""
    g, loads = given[number], one.addition.program.loads
    shape = (*g.shape, *loops)

    @functools.cache
    def wide(number: int) -> Any:
        return given[number] if number in loads or not loops else _behind(given[number], len(loops))

    if is_ordered(g):
        apart = [part[0](*map(wide, part[1]), shape=shape) for part in one.made if part]
        zeros = arrays.zeros_like(x) if made is None else made
        return one.scatter(zeros, *map(wide, one.reads), *apart, *x.shape, shape=shape)
    flat, value = _sorted(own, one.addition, number)
    places, values = (
        arrays.reshape(part(*map(wide, reads), *more, shape=shape), (-1,))
        for (part, reads), more in ((flat, x.shape), (value, ()))
    )
    total = sorted_sums(places, values, x.shape)
    return total if made is None else made + total


def _behind(one: Any, loops: int) -> Any:
    """Return an array with an additional last axis for each loop."""
    if isinstance(one, _NUMBERS) or not np.shape(one):
        return one
    return arrays.reshape(one, (*np.shape(one), *(1,) * loops))


def _iterations(
    program: DerivedSteps, kinds: Sequence[ArgumentType], given: Sequence[Any], shape: Sequence[int]
) -> int:
    """Return the most iterations that a loop of any element has.

    Raises:
        NotSupportedError: Elements, or another loop, decide it.
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
    arguments = [np.asarray(one)[()] if isinstance(one, _NUMBERS) else None for one in given[: len(kinds)]]
    (count,) = evaluate(typed, arguments, indices)
    return max(0, int(np.max(count, initial=0)))


def _indices(shape: Sequence[int], axis: int) -> Any:
    """Return the indices along an axis of a shape."""
    at = axis % len(shape)
    return np.arange(shape[at]).reshape([-1 if k == at else 1 for k in range(len(shape))])
