"""Functions through time: `scan` applies a function again and again, in one operation of the device.

`scan` traces its function once. The calls that depend on the state or on the element of a sequence are the
body, a `TracedBody`; all other operands, such as parameters of the surrounding function, are computed once
and read by each iteration. A body is an `ArrayFunction` of its own, which all scans of one structure share
(`_shared_function`). So their chains have one key, and one plan.

**On the device** a scan is a loop of the graphs library: the body is captured as a graph, which reads the
elements by the number of the iteration, changes the state in place, and writes its results to rows. Its
memory is made within the same operation, so the operation can run again after a loss. On a backend without
graphs, and with an operation that a graph cannot contain, such as one that checks indices, each iteration is
a request (`_by_requests`).

**The gradient of a scan is a scan**, from the last iteration to the first: its state has the gradients of the
state and the sums of the constants' gradients, and its elements are the states and elements of the first
scan. So it is one operation again, and has a gradient. The states are further results (`_keeping`).

**Memory:** a scan of many iterations is a scan of segments, each of which is a scan. Only the outer one keeps
its states. The rule of the inner one computes its states again.

**A batch of scans** (`vmap`) is a scan of the batch of iterations (`_batched`).

These orders matter in an iteration: results are written before the state changes, because they may be parts
of it; and a part of the state that becomes another part is copied before any of them changes.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..actors import silence
from ..backends.base import DType, Ints, NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, gather
from ..devices.operations._operation import recording_now
from ..expressions import Elementwise, Scatter
from ..graphs import while_
from ..graphs._graph import captured
from ._backward import backward, is_operand
from ._batched import BATCH_RULES, Batch
from ._elementwise import Rule
from ._memo import memoized
from ._recomputed import Place, TracedBody, leaf_of, traced
from ._tape import mapped, visit

__all__ = ["scan"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
# The bodies that are cached for the code of a function.
_MAX_BODIES = 8


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    every: int = 10,
) -> tuple[Any, Any]:
    """Apply a function again and again, with a state that it changes, as `jax.lax.scan`.

    The function is traced once, and its gradient is derived once, whatever the number of iterations is. All
    iterations are one operation, unless `f` uses a function that a graph cannot contain, such as `take`,
    which checks indices: then each is a request. The gradient keeps every n-th state, and computes the others
    again. Gradients of any order exist.

    Args:
        f: ``f(state, x)`` composes calls, and returns the next state, nested like the state, and a result y
            of the iteration: a call, a dict, list or tuple of calls, or None. It may use arrays and calls of
            the surrounding function, such as parameters; gradients flow to them.
        state: The first state: an array or call, or a dict, list or tuple of these.
        xs: The elements: arrays with an axis of iterations first, nested; or None.
        length: The number of iterations, if there are no `xs`.
        every: How many iterations there are between states that are kept.

    Returns:
        The last state, and all results y, stacked along a first axis: as calls, nested like these. Use them
        in a function that is derived, or await them by ``await ta.gather(...)``.

    Raises:
        ValueError: `xs` have several lengths, or neither `xs` nor `length` tells the number of iterations.
        TypeError: `f` does not return a pair, or the state changes its structure, shapes or dtypes.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"scan: every must be at least 1, got {every!r}")
    states, elements = _arrays_of(state), _arrays_of(xs)
    count = _count(elements, length)
    of_states = [leaf_of(array, array.shape) for array in states]
    of_elements = [_row_leaf(array) for array in elements]
    next_state, y = _pair(
        f(mapped(state, _next(of_states)), mapped(xs, _next(of_elements)) if elements else None)
    )
    next_states, results = list[Any](), list[Any]()
    visit(next_state, next_states.append)
    if y is not None:
        visit(y, results.append)
    silence(*next_states, *results)
    _check_states(states, next_states)
    body, constants = traced([*next_states, *results], [*of_states, *of_elements])
    layouts = [_layout_of(x) for x in (*next_states, *results)]
    iteration = _Iteration(body, layouts, len(states), len(elements), len(constants))
    code = getattr(f, "__code__", None)
    function = _shared_function(iteration, code, [*of_states, *of_elements, *constants])
    parts = _parts(function, len(layouts), count, every, states, elements, constants)
    # A caller may only need some of them.
    silence(*parts)
    final_state = mapped(state, _next(parts))
    return final_state, None if y is None else mapped(y, _next(parts[len(states) :]))


def _parts(
    function: ArrayFunction,
    results: int,
    count: int,
    every: int,
    states: list[Any],
    elements: list[Any],
    constants: list[Any],
) -> list[Any]:
    """Return the last states and the results of all iterations."""
    if every == 1 or count <= every:
        call: Any = Call(_keeping(function), (count, False, states, elements, constants))
        return [call[k] for k in range(results)]
    segments, rest = divmod(count, every)
    split = segments * every
    heads = [arrays.reshape(x[:split], (segments, every, *x.shape[1:])) for x in elements]
    call = Call(_segments(function, every), (segments, False, states, heads, constants))
    parts = [call[k] for k in range(results)]
    last_states, rows = parts[: len(states)], parts[len(states) :]
    rows = [arrays.reshape(y, (split, *y.shape[2:])) for y in rows]
    if rest:
        tail: Any = Call(function, (rest, False, last_states, [x[split:] for x in elements], constants))
        last_states = [tail[k] for k in range(len(states))]
        rows = [arrays.concat([y, tail[len(states) + k]]) for k, y in enumerate(rows)]
    return [*last_states, *rows]


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


def _layout_of(x: Any) -> tuple[Ints, DType]:
    return tuple(x.shape), DType.of(x.dtype)


def _row(array: Any, number: int) -> Any:
    # The number is an array, so that all iterations share one plan.
    row = arrays.take(array, np.array(number), axis=0)
    # The body may not read it.
    row.silence()
    return row


def _row_leaf(array: Any) -> Any:
    """Return a call with the layout of an array's rows."""
    return leaf_of(_row(array, 0), array.shape[1:])


@attrs.frozen(eq=False)
class _Iteration:
    """The function of an iteration, traced.

    Attributes:
        body: Its inputs are the state, the element and the constants; its outputs the next state and the
            results.
        layouts: The shape and dtype of each output.
        states: The number of arrays of the state.
        elements: The number of arrays of an element.
        constants: The number of further inputs.
        is_kept: Whether the last results are the arrays of the state before the iteration.
    """

    body: TracedBody
    layouts: Sequence[tuple[Ints, DType]]
    states: int
    elements: int
    constants: int
    is_kept: bool = False

    def function(self, *, is_fixed: bool = True) -> ArrayFunction:
        """Make the function of scans with this body.

        Args:
            is_fixed: Whether other calls may share it, because the body does not depend on their arguments.
        """
        return ArrayFunction(
            "gradients.scan",
            partial(_run, self),
            "awaitable",
            rule=partial(_slopes, self),
            is_fixed=is_fixed,
            takes_hosts=not self.body.reads_hosts,
        )


_FUNCTIONS: weakref.WeakKeyDictionary[CodeType, OrderedDict[Any, ArrayFunction]] = weakref.WeakKeyDictionary()
"""Functions of scans, by the code of the program's function, and by the structure of its calls."""


def _shared_function(iteration: _Iteration, code: object, inputs: Sequence[Any]) -> ArrayFunction:
    """Return the function of scans with this body, the same for equal bodies of one code."""
    body_key = iteration.body.key()
    is_fixed = all(step.function.is_fixed for step in iteration.body.steps)
    if body_key is None or not is_fixed or not isinstance(code, CodeType):
        return iteration.function(is_fixed=False)
    # The calls show neither inputs that they do not read, nor layouts. Host arrays have no gradients.
    layouts = [(shape, id(dtype)) for shape, dtype in (*map(_layout_of, inputs), *iteration.layouts)]
    hosts = [type(x) is np.ndarray for x in inputs]
    key = iteration.states, iteration.elements, *layouts, *hosts, *body_key
    functions = _FUNCTIONS.setdefault(code, OrderedDict())
    shared = functions.setdefault(key, iteration.function())
    functions.move_to_end(key)
    while len(functions) > _MAX_BODIES:
        functions.popitem(last=False)
    return shared


def _iteration_of(function: ArrayFunction) -> _Iteration:
    make: Any = function.make
    iteration: _Iteration = make.args[0]
    return iteration


@memoized
def _keeping(function: ArrayFunction) -> ArrayFunction:
    """Return the function of scans that also return all states."""
    iteration = _iteration_of(function)
    states = range(iteration.states)
    return attrs.evolve(
        iteration,
        body=attrs.evolve(iteration.body, outputs=[*iteration.body.outputs, *map(Place, states)]),
        layouts=[*iteration.layouts, *iteration.layouts[: iteration.states]],
        is_kept=True,
    ).function(is_fixed=function.is_fixed)


@memoized
def _segments(function: ArrayFunction, every: int) -> ArrayFunction:
    """Return the function of scans with segments of iterations as iterations."""
    iteration = _iteration_of(function)
    ends = iteration.states, iteration.states + iteration.elements
    inputs = list(map(Place, range(ends[1] + iteration.constants)))
    split = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]
    call = TracedBody.of_call(function, (every, False, *split), len(iteration.layouts))
    body = attrs.evolve(call, reads_hosts=iteration.body.reads_hosts)
    layouts = [
        *iteration.layouts[: iteration.states],
        *[((every, *shape), dtype) for shape, dtype in iteration.layouts[iteration.states :]],
    ]
    segment = attrs.evolve(iteration, body=body, layouts=layouts)
    return _keeping(segment.function(is_fixed=function.is_fixed))


async def _run(
    iteration: _Iteration,
    count: int,
    is_reverse: bool,  # an argument of calls
    states: list[Any],
    elements: list[Any],
    constants: list[Any],
) -> Any:
    """Run all iterations; returns the last state and the results.

    Raises:
        NotSupportedError: A graph cannot contain an operation of the body, and the scan is recorded for one.
    """
    recorder: Any = recording_now()
    if recorder is not None and getattr(recorder, "is_ahead", False):
        shapes = [
            shape if k < len(states) else (count, *shape) for k, (shape, _) in enumerate(iteration.layouts)
        ]
        return tuple(
            [
                recorder.stand_in_for(shape, dtype)
                for shape, (_, dtype) in zip(shapes, iteration.layouts, strict=True)
            ]
        )
    inputs = [*states, *elements, *constants]
    ref: AccelRef = next(x for x in inputs if isinstance(x, AccelRef))
    loop = _Loop(iteration, count, is_reverse, ref.device)
    if recorder is not None:
        return await loop.run(*inputs)
    if "graphs" in ref.device.libraries:
        on_device = [await ref.device.put(x) if isinstance(x, np.ndarray) else x for x in inputs]
        graph = None
        # An operation of the body may be in no graph.
        with suppress(NotSupportedError):
            graph = await captured(ref.device, loop.run, on_device)
        if graph is not None:
            with graph:
                return await graph(*on_device)
    return await _by_requests(iteration, count, is_reverse, states, [*elements, *constants])


@attrs.frozen(eq=False)
class _Loop:
    """A scan as a loop on a device.

    Attributes:
        iteration: The function of an iteration.
        count: The number of iterations.
        is_reverse: Whether they run from the last to the first.
        device: The device.
    """

    iteration: _Iteration
    count: int
    is_reverse: bool
    device: Any

    async def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Make memory for the state and the results, and run the loop."""
        iteration, device = self.iteration, self.device
        state = [await _COPY(x) for x in inputs[: iteration.states]]
        results = [
            await device.zeros((self.count, *shape), dtype)
            for shape, dtype in iteration.layouts[iteration.states :]
        ]
        number = await device.full((), self.count - 1 if self.is_reverse else 0, "int64")
        condition = await device.full((), 1, "int64")
        operands = [number, *state, *results, *inputs[iteration.states :]]
        with await captured(device, self._step, operands, is_joined=True) as graph:
            await while_(condition, graph, *operands, limit=self.count)
        return (*state, *results)

    async def _step(self, number: Any, *operands: Any) -> None:
        """Run one iteration, which changes the number, the state and a row of the results in place."""
        iteration = self.iteration
        ends = iteration.states, len(iteration.layouts), len(iteration.layouts) + iteration.elements
        state, results = operands[: ends[0]], operands[ends[0] : ends[1]]
        rows = [_loaded(x.ndim - 1)(x, number, shape=x.shape[1:]) for x in operands[ends[1] : ends[2]]]
        silence(*rows)
        computed = await gather(*iteration.body.calls([*state, *rows, *operands[ends[2] :]]))
        for target, value in zip(results, computed[ends[0] :], strict=True):
            if value.size:
                await _stored(value.ndim)(target, number, value, shape=value.shape)
        blocks = {x.block for x in state}
        changes = [
            (x, await _COPY(value) if value.block in blocks else value)
            for x, value in zip(state, computed[: ends[0]], strict=True)
            if x.spec != value.spec and x.size
        ]
        for x, value in changes:
            await _COPY(value, out=x)
        await (_PREVIOUS if self.is_reverse else _FOLLOWING)(number, out=number)


_COPY = Elementwise[AccelRef]("x", operation="gradients.scan.copy")
_FOLLOWING = Elementwise[AccelRef]("x + 1", operation="gradients.scan.following")
_PREVIOUS = Elementwise[AccelRef]("x - 1", operation="gradients.scan.previous")


@functools.cache
def _loaded(ndim: int) -> Elementwise[AccelRef]:
    """Return the expression of a row, by its number, which is inside of the array."""
    indices = "".join([f", i({axis})" for axis in range(ndim)])
    return Elementwise(f"rows[number{indices}]", inputs=("rows", "number"), operation="gradients.scan.row")


@functools.cache
def _stored(ndim: int) -> Scatter:
    """Return the scatter that writes a row, by its number, which is inside of the array."""
    indices = "".join([f", i({axis})" for axis in range(ndim)])
    return Scatter(
        f"rows[number{indices}]",
        "set",
        inputs=("rows", "number"),
        operation="gradients.scan.result",
        is_checked=False,
    )


async def _by_requests(
    iteration: _Iteration,
    count: int,
    is_reverse: bool,  # as above
    states: list[Any],
    others: Sequence[Any],
) -> Any:
    """Run each iteration as a request."""
    elements, constants = others[: iteration.elements], others[iteration.elements :]
    results = list[Any]()
    for number in reversed(range(count)) if is_reverse else range(count):
        rows = [_row(x, number) for x in elements]
        computed = await gather(*iteration.body.calls([*states, *rows, *constants]))
        states = list(computed[: iteration.states])
        results.append(computed[iteration.states :])
    if is_reverse:
        results.reverse()
    return *states, *[await arrays.stack(list(same)) for same in zip(*results, strict=True)]


def _slopes(iteration: _Iteration, call: Any, g: Any) -> Iterator[Rule]:
    """Compose the gradient of a scan: another scan, in the opposite direction."""
    count, is_reverse, states, elements, constants = call.args
    first_element = iteration.states
    smooth = [[k for k, x in enumerate(part) if is_operand(x)] for part in (states, elements, constants)]
    active = tuple([k for k in range(first_element, len(g)) if g[k] is not None])

    @functools.cache
    def gradients() -> Any:
        keeping: Any = call if iteration.is_kept else Call[Any](_keeping(call.function), call.args)
        outputs = len(_iteration_of(keeping.function).layouts)
        old_states = [keeping[k] for k in range(outputs - iteration.states, outputs)]
        seeds = [arrays.zeros_like(states[k]) if g[k] is None else g[k] for k in smooth[0]]
        totals = [arrays.zeros_like(constants[k]) for k in smooth[2]]
        inputs = [*seeds, *totals], [*old_states, *elements, *[g[k] for k in active]]
        silence(*inputs[0], *inputs[1])
        back, hosts = _back(keeping, active, seeds, [g[k] for k in active])
        return Call(back, (count, not is_reverse, *inputs, [*constants, *hosts]))

    numbers = [*smooth[0], *smooth[2], *smooth[1]]
    sizes = [len(smooth[0]), len(smooth[0]) + len(smooth[2])]
    for number, k in enumerate(numbers):
        part = states if number < sizes[0] else constants if number < sizes[1] else elements
        yield part[k], partial(_part, gradients, number)


def _part(several: Callable[[], Any], index: int) -> Any:
    return several()[index]


def _back(
    call: Any, active: tuple[int, ...], seeds: Sequence[Any], rows: Sequence[Any]
) -> tuple[ArrayFunction, Sequence[Any]]:
    """Return the function of the gradient's scan, derived or from the cache, and host arrays that it reads.

    Its state has the gradients of the state, and the sums of the constants' gradients. Its elements are the
    states, the elements, and the gradients of results.

    Args:
        call: The scan.
        active: The numbers of outputs that are results with a gradient.
        seeds: The gradients of the last state, for their layouts.
        rows: The gradients of all iterations' results.
    """
    memo, entry = call.function.memo, (_back, active)
    if entry in memo:
        derived_before: tuple[ArrayFunction, Sequence[Any]] = memo[entry]
        return derived_before
    iteration = _iteration_of(call.function)
    _, _, states, elements, constants = call.args
    of_states, of_elements = [leaf_of(x, x.shape) for x in states], list(map(_row_leaf, elements))
    of_constants = [x if isinstance(x, np.ndarray) else leaf_of(x, x.shape) for x in constants]
    leaves = [*of_states, *of_elements, *of_constants]
    outputs = iteration.body.calls(leaves)
    of_last, of_rows = [leaf_of(x, x.shape) for x in seeds], list(map(_row_leaf, rows))
    smooth = [k for k in range(iteration.states) if is_operand(states[k])]
    value = gather(*[outputs[k] for k in (*smooth, *active)])
    value.silence()
    inputs = [leaf for leaf in leaves if is_operand(leaf)]
    calls = list[Any]()
    slopes = backward(value, inputs, [*of_last, *of_rows], calls)
    by_leaf = {id(leaf): slope for leaf, slope in zip(inputs, slopes, strict=True)}
    sums = [leaf_of(x, x.shape) for x in of_constants if is_operand(x)]
    added = [
        total + by_leaf[id(leaf)]
        for leaf, total in zip([x for x in of_constants if is_operand(x)], sums, strict=True)
    ]
    of_back = [*[by_leaf[id(of_states[k])] for k in smooth], *added]
    of_back += [by_leaf[id(leaf)] for leaf in of_elements if is_operand(leaf)]
    silence(*[x for x in (*calls, *slopes, *added) if isinstance(x, Call)])
    body, hosts = traced(of_back, [*of_last, *sums, *of_states, *of_elements, *of_rows, *of_constants])
    if any(not isinstance(x, np.ndarray) for x in hosts):
        raise NotSupportedError(
            "gradients.scan: the gradient of an iteration reads arrays that it did not get"
        )
    derived = _Iteration(
        body,
        [_layout_of(x) for x in of_back],
        len(smooth) + len(added),
        len(of_states) + len(of_elements) + len(of_rows),
        len(constants) + len(hosts),
    )
    is_fixed = call.function.is_fixed and not iteration.body.reads_hosts
    back = derived.function(is_fixed=is_fixed), hosts
    if is_fixed:
        memo[entry] = back
    return back


def _batched(batch: Batch, step: Any) -> Any:
    """Compose a scan for a batch: its states and results are batches, and so are other inputs that differ."""
    count, is_reverse, states, elements, constants = step.args
    differ = tuple([batch.has(x) for x in (*elements, *constants)])
    wide_states = batch.spread(list(states))
    wide_elements = [
        arrays.moveaxis(batch.value(x), 0, 1) if batch.has(x) else batch.value(x) for x in elements
    ]
    wide_constants = [batch.value(x) for x in constants]
    memo, entry = step.function.memo, (_batched, batch.size, differ)
    if entry not in memo:
        inputs = *wide_states, *[_row_leaf(x) for x in wide_elements], *wide_constants
        examples = *states, *[_row_leaf(x) for x in elements], *constants
        memo[entry] = _batched_function(batch, step.function, examples, inputs, differ)
    function, hosts = memo[entry]
    call: Any = Call(function, (count, is_reverse, wide_states, wide_elements, [*wide_constants, *hosts]))
    results = range(len(states), len(_iteration_of(step.function).layouts))
    return [*[call[k] for k in range(len(states))], *[arrays.moveaxis(call[k], 0, 1) for k in results]]


def _batched_function(
    batch: Batch,
    function: ArrayFunction,
    examples: Sequence[Any],
    inputs: Sequence[Any],
    differ: Sequence[bool],
) -> tuple[ArrayFunction, Sequence[Any]]:
    """Return the function of scans of a batch, and host arrays that it reads.

    Args:
        batch: The batch around the scan.
        function: The function of the examples' scans.
        examples: Arrays with the layouts of an iteration's inputs.
        inputs: The same for the batch.
        differ: Whether examples have different values, for each input after the states.
    """
    iteration = _iteration_of(function)
    leaves = [x if isinstance(x, np.ndarray) else leaf_of(x, x.shape) for x in examples]
    wide = [x if isinstance(x, np.ndarray) else leaf_of(x, x.shape) for x in inputs]
    batch_of_iterations = Batch(batch.size, wide[0])
    for number, (leaf, of_batch) in enumerate(zip(leaves, wide, strict=True)):
        if number < iteration.states or differ[number - iteration.states]:
            batch_of_iterations.add(leaf, of_batch)
        else:
            leaves[number] = of_batch
    outputs = iteration.body.calls(leaves)
    silence(*outputs)
    for output in outputs:
        batch_of_iterations.run(output)
    batched = batch_of_iterations.spread(outputs)
    silence(*batched)
    body, hosts = traced(batched, wide)
    if any(not isinstance(x, np.ndarray) for x in hosts):
        raise NotSupportedError("gradients.scan: a batch of an iteration reads other arrays")
    derived = attrs.evolve(
        iteration,
        body=body,
        layouts=[_layout_of(x) for x in batched],
        constants=iteration.constants + len(hosts),
    )
    return derived.function(is_fixed=function.is_fixed), hosts


BATCH_RULES["gradients.scan"] = _batched
