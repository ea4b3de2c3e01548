"""Gradients that compute values again instead of keeping them: of `checkpoint`, and through time by `scan`.

`scan` traces its function once. The calls that depend on the state or on the element of a sequence are the
body, a `TracedBody`; all other operands, such as parameters of the surrounding function, are computed once
and read by each iteration. An iteration instantiates the body with other arrays, so all iterations share one
plan. The gradient of the body is derived once, and is a body as well.

Iterations are requests, and so a scan has its own place among the calls of a function: it runs step by step,
with the calls before and after it. Of the states, every n-th is kept. The backward pass computes the states
of a segment again, and then runs the iterations of the segment from the last to the first.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, Chain, arguments_of, gather
from ..devices.operations._chain import replaced
from ..devices.operations._operation import recording_now
from ._backward import backward, is_operand, pulled
from ._elementwise import Rule
from ._rules import filled
from ._tape import mapped, visit

__all__ = ["checkpoint", "scan"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
# The derived bodies that are cached for the code of a function.
_MAX_BODIES = 8


def checkpoint(f: Callable[..., Any]) -> Callable[..., Call[Any]]:
    """Make a function whose gradient computes its intermediate results again, as `jax.checkpoint`.

    The intermediate results of `f` need no memory between the value and the gradient; the gradient takes the
    time of another value.

    Args:
        f: Composes calls, awaits none, and returns one. Its arguments are arrays, numbers, and dicts, lists
            and tuples of these.

    Returns:
        A function with the arguments of `f`, to call within a function that is derived.

    Raises:
        TypeError: `f` does not return a call.
    """
    # All calls whose arguments are nested alike share a function, because it is part of a plan's key. Their
    # leaves are arguments of the call, so that numbers are in the key as well, by their bits.
    functions = dict[Any, ArrayFunction]()

    def call(*args: Any, **named: Any) -> Call[Any]:
        leaves = list[Any]()
        structure = structure_of((args, named), leaves)
        if structure not in functions:
            name = getattr(f, "__qualname__", type(f).__name__)
            functions[structure] = ArrayFunction(
                f"checkpoint({name})",
                _first,
                "value",
                takes_hosts=True,
                rule=partial(_by_another_value, f, structure),
            )
        value = f(*args, **named)
        if not isinstance(value, Call):
            raise TypeError(f"checkpoint: the function must return a call, got {type(value).__name__}")
        return Call(functions[structure], (value, leaves))

    return call


def _first(value: Any, _: object) -> Any:
    return value


@attrs.frozen
class _Place:
    """The place of a leaf among nested arguments, or of a body's input."""

    index: int


def structure_of(nested: Any, leaves: list[Any]) -> Any:
    """Return how arguments are nested, as a hashable value, and append their leaves to a list."""
    if not isinstance(nested, (AccelRef, Call)):
        if isinstance(nested, Mapping):
            return dict, tuple([(name, structure_of(item, leaves)) for name, item in nested.items()])
        if isinstance(nested, (list, tuple)):
            return type(nested), tuple([structure_of(item, leaves) for item in nested])
    leaves.append(nested)
    return _Place(len(leaves) - 1)


def refilled(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return nested arguments from how they are nested and their leaves."""
    if isinstance(structure, _Place):
        return leaves[structure.index]
    kind, items = structure
    if kind is dict:
        return {name: refilled(item, leaves) for name, item in items}
    return kind([refilled(item, leaves) for item in items])


def _by_another_value(f: Callable[..., Any], structure: Any, call: Any, g: Any) -> Iterator[Rule]:
    value, leaves = call.args
    positions = [position for position, leaf in enumerate(leaves) if is_operand(leaf)]

    def compose(*operands: Any) -> Any:
        moved = list(leaves)
        for position, operand in zip(positions, operands, strict=True):
            moved[position] = operand
        args, named = refilled(structure, moved)
        return f(*args, **named)

    slopes = functools.cache(lambda: pulled(compose, [leaves[position] for position in positions], g))
    # The operands get their gradients by the other value.
    yield value, lambda: None
    for number, position in enumerate(positions):
        yield leaves[position], partial(_part, slopes, number)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    every: int = 10,
) -> tuple[Any, Any]:
    """Apply a function again and again, with a state that it changes, as `jax.lax.scan`.

    The function is traced once, and its gradient is derived once, whatever the number of iterations is. Each
    iteration is a request. The gradient keeps every n-th state, and computes the others again.

    Args:
        f: ``f(state, x)`` composes calls, and returns the next state, nested like the state, and a result y
        of
            the iteration: a call, a dict, list or tuple of calls, or None. It may use arrays and calls of the
            surrounding function, such as parameters; gradients flow to them.
        state: The first state: an array or call, or a dict, list or tuple of these.
        xs: The elements: arrays with an axis of iterations first, nested; or None.
        length: The number of iterations, if there are no `xs`.
        every: How many iterations there are between states that are kept.

    Returns:
        The last state, and all results y, stacked along a first axis: as calls, nested like these. Use them
        in a function that is derived, or await them by ``await ta.gather(...)``.

    Raises:
        NotSupportedError: A second derivative passes it.
        ValueError: `xs` have several lengths, or neither `xs` nor `length` tells the number of iterations.
        TypeError: `f` does not return a pair, or the state changes its structure, shapes or dtypes.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"scan: every must be at least 1, got {every!r}")
    states, elements = _arrays_of(state), _arrays_of(xs)
    count = _count(elements, length)
    of_states = [leaf_of(array, array.shape) for array in states]
    of_elements = [leaf_of(_row(array, 0), array.shape[1:]) for array in elements]
    next_state, y = _pair(
        f(mapped(state, _next(of_states)), mapped(xs, _next(of_elements)) if elements else None)
    )
    next_states, results = list[Any](), list[Any]()
    visit(next_state, next_states.append)
    if y is not None:
        visit(y, results.append)
    for computed in (*next_states, *results):
        if isinstance(computed, Call):
            computed.silence()
    _check_states(states, next_states)
    body, constants = traced([*next_states, *results], [*of_states, *of_elements])
    code = getattr(f, "__code__", None)
    program = _Program(body, len(states), len(elements), code if isinstance(code, CodeType) else None)
    call: Any = Call(_SCAN, (program, count, every, states, elements, constants))
    parts = [call[k] for k in range(len(states) + len(results))]
    for part in parts:
        # A caller may only need some of them.
        part.silence()
    final_state = mapped(state, _next(parts))
    return final_state, None if y is None else mapped(y, _next(parts[len(states) :]))


def _arrays_of(nested: Any) -> list[Any]:
    """Return nested arrays as a list; None has no arrays."""
    nested_arrays = list[Any]()
    if nested is not None:
        visit(nested, nested_arrays.append)
    for array in nested_arrays:
        if not isinstance(array, (AccelRef, Call)):
            raise TypeError(
                "scan: state and xs must be arrays on a device, in dicts and lists, got "
                f"{type(array).__name__}"
            )
    return nested_arrays


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("scan: the function must return a pair (state, y); y may be None")
    state, y = result
    return state, y


def _next(items: Sequence[Any]) -> Callable[[Any], Any]:
    remaining = iter(items)
    return lambda _: next(remaining)


def leaf_of(array: Any, shape: Sequence[int]) -> Any:
    leaf = arrays.reshape(array, tuple(shape))
    leaf.silence()
    return leaf


def _row(array: Any, number: int) -> Any:
    # The number is an array, so that all iterations share one plan.
    row = arrays.take(array, np.array(number), axis=0)
    # The body may not read it.
    row.silence()
    return row


def _count(elements: Sequence[Any], length: int | None) -> int:
    lengths = {array.shape[0] if array.shape else None for array in elements}
    lengths |= set() if length is None else {length}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            "scan: pass length, because there are no xs"
            if not lengths
            else f"scan: xs must have one number of iterations, got {sorted(map(str, lengths))}"
        )
    (count,) = lengths
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"scan: the number of iterations must be at least 1, got {count!r}")
    return count


def _check_states(states: Sequence[Any], next_states: Sequence[Any]) -> None:
    if len(states) != len(next_states):
        raise TypeError(f"scan: the next state must have {len(states)} arrays, got {len(next_states)}")
    for number, (old_array, new_array) in enumerate(zip(states, next_states, strict=True)):
        if not isinstance(new_array, (AccelRef, Call)):
            raise TypeError(f"scan: the next state must be made of calls, got {type(new_array).__name__}")
        if (tuple(old_array.shape), old_array.dtype) != (tuple(new_array.shape), new_array.dtype):
            raise TypeError(
                f"scan: array {number} of the state must keep its shape and dtype, got {old_array.shape} of "
                f"{old_array.dtype}, and then {new_array.shape} of {new_array.dtype}"
            )


@attrs.frozen(eq=False)
class TracedBody:
    """Calls that can be made again, of other arrays.

    Attributes:
        steps: For each call its function, and its positional and keyword arguments, in which a `_Place`
        stands
            for an input, and an `_Earlier` for the result of a step.
        outputs: A place or an earlier result for each output.
    """

    steps: Sequence[tuple[ArrayFunction, tuple[Any, ...], Mapping[str, Any] | None]]
    outputs: Sequence[Any]

    def calls(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the calls of the outputs, for arrays or calls as inputs."""
        computed = list[Any]()

        def of(argument: Any) -> Any:
            if type(argument) is _Place:
                return inputs[argument.index]
            if type(argument) is _Earlier:
                return computed[argument.index]
            if type(argument) in (list, tuple):
                return type(argument)([of(item) for item in argument])
            return argument

        for function, args, named in self.steps:
            call: Any = Call(function, tuple(map(of, args)), named and {k: of(v) for k, v in named.items()})
            computed.append(call)
        for call in computed:
            # Some are for other outputs.
            call.silence()
        return [of(output) for output in self.outputs]


@attrs.frozen
class _Earlier:
    """The result of an earlier step of a body."""

    index: int


def traced(outputs: Sequence[Any], leaves: Sequence[Any]) -> tuple[TracedBody, list[Any]]:
    """Return the calls between leaves and outputs as a body, and its inputs after the leaves."""
    positions: dict[int, Any] = {id(leaf): _Place(index) for index, leaf in enumerate(leaves)}
    constants, steps = list[Any](), list[Any]()

    def place_of(operand: Any) -> Any:
        if id(operand) not in positions:
            positions[id(operand)] = _Place(len(leaves) + len(constants))
            constants.append(operand)
        return positions[id(operand)]

    calls = [output for output in outputs if isinstance(output, Call) and id(output) not in positions]
    gathered = gather(*calls)
    gathered.silence()
    chain = Chain(gathered, is_spent=False, ends=list(positions))
    depends = set(positions)
    for step in chain.steps[:-1]:
        if depends.isdisjoint(map(id, arguments_of(step))):
            continue
        depends.add(id(step))
        operands = {
            id(argument): place_of(argument)
            for argument in arguments_of(step)
            if isinstance(argument, (Call, AccelRef, np.ndarray))
        }
        args, named = replaced(step, operands)
        positions[id(step)] = _Earlier(len(steps))
        steps.append((step.function, args, named or None))
    return TracedBody(steps, [place_of(output) for output in outputs]), constants


@attrs.frozen(eq=False)
class _Program:
    """The body of a scan, whose inputs are the state, the element and the constants.

    Attributes:
        body: Its outputs are the next state and the results.
        states: The number of arrays of the state.
        elements: The number of arrays of an element.
        code: The code of the function, for which derived bodies are cached.
    """

    body: TracedBody
    states: int
    elements: int
    code: CodeType | None

    def only_states(self) -> TracedBody:
        return attrs.evolve(self.body, outputs=self.body.outputs[: self.states])


_BODIES: weakref.WeakKeyDictionary[CodeType, OrderedDict[Any, TracedBody]] = weakref.WeakKeyDictionary()
"""Derived bodies by the code of a function, and by the structure of its calls."""


async def _scan(
    program: _Program, count: int, every: int, state: list[Any], elements: list[Any], constants: list[Any]
) -> Any:
    """Run all iterations; returns the last state, the results, and the states that are kept."""
    if recorder := layout_recorder("gradients.scan"):
        planned = program.body.calls([*state, *[_row(x, 0) for x in elements], *constants])
        kept_count = -(-count // every)
        wide = [(count, *y.shape) for y in planned[program.states :]]
        shapes = [*[x.shape for x in state], *wide, *[(kept_count, *x.shape) for x in state]]
        dtypes = [x.dtype for x in (*planned, *state)]
        return tuple([recorder.stand_in_for(*layout) for layout in zip(shapes, dtypes, strict=True)])
    kept_states, results = list[Any](), list[Any]()
    for number in range(count):
        if number % every == 0:
            kept_states.append(state)
        computed = await gather(
            *program.body.calls([*state, *[_row(x, number) for x in elements], *constants])
        )
        state = list(computed[: program.states])
        results.append(computed[program.states :])
    ys = [await arrays.stack(list(same)) for same in zip(*results, strict=True)]
    return *state, *ys, *[await arrays.stack(list(same)) for same in zip(*kept_states, strict=True)]


def layout_recorder(name: str) -> Any:
    """Return the recorder that only wants layouts; None if the requests of a function run.

    Raises:
        NotSupportedError: The calls are recorded as one request or as a step, and then run step by step.
    """
    recorder: Any = recording_now()
    if recorder is None or getattr(recorder, "is_ahead", False):
        return recorder
    raise NotSupportedError(
        f"{name} takes several requests, so it is in no graph",
        operation=name,
    )


def _of_scan(call: Any, g: Any) -> Iterator[Rule]:
    program, count, every, state, elements, constants = call.args
    operands = [*state, *elements, *constants]
    results = len(program.body.outputs)
    # The states that are kept have no gradients.
    gathered = filled(call, g[:results])

    @functools.cache
    def gradients() -> Any:
        kept_count = [call[k] for k in range(results, len(g))]
        return Call(_SCAN_GRAD, (program, count, every, kept_count, elements, constants, gathered))

    for index, operand in enumerate(operands):
        if is_operand(operand):
            yield operand, partial(_part, gradients, index)


def _part(several: Callable[[], Any], index: int) -> Any:
    return several()[index]


async def _scan_grad(
    program: _Program,
    count: int,
    every: int,
    kept_states: list[Any],
    elements: list[Any],
    constants: list[Any],
    g: list[Any],
) -> Any:
    """Run all iterations backwards; returns gradients of the first state, the elements and the constants."""
    if layout_recorder("gradients.scan"):
        return *g[: program.states], *elements, *constants
    of_state, of_results = g[: program.states], g[program.states :]
    smooth = [n for n, x in enumerate(constants) if _is_smooth(x)]
    totals = [await arrays.zeros_like(constants[n]) for n in smooth]
    of_elements = list[list[Any]]()
    forward, back = program.only_states(), None
    for segment in reversed(range(kept_states[0].shape[0])):
        numbers = range(segment * every, min((segment + 1) * every, count))
        states = [[await _row(x, segment) for x in kept_states]]
        for number in numbers[:-1]:
            inputs = [*states[-1], *[_row(x, number) for x in elements], *constants]
            states.append(list(await gather(*forward.calls(inputs))))
        for number, state in zip(reversed(numbers), reversed(states), strict=True):
            element = [_row(x, number) for x in elements]
            seeds = [*of_state, *[_row(x, number) for x in of_results]]
            if back is None:
                back = _derived(program, [*state, *[await x for x in element], *constants], seeds, totals)
                element = [_row(x, number) for x in elements]
                seeds = [*of_state, *[_row(x, number) for x in of_results]]
            computed = await gather(*back.calls([*state, *element, *constants, *seeds, *totals]))
            of_state = list(computed[: program.states])
            of_elements.append(list(computed[program.states : program.states + program.elements]))
            totals = list(computed[program.states + program.elements :])
    rows = [await arrays.stack(list(same)[::-1]) for same in zip(*of_elements, strict=True)]
    sums = dict(zip(smooth, totals, strict=True))
    return *of_state, *rows, *[sums.get(n, x) for n, x in enumerate(constants)]


def _is_smooth(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and x.dtype.kind in ("float", "complex")


def _derived(
    program: _Program, inputs: Sequence[Any], seeds: Sequence[Any], totals: Sequence[Any]
) -> TracedBody:
    """Return the body of an iteration of the backward pass, derived or from the cache.

    Its inputs are those of the body, the gradients of its outputs, and the sums of the gradients of floating
    constants so far. Its outputs are the gradients of the state and the element, and the sums.
    """
    leaves = [x if isinstance(x, np.ndarray) else leaf_of(x, x.shape) for x in inputs]
    outputs = program.body.calls(leaves)
    gathered = gather(*outputs, *seeds)
    gathered.silence()
    key: Any = Chain(gathered, is_spent=False).key
    if key is not None:
        # The calls do not show inputs that they do not read.
        key = program.states, program.elements, len(inputs), *key
    bodies = _BODIES.setdefault(program.code, OrderedDict()) if program.code is not None else OrderedDict()
    if key is not None and key in bodies:
        bodies.move_to_end(key)
        return bodies[key]
    of_outputs = [leaf_of(x, x.shape) for x in seeds]
    sums = [leaf_of(x, x.shape) for x in totals]
    smooth = [n for n, x in enumerate(outputs) if is_operand(x)]
    active = [n for n, leaf in enumerate(leaves) if is_operand(leaf)]
    calls = list[Any]()
    value = gather(*[outputs[n] for n in smooth])
    value.silence()
    slopes = dict(
        zip(
            active,
            backward(value, [leaves[n] for n in active], [of_outputs[n] for n in smooth], calls),
            strict=True,
        )
    )
    first = program.states + program.elements
    gradients = [slopes[n] if n in slopes else _nothing(leaves[n]) for n in range(first)]
    added = [total + slopes[n] for n, total in zip([n for n in active if n >= first], sums, strict=True)]
    for call in (*calls, *gradients, *added):
        if isinstance(call, Call):
            call.silence()
    body, constants = traced([*gradients, *added], [*leaves, *of_outputs, *sums])
    if constants:
        raise NotSupportedError(
            "gradients.scan: the gradient of an iteration reads arrays that it did not get"
        )
    if key is not None:
        bodies[key] = body
        while len(bodies) > _MAX_BODIES:
            bodies.popitem(last=False)
    return body


def _nothing(leaf: Any) -> Any:
    return arrays.zeros_like(leaf)


_SCAN = ArrayFunction("gradients.scan", _scan, "awaitable", rule=_of_scan)
_SCAN_GRAD = ArrayFunction("gradients.scan_grad", _scan_grad, "awaitable")
