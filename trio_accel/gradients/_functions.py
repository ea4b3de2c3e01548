"""Gradients of functions that compose operations: the calls of a function are its tape.

The gradient of a real number by a complex z = x + iy is, for the caller, its derivative by x, minus i times
its derivative by y, as in JAX. Rules compute the conjugate, because sums and products of operands then need
fewer conjugates. `turned` changes the convention at the border: of results, of the seed of a vector-Jacobian
product, and of the gradients that enter and leave a rule of the program.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnusedImport=false

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from .. import arrays as _arrays
from ..actors import to_await
from ..backends.base import NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, Chain, called, gather
from ..devices.operations._chain import Slices, at_once
from . import (  # noqa: F401  # they add rules
    _bodies,
    _factor_rules,
    _field_rules,
    _image_rules,
    _matrix_rules,
    _nn_rules,
    _order_rules,
    _reductions,
    _rows,
    _similar_rules,
    _slope_rules,
    _transform_rules,
    _triangular_rules,
    _update_rules,
    _words,
)
from ._backward import as_operand, backward_in_slices, itself, part_of, put_like
from ._elementwise import Rule
from ._rules import filled
from ._tape import IS_BATCHED, Gradients, Tape, check_differentiable, positions_of, turned

__all__ = [
    "custom_gradient",
    "flat_grad_and_value",
    "grad",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

Nested: TypeAlias = "AccelRef | Mapping[str, Nested] | Sequence[Nested]"
"""An array, or a dict or list of these."""


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False, scale: float = 1.0
) -> Callable[..., Awaitable[tuple[Any, Gradients]]]:
    """Make a function of the value and the gradients of a function, as `jax.value_and_grad`.

    `f` is called once. It composes calls, awaits none, and returns a 0-d call. Value and gradients are
    computed as one request. Arguments that the value does not depend on get zeros.

    Args:
        f: Called with the arguments. The arguments selected by `argnums` are floating or complex arrays on a
            device, or dicts and lists of these. Within `f` they are calls, and so are views of them.
        argnums: Positions of the arguments that get gradients.
        has_aux: Whether `f` returns a pair: the value, and other results without gradients, which are an
            array, or a dict, list or tuple of arrays. Then the value is a pair of both.
        scale: Factor of the gradients; the value is not scaled.

    Returns:
        A function with the arguments of `f`. Await it for the value, a 0-d array, and the gradients, nested
        like the argument; for several `argnums` a tuple of these. Each is an array of its own, with the dtype
        of its argument. The gradient by a complex number x + iy is the derivative by x, minus i times the
        derivative by y, as in JAX: descend along its conjugate. With calls instead of arrays, and in a
        `trio_accel.step`, it returns calls, so `f` may contain gradients itself.

    Raises:
        NotSupportedError: `f` calls an operation without a gradient: nothing was launched.
        ValueError: The value has axes, or `argnums` selects an argument that does not exist.
        TypeError: `f` does not return a call, or an argument is neither floating nor complex.
    """
    return _derived(f, argnums, scale, _value_and_grad, has_aux=has_aux)


def _derived(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    scale: float,
    ask: Callable[[Tape, float], Awaitable[Any]],
    *,
    has_aux: bool,
) -> Callable[..., Any]:
    """Make a function of the value and the gradients as calls, or, with arrays, of the result of `ask`."""
    positions = positions_of(argnums)

    def run(*args: Any, **named: Any) -> Any:
        tape = Tape(f, "value_and_grad", positions, args, named, has_aux=has_aux)
        if tape.is_nested:
            for ref in tape.refs:
                check_differentiable("value_and_grad", ref)
            try:
                value = tape.run()
                value.silence()
                if IS_BATCHED.get():
                    call: Any = Call(_NESTED, (value, tape.leaves, scale))
                    gradients = tape.nested(iter([call[k] for k in range(len(tape.leaves))]))
                else:
                    gradients = tape.nested(map(turned, tape.parts(_seed(value, scale))))
                return (value, tape.others) if has_aux else value, gradients
            except BaseException:
                tape.close()
                raise
        return ask(tape, scale)

    return run


def flat_grad_and_value(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, scale: float = 1.0
) -> Callable[..., Call[AccelRef]]:
    """Make a function of the gradients and the value of a function, in one flat array.

    The function returns a call, so the use of the gradients can be part of the same request, and one
    collective sums all of them. The gradients are derived once for each structure of `f`'s calls, unless `f`
    has a `custom_gradient` among them, or a host array that is no operand.

    Args:
        f: See `value_and_grad`.
        argnums: See `value_and_grad`.
        scale: See `value_and_grad`.

    Returns:
        A function with the arguments of `f`. Its call makes an array with one axis: the elements of each
        gradient, in the order of the arguments, and then the value. Raises as `value_and_grad` does.
    """
    positions = positions_of(argnums)

    def run(*args: Any, **named: Any) -> Call[AccelRef]:
        tape = Tape(f, "flat_grad_and_value", positions, args, named)
        try:
            return Call(_FLAT, (tape.run(), tape.leaves, scale, True))
        except BaseException:
            tape.close()
            raise

    return run


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False, scale: float = 1.0
) -> Callable[..., Awaitable[Gradients]]:
    """Make a function of the gradients only, as `jax.grad`; see `value_and_grad`.

    With `has_aux`, the function returns a pair: the gradients, and the other results of `f`.
    """
    both = _derived(f, argnums, scale, _grad, has_aux=has_aux)

    def run(*args: Any, **named: Any) -> Any:
        result: Any = both(*args, **named)
        return _gradients_of(result, has_aux=has_aux) if isinstance(result, tuple) else result

    return run


def _gradients_of(result: tuple[Any, Any], *, has_aux: bool) -> Any:
    """Return what `grad` returns, from the result of `value_and_grad`."""
    value, gradients = result
    return (gradients, value[1]) if has_aux else gradients


@to_await("ta.vjp(f, ...)")
async def vjp(f: Callable[..., Any], *args: Nested, has_aux: bool = False) -> Any:
    """Compute a function, and make the function of its vector-Jacobian products, as `jax.vjp`.

    Args:
        f: Composes calls, awaits none, and returns one, with or without axes; or a dict, list or tuple of
            calls.
        *args: Its arguments: floating or complex arrays on a device, or dicts and lists of these.
        has_aux: Whether `f` returns a pair: the value, and other results without gradients.

    Returns:
        The value, and an async function of the value's gradient, which is an array of its shape, or nested
        like the value; with `has_aux` also the other results. That function returns a tuple of the arguments'
        gradients. It may be called several times. Nothing is cached between, because each call runs `f`
        again, in one request with the gradients.

    Raises:
        NotSupportedError: `f` calls an operation without a gradient, or one that does not repeat its results.
        TypeError: `f` does not return a call, or an argument is not floating.
    """
    positions = tuple(range(len(args)))
    tape = Tape(f, "vjp", positions, args, {}, has_aux=has_aux, has_several=True)
    value, aux = await tape.compute_value(_refuse_others)

    @to_await("pull(g)")
    async def pull(g: Any) -> Any:
        seeds = _seeds_like(value, g)
        rerun = Tape(f, "vjp", positions, args, {}, has_aux=has_aux, has_several=True)
        return (await _joined(rerun, seeds, has_value=False))[1]

    return (value, pull, aux) if has_aux else (value, pull)


def _seeds_like(value: Any, g: Any) -> Any:
    """Return the gradients of a nested value as a list, or that of an array, after a check of the shapes.

    Raises:
        ValueError: The gradient is not nested like the value, or has another shape.
    """
    if isinstance(value, AccelRef):
        if np.shape(g) != value.shape:
            raise ValueError(f"vjp: the gradient must have shape {value.shape}, got {np.shape(g)}")
        return g
    several: Any = g
    is_mapping = isinstance(value, Mapping)
    if isinstance(g, Mapping) is not is_mapping or not isinstance(g, (Mapping, list, tuple)):
        raise ValueError(f"vjp: the gradient must be a {type(value).__name__} like the value")
    keys = list(value) if is_mapping else range(len(value))
    if len(several) != len(value) or (is_mapping and several.keys() != value.keys()):
        raise ValueError(f"vjp: the gradient must have the parts of the value: {len(value)} of them")
    seeds = list[Any]()
    for key in keys:
        seed = _seeds_like(value[key], several[key])
        seeds += seed if isinstance(seed, list) and not isinstance(value[key], AccelRef) else [seed]
    return seeds


def custom_gradient(f: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Call[AccelRef]]:
    """Give a function a gradient of your own, as `jax.custom_vjp`.

    Args:
        f: A function of arrays that returns one call, or a `jit.Kernel`.
        rule: ``rule(g, result, *args, **named)`` composes the gradients of `f`'s arguments from `g`, the
            gradient of its result. It returns a call for each argument, or None for an argument without a
            gradient; for a single argument just the call. It is called once for each call of `f` that
            gradients reach. If `f` has several results, `g` is a tuple of their gradients.

    Returns:
        A function with the arguments of `f`.

    Raises:
        TypeError: `f` or `rule` is not a function.
    """
    for name, callback in (("f", f), ("rule", rule)):
        if not callable(cast("object", callback)):
            raise TypeError(f"custom_gradient: {name} must be a function, got {type(callback).__name__}")
    operation = getattr(f, "operation", None) or getattr(f, "__qualname__", type(f).__name__)
    # The rule may make other calls each time.
    function = ArrayFunction(
        f"custom_gradient({operation})",
        _only,
        "value",
        is_fixed=False,
        rule=lambda custom_call, g: _by_custom_rule(custom_call, g, rule),
    )

    def call(*args: Any, **named: Any) -> Call[AccelRef]:
        # The arguments are operands, so that the tape finds them.
        return Call(function, (f(*args, **named), list(args), list(named.items())))

    return call


def stop_gradient(x: Any) -> Call[AccelRef]:
    """Return an array that gradients take for a constant, as `jax.lax.stop_gradient` does."""
    return _stopped(x)


def _only(result: Any, args: object, named: object) -> Any:
    """Return the results of a function with a gradient of its own, or the only one."""
    is_one = isinstance(result, (tuple, list)) and len(cast("Sequence[Any]", result)) == 1
    return result[0] if is_one else result


_stopped = called(ArrayFunction("stop_gradient", partial(_only, args=None, named=None), "value"))


def _check_value(name: str, value: Any, *kinds: str) -> None:
    if value.dtype.kind not in kinds:
        raise TypeError(
            f"{name}: the function must return {' or '.join(kinds)} numbers, got {value.dtype}, which has no "
            "gradient"
        )


@to_await("ta.grad(f)(...)")
async def _grad(tape: Tape, scale: float) -> Gradients:
    return _gradients_of(await _joined(tape, scale, has_value=True), has_aux=tape.has_aux)


@to_await("ta.value_and_grad(f)(...)")
async def _value_and_grad(tape: Tape, scale: float) -> tuple[Any, Gradients]:
    return await _joined(tape, scale, has_value=True)


def _seed(value: Any, scale: float) -> Any:
    _check_value("value_and_grad", value, "float")
    if value.shape:
        raise ValueError(
            f"value_and_grad: the value must be a scalar, got shape {value.shape}; add up its elements by "
            "ta.arrays.sum or mean"
        )
    return arrays.full_like(value, scale)


async def _joined(tape: Tape, seed: Any, *, has_value: bool) -> tuple[Any, Gradients]:
    """Compute all gradients, and the value, as one request."""
    try:
        value = tape.run()
        aux = tape.calls_of_others()
        results: Any = await Call(_JOINED, (value, tape.leaves, seed, has_value, tape.name, aux))
    finally:
        tape.close()
    gradients = tape.nested(iter(results))
    if not has_value:
        return None, gradients
    count = len(tape.leaves)
    loss = results[count]
    return (loss, tape.with_results(results[count + 1 :])) if tape.has_aux else loss, gradients


def _separate_gradients(
    value: Any, leaves: Sequence[Any], seed: Any, has_value: bool, name: str, aux_calls: Sequence[Any]
) -> Slices[Any]:
    """Derive gradients, each an array of its own; the value and the function's other results follow."""
    parts, calls = yield from _parts(name, value, leaves, seed, has_value)
    owned, new_arrays = list[Any](), set[Any]()
    try:
        for part in [*parts, value] if has_value else parts:
            # A gradient may be an operand, a view of one, or the gradient of another operand, and a program
            # may change each of its arrays.
            new = _new_array(part)
            owned.append(part.copy() if new is None or new in new_arrays else part)
            new_arrays.add(new)
        return gather(*owned, *aux_calls)
    finally:
        for call in calls:
            call.silence()


def _new_array(part: Any) -> tuple[int, int] | None:
    """Return the call and the number of the result that makes a new array; None for other arrays."""
    if type(part) is not Call:
        return None
    several = part_of(part)
    call, number = (part, 0) if several is None else (several, int(part.args[1]))
    return (id(call), number) if call.function.how == "message" else None


def _nested_gradients(value: Any, leaves: Sequence[Any], scale: float) -> Slices[Any]:
    parts, calls = yield from _parts("value_and_grad", value, leaves, scale, True)
    for call in calls:
        call.silence()
    return gather(*parts)


def _flat(value: Any, leaves: Sequence[Any], seed: Any, has_value: bool) -> Slices[Any]:
    """Derive gradients: each is flat, of the dtype of the value, and one follows the other."""
    parts, calls = yield from _parts("flat_grad_and_value", value, leaves, seed, has_value)
    try:
        if any(part.dtype.kind == "complex" for part in parts):
            raise TypeError(
                "flat_grad_and_value: an array of real numbers cannot hold gradients of complex ones; "
                "use value_and_grad"
            )
        # A single array has a single dtype.
        narrow = [part if part.dtype == value.dtype else part.cast(value.dtype) for part in parts]
        return arrays.concat([*narrow, value] if has_value else narrow, axis=None)
    finally:
        for call in calls:
            call.silence()


def _parts(
    name: str, value: Any, leaves: Sequence[Any], seed: Any, has_value: bool
) -> Slices[tuple[list[Any], list[Any]]]:
    """Derive the gradient of each leaf.

    Args:
        name: The function to name in errors.
        value: The call that a function has returned.
        leaves: The calls of its arguments.
        seed: The gradient of the value, or its factor.
        has_value: Whether the value follows the gradients; then `seed` is a factor.

    Returns:
        The gradients, and all calls that were made. The caller silences these, because some may be left out,
        and an error is enough.
    """
    calls: list[Any] = []
    try:
        for leaf in leaves:
            # A layout is found by a plan, so this is not asked before.
            check_differentiable(name, leaf)
        if has_value:
            seed = _seed(value, seed)
        elif isinstance(seed, list):
            seed = [_seed_of(name, value.args[k], part) for k, part in enumerate(seed)]
        else:
            seed = _seed_of(name, value, seed)
        calls += seed if isinstance(seed, list) else [seed]
        slopes = yield from backward_in_slices(value, leaves, seed, calls)
        parts = [turned(part) for part in slopes]
        return parts, [*calls, *[part for part in parts if isinstance(part, Call)]]
    except BaseException:
        for call in calls:
            call.silence()
        raise


def _seed_of(name: str, value: Any, seed: Any) -> Any:
    """Return the gradient of a value as a call, in the convention of the rules."""
    _check_value(name, value, "float", "complex")
    # A function of an array may be a view, and rules compose calls.
    placed = arrays.reshape(put_like(seed, value), value.shape)
    return turned(as_operand(placed, value))


def _refuse_alone(*_: object) -> Any:
    raise NotSupportedError("flat_grad_and_value: its gradients are parts of a chain; await the call")


def _expanding(name: str, slices: Callable[..., Slices[Any]]) -> ArrayFunction:
    def expand(*args: Any) -> Any:
        return at_once(slices(*args))

    return ArrayFunction(name, _refuse_alone, "awaitable", expand=expand, slices=slices)


_JOINED = _expanding("value_and_grad", _separate_gradients)
_NESTED = _expanding("value_and_grad", _nested_gradients)
_FLAT = _expanding("flat_grad_and_value", _flat)


def _refuse_others(call: Any) -> None:
    """Refuse a function that would compute something else when it runs again."""
    for step in Chain(call, is_spent=False).steps:
        name, effect = step.function.name, ""
        if name.startswith("random.") or name == "nn.dropout":
            effect = "draw other numbers"
        elif name == "nn.batch_norm_training" and (step.named or {}).get("running_mean") is not None:
            effect = "move its running statistics again"
        if effect:
            raise NotSupportedError(
                f"vjp: the function runs again for each gradient, and {name} would {effect}; use "
                "value_and_grad",
                operation=name,
            )


def _by_custom_rule(call: Any, g: Any, rule: Callable[..., Any]) -> Iterator[Rule]:
    inner, args, named = call.args
    if isinstance(g, list):
        g = tuple([turned(slope) for slope in filled(call, g)])
        # The rule may use some of them.
        for slope in g:
            slope.silence()
    else:
        g = turned(g)
        if isinstance(g, Call):
            # The rule may not use it.
            g.silence()
    # The arguments get their gradients by the rule, and not by the calls of the function.
    yield inner, lambda: None
    result: Any = rule(g, call, *args, **dict(named))
    several: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    for slope in several:
        # It may be the gradient of an argument that needs none.
        if isinstance(slope, Call):
            slope.silence()
    if len(several) != len(args):
        raise ValueError(
            f"{call.function.name}: the rule must return a gradient or None for each of {len(args)} "
            f"arguments, got {len(several)}"
        )
    for index, (argument, slope) in enumerate(zip(args, several, strict=True)):
        if slope is not None and isinstance(argument, (Call, AccelRef)):
            _check_slope(f"{call.function.name}: the rule's gradient of argument {index}", argument, slope)
        yield argument, partial(turned, slope) if slope is not None else partial(itself, None)


def _check_slope(label: str, argument: Any, slope: Any) -> None:
    if not isinstance(slope, (Call, AccelRef)):
        raise TypeError(f"{label} must be a call, an array or None, got {type(slope).__name__}")
    if slope.shape != argument.shape:
        raise ValueError(f"{label} must have shape {argument.shape}, got {slope.shape}")
    if slope.dtype != argument.dtype:
        raise TypeError(f"{label} must be of {argument.dtype}, got {slope.dtype}")
