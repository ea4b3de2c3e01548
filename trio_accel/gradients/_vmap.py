"""Functions of one example as functions of a batch.

`vmap` calls the function once, with calls that select the first example. The calls between these and the
results are a record of the function, which is an argument of the call that `vmap` returns. That call is
expanded into calls of the batch (`_batched`) when it is recorded, and later calls with the same record reuse
the plan of the whole. A gradient through the call expands it as well.

Gradients in the function are expanded in the same way (`IS_BATCHED`), because to derive them again for each
call would take longer than the request.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import arrays as _arrays
from ..backends.base import ArraySpec, NotSupportedError
from ..devices import IS_DERIVED, AccelRef, ArrayFunction, Call, Chain, gather, what_to_do
from . import _batch_layers, _batch_rules  # noqa: F401  # they add rules  # pyright: ignore[reportUnusedImport]
from ._backward import put_like
from ._batched import Batch, layouts_of
from ._tape import IS_BATCHED, mapped, unwrapped, visit

__all__ = ["vmap"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

Axes: TypeAlias = "int | Mapping[str, Axes] | Sequence[Axes] | None"
"""The batch axis of all arrays of an argument or result, or axes nested like these."""


def vmap(f: Callable[..., Any], in_axes: Axes = 0, out_axes: Axes = 0) -> Callable[..., Any]:
    """Make a function of a batch from a function of one example, as `jax.vmap`.

    `f` is called once, with calls in place of the arrays. Each call in `f` becomes a call for
    all examples. So the batch is one request, with about as many launches as one example.

    Args:
        f: Composes calls, awaits none, and returns a call, or a dict, list or tuple of calls.
        in_axes: The batch axis of each argument: an integer for all arguments, or a list or tuple with an
            entry for each. An entry is an integer for all arrays of the argument, or None if all examples
            share the argument, or a dict, list or tuple of entries, nested like the argument. Named arguments
            have the axis 0.
        out_axes: The batch axis of each result, likewise. Results that all examples share are repeated; with
            None they are returned as they are.

    Returns:
        A function with the arguments of `f`: arrays on a device, calls, NumPy arrays if others are on a
        device, and dicts, lists and tuples of these. It returns a call, or calls nested like the results of
        `f`: await several by ``await ta.gather(...)``. You may call it in functions that get gradients, in a
        `trio_accel.step`, and in another `vmap`; and `f` may contain gradients.

    Raises:
        ValueError: No argument has a batch axis, the lengths of the axes differ, an axis is out of range, or
            `in_axes` or `out_axes` is not nested like the arguments or results.
        TypeError: An axis is not an integer, an argument with a batch axis is not an array, no array is on a
            device, or `f` does not return calls.
        NotSupportedError: A call in `f` draws random numbers, writes to an array, or cannot take a further
            axis. The error names the function, and you get it when you await the result.
    """
    for label, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        _check_axes(label, axes)

    def run(*args: Any, **named: Any) -> Any:
        args = tuple(map(unwrapped, args))
        named = {key: unwrapped(argument) for key, argument in named.items()}
        operands, axes = list[Any](), list[Any]()
        _visit_axes("in_axes", in_axes, args, operands, axes)
        _visit_axes("in_axes", 0, named, operands, axes)
        size = _size(operands, axes)
        operands = _on_device(operands, axes)
        examples = [
            operand if axis is None else _example(operand, axis)
            for operand, axis in zip(operands, axes, strict=True)
        ]
        remaining = iter(examples)
        args, named = mapped((args, named), lambda _: next(remaining))
        return _batched(_called(f, args, named), examples, operands, axes, size, out_axes)

    return run


def _check_axes(label: str, axes: Any) -> None:
    """Require integers and None, nested in dicts, lists and tuples."""
    nested: Any = axes.values() if isinstance(axes, Mapping) else axes
    if isinstance(nested, (list, tuple)) or isinstance(axes, Mapping):
        for entry in nested:
            _check_axes(label, entry)
    elif axes is not None and (isinstance(axes, (bool, np.bool_)) or not hasattr(axes, "__index__")):
        raise TypeError(f"vmap: {label} must be integers or None, got {axes!r}")


def _visit_axes(label: str, prefix: Any, nested: Any, leaves: list[Any], axes: list[Any]) -> None:
    """Append the arrays of nested arrays, and the axis of each by its prefix.

    Raises:
        ValueError: The prefix is not nested like the arrays.
    """
    is_mapping = isinstance(prefix, Mapping)
    if not is_mapping and not isinstance(prefix, (list, tuple)):
        count = len(leaves)
        visit(nested, leaves.append)
        axes += [None if prefix is None else operator.index(prefix)] * (len(leaves) - count)
        return
    fits = isinstance(nested, Mapping) if is_mapping else isinstance(nested, (list, tuple))
    if not fits or (prefix.keys() != nested.keys() if is_mapping else len(prefix) != len(nested)):
        raise ValueError(f"vmap: {label} must be nested like the arguments or results, got {prefix!r}")
    for key in nested if is_mapping else range(len(nested)):
        _visit_axes(label, prefix[key], nested[key], leaves, axes)


def _size(operands: Sequence[Any], axes: Sequence[Any]) -> int:
    """Return the number of examples."""
    sizes = dict[int, None]()
    for operand, axis in zip(operands, axes, strict=True):
        if axis is None:
            continue
        if not isinstance(operand, (AccelRef, Call, np.ndarray)):
            raise TypeError(
                f"vmap: an argument with a batch axis must be an array, got {type(operand).__name__}"
                f"{what_to_do(operand)}; or pass None in in_axes"
            )
        shape = tuple(operand.shape)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"vmap: in_axes: axis {axis} is out of range for shape {shape}")
        sizes[int(shape[axis])] = None
    if len(sizes) != 1:
        lengths = "and no argument has one" if not sizes else f"got the lengths {', '.join(map(str, sizes))}"
        raise ValueError(f"vmap: the batch axes must have the same length, {lengths}")
    return next(iter(sizes))


def _on_device(operands: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
    """Return operands, and put host arrays with a batch axis on the device of the others."""
    like = next((operand for operand in operands if isinstance(operand, (AccelRef, Call))), None)
    if like is None:
        raise TypeError("vmap: no argument is on a device; copy one there first: await device.put(array)")
    return [
        operand if axis is None else put_like(operand, like)
        for operand, axis in zip(operands, axes, strict=True)
    ]


def _example(operand: Any, axis: int) -> Any:
    """Return a call with the layout of an example."""
    shape = list(operand.shape)
    axis %= len(shape)
    if not shape[axis]:
        operand = arrays.pad(operand, [(0, int(dim == axis)) for dim in range(len(shape))])
    first = operand[(*(slice(None),) * axis, 0)]
    # Each argument has a call of its own, which the function may not read.
    example = arrays.reshape(first, (*shape[:axis], *shape[axis + 1 :]))
    example.silence()
    return example


def _called(f: Callable[..., Any], args: Any, named: Any) -> Any:
    tokens = IS_DERIVED.set(True), IS_BATCHED.set(True)
    try:
        value = f(*args, **named)
    finally:
        IS_DERIVED.reset(tokens[0])
        IS_BATCHED.reset(tokens[1])
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("vmap: the function must not be async, because it awaits nothing")
    return value


def _batched(
    value: Any,
    examples: Sequence[Any],
    operands: Sequence[Any],
    axes: Sequence[Any],
    size: int,
    out_axes: Any,
) -> Any:
    """Return the results of all examples, nested like the result of the function."""
    results, result_axes = list[Any](), list[Any]()
    visit(value, lambda leaf: leaf.silence() if isinstance(leaf, Call) else None)
    _visit_axes("out_axes", out_axes, value, results, result_axes)
    for result in results:
        _check_result(result)
    if not results:
        return value
    leaves = [example for example, axis in zip(examples, axes, strict=True) if axis is not None]
    arrays_of_leaves = [operand for operand, axis in zip(operands, axes, strict=True) if axis is not None]
    leaf_axes = [axis for axis in axes if axis is not None]
    is_nested = not isinstance(value, (AccelRef, Call))
    gathered = gather(*[arrays.reshape(x, x.shape) if isinstance(x, AccelRef) else x for x in results])
    gathered.silence()
    call: Any = Call(_VMAP, (gathered, size, leaves, arrays_of_leaves, leaf_axes, result_axes, is_nested))
    if not is_nested:
        return call
    parts = [call[k] for k in range(len(results))]
    for part in parts:
        # A caller may only need some of them.
        part.silence()
    remaining = iter(parts)
    return mapped(value, lambda _: next(remaining))


def _check_result(result: Any) -> None:
    if not isinstance(result, (AccelRef, Call)):
        raise TypeError(f"vmap: the function must return calls, got {type(result).__name__}")
    if isinstance(result, Call) and (reason := result.function.result_on_host):
        raise TypeError(f"vmap: the function must return arrays of the device, and {reason}")


def _expanded(
    gathered: Any,
    size: int,
    leaves: Sequence[Any],
    operands: Sequence[Any],
    leaf_axes: Sequence[int],
    result_axes: Sequence[Any],
    is_nested: bool,
) -> Any:
    """Compose the calls of the batch."""
    batch = Batch(size, operands[0])
    for leaf, operand, axis in zip(leaves, operands, leaf_axes, strict=True):
        moved = arrays.moveaxis(operand, axis, 0) if axis else operand
        batch.add(leaf, arrays.reshape(moved, moved.shape))
    steps: Any = Chain(gathered, is_spent=False).steps
    for step in steps:
        # The calls of the example are not awaited.
        step.silence()
        _refuse_random(step.function.name)
    results = [
        _placed_result(batch, result, axis) for result, axis in zip(gathered.args, result_axes, strict=True)
    ]
    for result in results:
        result.silence()
    return gather(*results) if is_nested else results[0]


def _placed_result(batch: Batch, result: Any, axis: int | None) -> Any:
    layouts = layouts_of(result)
    if not isinstance(layouts, ArraySpec):
        # The results of one call, such as the factors of a matrix.
        return gather(*[_placed_result(batch, result[k], axis) for k in range(len(layouts))])
    if batch.size or axis is None:
        batch.run(result)
    if axis is None:
        if batch.has(result):
            raise ValueError("vmap: out_axes must be an integer for a result that differs between examples")
        value = batch.value(result)
    else:
        value = batch.spread(result) if batch.size else _no_examples(batch, layouts)
        ndim = len(value.shape)
        if not -ndim <= axis < ndim:
            raise ValueError(f"vmap: out_axes: axis {axis} is out of range for {ndim} axes")
        value = arrays.moveaxis(value, 0, axis) if axis % ndim else value
    # A view of an array is an array, and not a call.
    return value if isinstance(value, Call) else arrays.reshape(value, value.shape)


def _no_examples(batch: Batch, layout: ArraySpec) -> Any:
    """Return the result of no examples, because functions may need an element along each axis."""
    zero = arrays.sum(arrays.zeros_like(batch.like, dtype=layout.dtype)).cast(layout.dtype)
    return arrays.broadcast_to(zero, (0, *layout.shape)).copy()


def _refuse_random(name: str) -> None:
    """Refuse random numbers, because each example would get the same."""
    if name.startswith("random.") or name == "nn.dropout":
        raise NotSupportedError(
            f"vmap: {name} would draw the same numbers for all examples; await numbers with an axis for the "
            "batch first, and pass them as an argument",
            operation=name,
        )


def _refuse_alone(*_: object) -> Any:
    raise NotSupportedError("vmap: its calls are parts of a chain; await the call")


_VMAP = ArrayFunction("vmap", _refuse_alone, "awaitable", expand=_expanded)
