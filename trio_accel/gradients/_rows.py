"""Gradients of expressions along axes, from the package and from the user.

The gradient of a program with reductions is a program with reductions (`derivatives`), so it is an expression
along the same axes: one launch for each operand, with derivatives of its own to any order. Gradients need
neither a rule nor intermediate results in memory.

Rules by hand are faster for some functions, because they use the result. They hold for real operands that are
not broadcast along the axes (`of_usual`); all other calls of these functions are derived.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import NotSupportedError
from ..backends.base.expressions import ArgumentType
from ..derivatives._derive import gradient
from ..derivatives._steps import text_of
from ..devices import ArrayFunction
from ..expressions import DECLARED, Elementwise, Expression, Reduction
from ._backward import KINDS, Make, is_operand, put_like
from ._elementwise import ADVICE, Rule, defaults_of, kind_of, numbers_of, summed_to
from ._memo import memoized

__all__ = ["is_of_rows", "of_usual"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
# Reductions with a derivative as a program, and reductions that small changes leave as they are.
_REDUCTIONS = frozenset({"sum", "mean", "max", "min", "nanmax", "nanmin", "any", "all", "argmax", "argmin"})
_NUMBERS = (int, float, complex)


@attrs.frozen(eq=False)
class _Rows:
    """The expression along axes that a function computes.

    Attributes:
        reduction: The expression.
        parameters: The names of the function's parameters, in order.
        defaults: Their default values.
    """

    reduction: Reduction
    parameters: tuple[str, ...]
    defaults: dict[str, Any]

    def args(self, call: Any) -> dict[str, Any]:
        """Return a call's arguments by name."""
        return self.defaults | dict(zip(self.parameters, call.args, strict=False)) | dict(call.named or {})


@memoized
def _rows_of(function: ArrayFunction) -> _Rows | None:
    """Return the expression along axes that a function computes; None for other functions."""
    declared = DECLARED.get(function.number)
    if declared is None:
        reduction = getattr(function.make, "__self__", None)
        if not isinstance(reduction, Reduction) or not _is_known(reduction):
            return None
        return _Rows(reduction, reduction.inputs, {"axis": None, "keepdims": False})
    reduction = getattr(declared, "expression", None)
    if not isinstance(reduction, Reduction) or not _is_known(reduction):
        return None
    return _Rows(reduction, tuple(inspect.signature(declared).parameters), defaults_of(declared))


def _is_known(reduction: Reduction) -> bool:
    return reduction.dtype is None and {part.name for part in reduction.parsed.reductions} <= _REDUCTIONS


def is_of_rows(function: ArrayFunction) -> bool:
    """Return whether the gradient of a function can be derived from its expression along axes."""
    return _rows_of(function) is not None


def of_usual(rule: Make, factors: Collection[str] = ()) -> Make:
    """Use a rule for real operands that are not broadcast along the axes, and derive all other calls.

    Args:
        rule: A rule of a function with an expression along axes, faster than the derived gradient.
        factors: Operands that the rule also takes with fewer elements, or none of the axes.
    """

    def choose(call: Any, g: Any) -> Iterator[Rule]:
        rows = _rows_of(call.function)
        assert rows is not None
        is_usual = _is_usual(rows, rows.args(call), factors)
        return rule(call, g) if is_usual else _slopes(rows, call, g)

    return choose


def _is_usual(rows: _Rows, args: dict[str, Any], factors: Collection[str]) -> bool:
    names = rows.reduction.inputs
    operands = {name: args[name] for name in names if not isinstance(args[name], _NUMBERS)}
    shape = _broadcast_shape(list(operands.values()))
    axes = _axes(args["axis"], shape)
    return all(
        operand.dtype.kind not in ("complex", "c")
        and (name in factors or _has_axes(operand.shape, shape, axes))
        for name, operand in operands.items()
    )


def _has_axes(extents: Sequence[int], shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether an operand has all axes of the broadcast shape, and all elements along some of them."""
    return len(extents) == len(shape) and all(extents[axis] == shape[axis] for axis in axes)


def _slopes_of_rows(call: Any, g: Any) -> Iterator[Rule] | None:
    """Yield gradients of an expression along axes; return None for other functions."""
    rows = _rows_of(call.function)
    return None if rows is None else _slopes(rows, call, g)


def _slopes(rows: _Rows, call: Any, g: Any) -> Iterator[Rule]:
    args = rows.args(call)
    arguments = [put_like(args[name], call) for name in rows.reduction.inputs]
    for wrt, argument in enumerate(arguments):
        if is_operand(argument):
            yield argument, partial(_slope, rows.reduction, call, arguments, args.get("axis"), wrt, g)


def _slope(reduction: Reduction, call: Any, arguments: Sequence[Any], axis: Any, wrt: int, g: Any) -> Any:
    """Make the gradient of an argument, as a call.

    Raises:
        NotSupportedError: The expression has no derivative by this argument.
    """
    is_exact = any(not isinstance(x, _NUMBERS) and x.dtype.kind == "complex" for x in arguments)
    kinds = tuple([kind_of(argument, is_exact=is_exact) for argument in arguments])
    try:
        derived, reads = _derived(reduction, kinds, wrt, is_exact)
    except (NotSupportedError, ValueError) as error:
        message = f"{call.function.name} has no gradient by {reduction.inputs[wrt]}: {error}; {ADVICE}"
        raise NotSupportedError(message, operation=call.function.name) from None
    if not reads:
        return arrays.zeros_like(arguments[wrt])
    shape = _broadcast_shape(arguments)
    axes = _axes(axis, shape)
    row_shape = tuple([1 if dim in axes else extent for dim, extent in enumerate(shape)])
    if g.shape not in (shape, row_shape):
        g = arrays.reshape(g, row_shape)
    # A sum is over all elements along the axes, so no operand may lack some of them.
    operands = [
        x if isinstance(x, _NUMBERS) or n == len(arguments) else _spread(x, shape)
        for n, x in enumerate([*arguments, g])
        if n in reads
    ]
    if derived is None:
        (slope,) = operands
    elif isinstance(derived, Reduction):
        # A result of the reduced shape broadcasts against the arguments.
        slope = derived(*operands, axis=axes, keepdims=not derived.parsed.read_outside)
    else:
        count = math.prod([shape[dim] for dim in axes])
        slope = derived(*operands, *[count] * ("n" in derived.inputs))
    return summed_to(_spread(slope, shape), arguments[wrt].shape)


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    return x if tuple(x.shape) == shape else arrays.broadcast_to(x, shape)


def _broadcast_shape(arguments: Sequence[Any]) -> tuple[int, ...]:
    shapes = [tuple(x.shape) for x in arguments if not isinstance(x, _NUMBERS)]
    return tuple(np.broadcast_shapes(*shapes))


def _axes(axis: Any, shape: Sequence[int]) -> tuple[int, ...]:
    count = len(shape)
    if axis is None:
        return tuple(range(count))
    return tuple([int(dim) % count for dim in np.atleast_1d(axis)])


@memoized
def _derived(
    reduction: Expression[Any], kinds: tuple[ArgumentType, ...], wrt: int, is_exact: bool
) -> tuple[Reduction | Elementwise[Any] | None, tuple[int, ...]]:
    """Derive an expression along axes by an argument.

    Returns:
        The gradient, and the numbers of the operands that it reads; the last one is the gradient of the
        result. The gradient is None if it is 0, which reads nothing, or equal to the only operand read. As an
        expression of elements, it may also read ``n``, the number of elements along the axes.
    """
    steps = gradient(reduction.typed(kinds), len(kinds), wrt, numbers_of(kinds), has_result=False)
    if not steps.reads or (len(steps.steps) == 1 and steps.reads[0] >= len(kinds)):
        return None, steps.reads
    names = [*[f"a{n}" for n in range(len(kinds))], "g0"]
    text = text_of(steps.steps, {"slope": steps.outputs[0]}, dict(enumerate(names)), is_typed=is_exact)
    inputs = [names[n] for n in steps.reads]
    how: dict[str, Any] = {
        "operation": f"{reduction.operation}.slope",
        "precision": None if is_exact else reduction.precision,
    }
    if any(step.is_reduction for step in steps.steps):
        return Reduction(text, inputs=inputs, **how), steps.reads
    if any(step.function == "count" for step in steps.steps):
        inputs.append("n")
    return Elementwise[Any](text, outputs="slope", inputs=inputs, **how), steps.reads


KINDS.insert(0, _slopes_of_rows)
