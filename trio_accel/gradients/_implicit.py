"""Implicit gradients: of roots, by the implicit function theorem.

A root x of f(x, p) = 0 moves with p by dx = -(∂f/∂x)⁻¹ (∂f/∂p) dp. So a gradient g of x gives p the gradient
vᵀ (∂f/∂p), where v solves the transposed system (∂f/∂x)ᵀ v = -g. The solver itself is not derived, and it may
take any number of requests.

As in `scan`, the equation is traced once. Its calls that depend on x are a body, and all else that they read
is computed once. The rule makes the calls of the body again, at the root, and composes the matrix, the
solution and the products from them. The root is an operand of these calls, so they have gradients as well.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast

from .. import arrays as _arrays
from .._names import later
from ..actors import silence
from ..backends.base import NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call
from ._backward import as_operand, backward, is_operand
from ._elementwise import Rule
from ._jacobians import flat, rows_of
from ._recomputed import TracedBody, layout_recorder, leaf_of, refilled, structure_of, traced
from ._rules import filled
from ._scatter import nothing
from ._tape import visit

__all__ = ["custom_root"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
linalg = later("trio_accel.linalg")
# A request has a limited number of calls, and each element of the root takes a gradient of the equation.
_MAX_CALLS = 3000
# Calls of a gradient for each call of its function, about.
_CALLS_PER_CALL = 4


def custom_root(f: Callable[..., Any], solve: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Make a function that solves an equation and has implicit gradients, as `jax.lax.custom_root`.

    The gradients follow from the equation at the root, whatever the solver does. So they are as exact as the
    root, and the solver is not derived. A fixed point of ``g`` is the root of ``g(x, p) - x``.

    Args:
        f: ``f(x, *args)`` composes calls, awaits none, and returns calls with the nesting and shapes of `x`,
            which are 0 at the root. It may use arrays and calls of the surrounding function, such as
            parameters; gradients flow to them and to `args`.
        solve: ``await solve(x0, *args)`` returns the root, with the nesting, shapes and dtypes of `x0`. It
            may await any number of calls.

    Returns:
        A function ``root(x0, *args)``, to call within a function that you derive. It returns the root as a
        call, or as calls nested like `x0`. `x0` is a floating array or call, or a dict, list or tuple of
        these; its gradient is 0. `args` are arrays, numbers, and dicts, lists and tuples of these.

    Raises:
        NotSupportedError: A gradient passes complex numbers. Or it takes more than 3000 calls: each element
            of `x0` takes about 4 for each call in `f`, because the whole matrix of derivatives is computed.
        TypeError: `f` or `solve` is not a function, or returns other shapes or dtypes than `x0`; or `x0` does
            not have floating arrays.
        LinAlgError: The derivative of `f` by `x` is singular.
    """
    for argument, callback in (("f", f), ("solve", solve)):
        if not callable(cast("object", callback)):
            raise TypeError(f"custom_root: {argument} must be a function, got {type(callback).__name__}")
    name = f"custom_root({getattr(f, '__qualname__', type(f).__name__)})"

    def root(x0: Any, *args: Any) -> Any:
        guesses, leaves, results = list[Any](), list[Any](), list[Any]()
        structure = structure_of(x0, guesses), structure_of(args, leaves)
        for guess in guesses:
            if not isinstance(guess, (AccelRef, Call)) or guess.dtype.kind not in ("float", "complex"):
                raise TypeError(f"{name}: x0 must have floating arrays on a device, in dicts and lists")
        inputs = [leaf_of(guess, guess.shape) for guess in guesses]
        visit(f(refilled(structure[0], inputs), *args), results.append)
        silence(*results)
        _check_layouts(f"{name}: f", results, guesses)
        body, constants = traced(results, inputs)
        function = ArrayFunction(
            name, partial(_solved, name, solve, structure), "awaitable", rule=partial(_of_root, name, body)
        )
        call: Any = Call(function, (guesses, leaves, constants))
        parts = [call[k] for k in range(len(guesses))]
        # A caller may only need some of them.
        silence(*parts)
        return refilled(structure[0], parts)

    return root


def _check_layouts(label: str, returned: Sequence[Any], guesses: Sequence[Any]) -> None:
    layouts = [
        f"{x.dtype} {tuple(x.shape)}" if isinstance(x, (AccelRef, Call)) else type(x).__name__
        for x in (*guesses, *returned)
    ]
    expected, layouts = layouts[: len(guesses)], layouts[len(guesses) :]
    if layouts != expected:
        raise TypeError(
            f"{label} must return arrays with the shapes and dtypes of x0: {', '.join(expected)}; got "
            f"{', '.join(layouts)}"
        )


async def _solved(
    name: str,
    solve: Callable[..., Awaitable[Any]],
    structure: tuple[Any, Any],
    guesses: Sequence[Any],
    leaves: Sequence[Any],
    _: object,
) -> tuple[Any, ...]:
    """Run the solver, and return the arrays of the root."""
    if recorder := layout_recorder(name):
        return tuple([recorder.stand_in_for(x.shape, x.dtype) for x in guesses])
    x0, args = refilled(structure[0], guesses), refilled(structure[1], leaves)
    roots = list[Any]()
    visit(await solve(x0, *args), roots.append)
    _check_layouts(f"{name}: solve", roots, guesses)
    return tuple(roots)


def _of_root(name: str, body: TracedBody, call: Any, g: Any) -> Iterator[Rule]:
    guesses, leaves, constants = call.args
    active = [number for number, x in enumerate(constants) if is_operand(x)]

    @cache
    def slopes() -> Any:
        roots, gathered = [call[k] for k in range(len(guesses))], filled(call, g)
        # The gradient may be refused.
        silence(*roots, *gathered)
        return _through(name, body, [*roots, *constants], len(roots), gathered)

    for operand in (*guesses, *leaves):
        # An argument has its gradient as an operand of the equation.
        yield operand, nothing
    for number, position in enumerate(active):
        yield constants[position], partial(_nth, slopes, number)


def _nth(several: Callable[[], Sequence[Any]], number: int) -> Any:
    return several()[number]


def _through(name: str, body: TracedBody, inputs: Sequence[Any], count: int, g: Sequence[Any]) -> list[Any]:
    """Return the gradients of the floating constants by the gradients of a root.

    Args:
        name: The function to name in errors.
        body: The equation.
        inputs: The arrays of the root, and then the constants.
        count: The number of the root's arrays.
        g: Their gradients.
    """
    if any(is_operand(x) and x.dtype.kind == "complex" for x in inputs):
        raise NotSupportedError(f"{name}: gradients of complex numbers are not supported", operation=name)
    size = sum(x.size for x in inputs[:count])
    if size * (_CALLS_PER_CALL * len(body.steps) + 1) > _MAX_CALLS:
        raise NotSupportedError(
            f"{name}: the gradient takes more than {_MAX_CALLS} calls, because x0 has {size} elements and f "
            f"{len(body.steps)} calls; use fewer elements",
            operation=name,
        )
    leaves = [leaf_of(x, x.shape) if is_operand(x) else x for x in inputs]
    active = [leaf for leaf, x in zip(leaves, inputs, strict=True) if is_operand(x)]
    value, calls = flat(body.calls(leaves)), list[Any]()
    # Not rows of a host array, which a body of `scan` does not know.
    ones = arrays.ones_like(value)
    numbers = arrays.cumulative_sum(ones)
    seeds = [arrays.where(numbers == number, ones, 0) for number in range(1, size + 1)]
    columns = [arrays.reshape(rows, (size, -1)) for rows in rows_of(value, active[:count], seeds)]
    vector = -linalg.solve(arrays.concat(columns, axis=1).mT, flat(g))
    slopes = backward(value, active[count:], as_operand(vector, value), calls)
    silence(value, vector, *calls, *slopes)
    return slopes
