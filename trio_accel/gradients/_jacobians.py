"""Derivatives of more than one number: Jacobians, Hessians and products with them.

All are made of vector-Jacobian products. A product with the Jacobian, `jvp`, is the derivative of the
vector-Jacobian product by its vector, because that product is linear in it.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ..actors import to_await
from ..backends.base import NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, Chain, gather
from ._backward import backward
from ._functions import grad
from ._tape import Tape, mapped, positions_of, visit

__all__ = ["hessian", "hvp", "jacobian", "jvp"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
# A request of a Jacobian has this many calls at most, as far as rows can be split.
_MAX_CALLS = 1000
# Calls of a gradient for each call of its function, about.
_CALLS_PER_CALL = 4


def jacobian(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Awaitable[Any]]:
    """Make a function of the Jacobian of a function, as `jax.jacobian`.

    Each element of the result takes one vector-Jacobian product. Several products are one request.

    Args:
        f: See `value_and_grad`; but it returns a call of any shape, or a dict, list or tuple of calls.
        argnums: See `value_and_grad`.

    Returns:
        A function with the arguments of `f`. Await it for the Jacobian, nested like the result, and then like
        the arguments. Each is an array with the axes of the result, followed by the axes of the argument.
        With calls instead of arrays, and in a `trio_accel.step`, it returns calls.

    Raises:
        NotSupportedError: Arguments or results are complex, or `f` calls an operation without a gradient.
        TypeError: `f` does not return calls, or an argument is not floating.
    """
    positions = positions_of(argnums)

    def run(*args: Any, **named: Any) -> Any:
        tape = Tape(f, "jacobian", positions, args, named, has_several=True)
        if not tape.is_nested:
            return _jacobian(f, positions, args, named)
        results = _results(tape)
        value = flat(results)
        seeds = [arrays.zeros_like(value) + row for row in np.eye(value.size, dtype=value.dtype.dtype)]
        return _nested(tape, results, rows_of(value, tape.leaves, seeds))

    return run


def hessian(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Awaitable[Any]]:
    """Make a function of the Hessian of a function, as `jax.hessian`: the Jacobian of its gradient.

    Args:
        f: See `value_and_grad`.
        argnums: See `value_and_grad`.

    Returns:
        See `jacobian`: the Hessian is nested like the arguments, and then like the arguments again.
    """
    return jacobian(grad(f, argnums), argnums)


@to_await("ta.gradients.jacobian(f)(...)")
async def _jacobian(f: Callable[..., Any], positions: Any, args: Any, named: Any) -> Any:
    groups, start, size, results = list[Any](), 0, 1, list[Any]()
    tape = Tape(f, "jacobian", positions, args, named, has_several=True)
    while start < size:
        tape = Tape(f, "jacobian", positions, args, named, has_several=True)
        try:
            results = _results(tape)
            value = flat(results)
            size, calls = value.size, len(Chain(value, is_spent=False).steps)
            count = max(1, min(size - start, _MAX_CALLS // (_CALLS_PER_CALL * calls + 1)))
            # On the device, because requests with other host arrays would be derived again.
            seeds = await tape.refs[0].device.put(np.eye(count, size, start, value.dtype.dtype))
            groups.append(await Call(_ROWS, (value, tape.leaves, seeds, count)))
        finally:
            tape.close()
        start += count
    parts: list[Any] = list(groups[0])
    if len(groups) > 1:
        parts = [await arrays.concat(list(group)) for group in zip(*groups, strict=True)]
    return _nested(tape, results, parts)


def _results(tape: Tape) -> list[Any]:
    """Call the function of a tape, and return the calls of its results."""
    value = tape.run()
    results = list(value.args) if tape.structure is not None else [value]
    value.silence()
    if any(x.dtype.kind != "float" for x in (*tape.leaves, *results)):
        raise NotSupportedError(
            f"{tape.name}: arguments and results must be real, floating numbers; split complex ones by "
            "ta.arrays.real and imag"
        )
    return results


def flat(results: Sequence[Any]) -> Any:
    """Return all elements of results in one vector."""
    return arrays.concat(list(results), axis=None) if len(results) > 1 else arrays.reshape(results[0], (-1,))


def rows_of(value: Any, leaves: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """Return for each leaf the stacked gradients of a vector's products with some seeds."""
    calls = list[Any]()
    try:
        rows = [backward(value, leaves, seed, calls) for seed in seeds]
        return [arrays.stack(list(part)) for part in zip(*rows, strict=True)]
    finally:
        for call in calls:
            call.silence()


def _group(value: Any, leaves: Sequence[Any], seeds: Any, count: int) -> Any:
    return gather(*rows_of(value, leaves, [seeds[k] * 1 for k in range(count)]))


def _nested(tape: Tape, results: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Return Jacobians from their rows, nested like the results, and then like the arguments."""
    starts = np.cumsum([0, *[result.size for result in results]])
    remaining = iter(zip(results, starts, starts[1:], strict=False))

    def of_result(_: Any) -> Any:
        result, start, stop = next(remaining)
        shapes = [(*result.shape, *part.shape[1:]) for part in parts]
        return tape.nested(
            iter(
                [
                    part[int(start) : int(stop)].reshape(shape)
                    for part, shape in zip(parts, shapes, strict=True)
                ]
            )
        )

    return of_result(None) if tape.structure is None else mapped(tape.structure, of_result)


@to_await("ta.gradients.jvp(f, ...)")
async def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[AccelRef, AccelRef]:
    """Compute a function and its derivative along a direction, as `jax.jvp`.

    Args:
        f: Composes calls, awaits none, and returns one, with or without axes.
        primals: Its arguments: floating or complex arrays on a device, or dicts and lists of these.
        tangents: The direction: an array for each array of the arguments, nested like these.

    Returns:
        The value, and its derivative, which is the product of the Jacobian and the direction. Both are one
        request.

    Raises:
        NotSupportedError: `f` calls an operation without a gradient or a second one.
        ValueError: A tangent has another shape than its argument.
    """
    _, (value, derivative) = await _along("jvp", _JVP, f, primals, tangents)
    return value, derivative


@to_await("ta.gradients.hvp(f, ...)")
async def hvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Compute the product of a Hessian and a vector.

    Args:
        f: A function of one number; see `value_and_grad`.
        primals: Its arguments: floating arrays on a device, or dicts and lists of these.
        tangents: The vector: an array for each array of the arguments, nested like these.

    Returns:
        The product, as a tuple nested like the arguments. It is one request, of about twice the calls of a
        gradient.

    Raises:
        NotSupportedError: `f` calls an operation without a gradient or a second one.
        ValueError: The value has axes, or a tangent has another shape than its argument.
    """
    tape, parts = await _along("hvp", _HVP, f, primals, tangents)
    return tape.nested(iter(parts))


async def _along(
    name: str, function: ArrayFunction, f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Tape, Any]:
    """Call `f` on a tape, and await what a function makes from its value, leaves and directions."""
    if not isinstance(primals, (list, tuple)):
        raise TypeError(f"{name}: primals must be a list or tuple of arguments, got {type(primals).__name__}")
    tape = Tape(f, name, tuple(range(len(primals))), tuple(primals), {})
    try:
        value = tape.run()
        return tape, await Call(function, (value, tape.leaves, _directions(tape, tangents)))
    finally:
        tape.close()


def _directions(tape: Tape, tangents: Sequence[Any]) -> list[Any]:
    """Return an array for each argument of a tape, after a check of the shapes."""
    directions = list[Any]()
    visit(tangents, directions.append)
    if len(directions) != len(tape.refs):
        raise ValueError(
            f"{tape.name}: tangents must have an array for each of {len(tape.refs)} arguments, got "
            f"{len(directions)}"
        )
    for ref, direction in zip(tape.refs, directions, strict=True):
        if tuple(np.shape(direction)) != tuple(ref.shape):
            raise ValueError(
                f"{tape.name}: a tangent must have the shape {ref.shape} of its argument, got "
                f"{np.shape(direction)}"
            )
    return directions


def _product(slopes: Sequence[Any], directions: Sequence[Any]) -> Any:
    """Return the sum of the products of gradients and a direction, a real number."""
    terms = list[Any]()
    for slope, direction in zip(slopes, directions, strict=True):
        if slope.dtype.kind == "complex":
            terms.append(arrays.sum(arrays.real(arrays.conj(slope) * direction)))
        else:
            terms.append(arrays.sum(slope * direction))
    return reduce(operator.add, terms)


def _ones_like(value: Any, calls: list[Any]) -> Any:
    """Return the seed of a real number; no gradient may read it."""
    seed = arrays.ones_like(value)
    calls.append(seed)
    return seed


def _push(value: Any, leaves: Sequence[Any], directions: Sequence[Any]) -> Any:
    """Derive the derivative along a direction, by the vector of the vector-Jacobian product."""
    calls = list[Any]()
    try:
        vector = arrays.reshape(arrays.zeros_like(value), value.shape)
        calls.append(vector)
        product = _product(backward(value, leaves, vector, calls), directions)
        calls.append(product)
        (derivative,) = backward(product, [vector], _ones_like(product, calls), calls)
        return gather(value, derivative)
    finally:
        for call in calls:
            call.silence()


def _curve(value: Any, leaves: Sequence[Any], directions: Sequence[Any]) -> Any:
    """Derive the product of a Hessian and a direction."""
    calls = list[Any]()
    try:
        if value.shape:
            raise ValueError(f"hvp: the value must be a scalar, got shape {value.shape}")
        if any(x.dtype.kind != "float" for x in (value, *leaves)):
            raise NotSupportedError("hvp: arguments and the value must be real, floating numbers")
        product = _product(backward(value, leaves, _ones_like(value, calls), calls), directions)
        calls.append(product)
        return gather(*backward(product, leaves, _ones_like(product, calls), calls))
    finally:
        for call in calls:
            call.silence()


def _refuse_alone(*_: object) -> Any:
    raise NotSupportedError("jacobian: its rows are parts of a chain; await the call")


_ROWS = ArrayFunction("jacobian", _refuse_alone, "awaitable", expand=_group)
_JVP = ArrayFunction("jvp", _refuse_alone, "awaitable", expand=_push)
_HVP = ArrayFunction("hvp", _refuse_alone, "awaitable", expand=_curve)
