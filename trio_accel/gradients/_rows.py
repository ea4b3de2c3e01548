"""Gradients of expressions along axes, from the package and from the user.

The gradient of a program with reductions is a program with reductions (`derivatives`), so it is an expression
along the same axes: one launch for all operands, with derivatives of its own to any order. Gradients need
neither a rule nor intermediate results in memory.

Rules by hand are faster for some functions, because they use the result. They hold for a real operand
(`of_real`); calls of complex numbers are derived.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..actors import silence
from ..backends.base import NotSupportedError
from ..backends.base.expressions import ArgumentType
from ..derivatives._derive import DerivedSteps, gradient
from ..derivatives._steps import text_of
from ..devices import ArrayFunction
from ..expressions import DECLARED, Elementwise, Expression, Reduction
from ._backward import KINDS, Make, OneOfSeveral, is_operand, put_like
from ._elementwise import ADVICE, Rule, defaults_of, kind_of, numbers_of, summed_to
from ._memo import memoized

__all__ = ["is_of_rows", "of_real"]

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


def of_real(rule: Make) -> Make:
    """Use a rule for a real operand, and derive calls of complex ones.

    Args:
        rule: A rule of a function with an expression along axes, faster than the derived gradient.
    """

    def choose(call: Any, g: Any) -> Iterator[Rule]:
        rows = _rows_of(call.function)
        assert rows is not None
        args = rows.args(call)
        operands = [args[name] for name in rows.reduction.inputs if not isinstance(args[name], _NUMBERS)]
        is_real = all(operand.dtype.kind not in ("complex", "c") for operand in operands)
        return rule(call, g) if is_real else _slopes(rows, call, g)

    return choose


def _slopes_of_rows(call: Any, g: Any) -> Iterator[Rule] | None:
    """Yield gradients of an expression along axes; return None for other functions."""
    rows = _rows_of(call.function)
    return None if rows is None else _slopes(rows, call, g)


def _slopes(rows: _Rows, call: Any, g: Any) -> Iterator[Rule]:
    args = rows.args(call)
    arguments = [put_like(args[name], call) for name in rows.reduction.inputs]
    slopes = _Slopes(rows.reduction, call, arguments, args.get("axis"), g)
    for wrt, argument in enumerate(arguments):
        if is_operand(argument):
            yield argument, OneOfSeveral(slopes.requested, wrt, slopes.of)


class _Slopes:
    """The gradients of an expression's arguments: one launch for all that are requested and along axes.

    Args:
        reduction: The expression.
        call: Its call.
        arguments: Its arguments, on the device.
        axis: The axes, as they were given.
        g: The gradient of the result; a list for several results, with None for unused ones.

    Attributes:
        requested: The numbers of the arguments whose gradients are requested.
    """

    def __init__(self, reduction: Reduction, call: Any, arguments: Sequence[Any], axis: Any, g: Any) -> None:
        self.requested: list[int] = []
        self._reduction, self._name, self._arguments = reduction, call.function.name, arguments
        self._shape = _broadcast_shape(arguments)
        self._axes = _axes(axis, self._shape)
        several: list[Any] = g if isinstance(g, list) else [g]
        self._reached = tuple([k for k, part in enumerate(several) if part is not None])
        # The last arguments of a derived expression.
        self._gradients = [None if part is None else self._row(k, part) for k, part in enumerate(several)]
        self._is_exact = any(not isinstance(x, _NUMBERS) and x.dtype.kind == "complex" for x in arguments)
        self._kinds = tuple([kind_of(argument, is_exact=self._is_exact) for argument in arguments])
        self._together: dict[int, Any] | None = None

    def of(self, wrt: int) -> Any:
        """Make the gradient of an argument, as a call.

        Raises:
            NotSupportedError: The expression has no derivative by this argument.
        """
        derived, reads = self._derived(wrt)
        if not reads:
            return arrays.zeros_like(self._arguments[wrt])
        if _is_whole(derived):
            if self._together is None:
                self._together = self._made_together()
            slope = self._together.get(wrt)
            if slope is not None:
                return self._as_argument(slope, wrt)
        operands = self._operands(reads)
        if derived is None:
            (slope,) = operands
        elif isinstance(derived, Reduction):
            # A result of the reduced shape broadcasts against the arguments.
            slope = derived(*operands, axis=self._axes, keepdims=not derived.parsed.read_outside)
        else:
            count = math.prod([self._shape[dim] for dim in self._axes])
            slope = derived(*operands, *[count] * ("n" in derived.inputs))
        return self._as_argument(slope, wrt)

    def _row(self, number: int, g: Any) -> Any:
        """Return the gradient of a result with an element for each row, if the result has that."""
        row_shape = tuple([1 if dim in self._axes else extent for dim, extent in enumerate(self._shape)])
        is_along = g.shape == self._shape != row_shape
        if g.shape not in (self._shape, row_shape):
            g = arrays.reshape(g, row_shape)
        elif is_along and not _read_by(self._reduction, number):
            # One of several results, which has the value of a row in each of its elements.
            g = arrays.sum(g, axis=self._axes, keepdims=True)
        # The gradients may be 0, and then read nothing.
        silence(g)
        return g

    def _derived(self, wrt: int) -> tuple[Reduction | Elementwise[Any] | None, tuple[int, ...]]:
        try:
            return _derived(self._reduction, self._kinds, wrt, self._reached, self._is_exact)
        except (NotSupportedError, ValueError) as error:
            message = f"{self._name} has no gradient by {self._reduction.inputs[wrt]}: {error}; {ADVICE}"
            raise NotSupportedError(message, operation=self._name) from None

    def _made_together(self) -> dict[int, Any]:
        """Return calls of the requested gradients that one launch makes, by the arguments' numbers."""
        numbers = tuple([wrt for wrt in dict.fromkeys(self.requested) if _is_whole(self._derived(wrt)[0])])
        if len(numbers) < 2:
            return {}
        derived, reads = _derived_together(
            self._reduction, self._kinds, numbers, self._reached, self._is_exact
        )
        slopes = derived(*self._operands(reads), axis=self._axes)
        return {wrt: slopes[k] for k, wrt in enumerate(numbers)}

    def _operands(self, reads: Collection[int]) -> list[Any]:
        """Return the operands of a derived expression."""
        # A sum is over all elements along the axes, so no operand may lack some of them.
        count = len(self._arguments)
        return [
            x if isinstance(x, _NUMBERS) or n >= count else _spread(x, self._shape)
            for n, x in enumerate([*self._arguments, *self._gradients])
            if n in reads
        ]

    def _as_argument(self, slope: Any, wrt: int) -> Any:
        return summed_to(_spread(slope, self._shape), self._arguments[wrt].shape)


def _is_whole(derived: object) -> bool:
    """Return whether a gradient is an expression along axes with a result for each element."""
    return isinstance(derived, Reduction) and bool(derived.parsed.read_outside)


@memoized
def _read_by(reduction: Expression[Any], number: int) -> bool:
    """Return whether a result reads elements otherwise than by reductions."""
    parsed = reduction.parsed
    return bool(attrs.evolve(parsed, outputs=(parsed.outputs[number],)).read_outside)


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
    reduction: Expression[Any],
    kinds: tuple[ArgumentType, ...],
    wrt: int,
    reached: tuple[int, ...],
    is_exact: bool,
) -> tuple[Reduction | Elementwise[Any] | None, tuple[int, ...]]:
    """Derive an expression along axes by an argument.

    Returns:
        The gradient, and the numbers of the operands that it reads; the last ones are the gradients of the
        results. The gradient is None if it is 0, which reads nothing, or equal to the only operand read. As
        an expression of elements, it may also read ``n``, the number of elements along the axes.
    """
    steps = _steps(reduction, kinds, wrt, reached)
    if not steps.reads or (len(steps.steps) == 1 and steps.reads[0] >= len(kinds)):
        return None, steps.reads
    names = _names(reduction, kinds)
    text = text_of(steps.steps, {"slope": steps.outputs[0]}, dict(enumerate(names)), is_typed=is_exact)
    inputs = [names[n] for n in steps.reads]
    how = _options(reduction, is_exact=is_exact)
    if any(step.is_reduction for step in steps.steps):
        return Reduction(text, inputs=inputs, **how), steps.reads
    if any(step.function == "count" for step in steps.steps):
        inputs.append("n")
    return Elementwise[Any](text, outputs="slope", inputs=inputs, **how), steps.reads


@memoized
def _derived_together(
    reduction: Expression[Any],
    kinds: tuple[ArgumentType, ...],
    wrts: tuple[int, ...],
    reached: tuple[int, ...],
    is_exact: bool,
) -> tuple[Reduction, tuple[int, ...]]:
    """Derive an expression along axes by several arguments: the gradients are the results of one expression.

    Returns:
        The gradients, and the numbers of the operands that they read.
    """
    names, lines, reads = _names(reduction, kinds), list[str](), set[int]()
    outputs = [f"slope{wrt}" for wrt in wrts]
    for wrt, output in zip(wrts, outputs, strict=True):
        steps = _steps(reduction, kinds, wrt, reached)
        reads.update(steps.reads)
        # Steps that are equal are computed once.
        results, prefix = {output: steps.outputs[0]}, f"t{wrt}_"
        lines.append(text_of(steps.steps, results, dict(enumerate(names)), is_typed=is_exact, prefix=prefix))
    inputs = [names[n] for n in sorted(reads)]
    how = _options(reduction, is_exact=is_exact)
    return Reduction("\n".join(lines), inputs=inputs, outputs=outputs, **how), tuple(sorted(reads))


def _steps(
    reduction: Expression[Any], kinds: tuple[ArgumentType, ...], wrt: int, reached: tuple[int, ...]
) -> DerivedSteps:
    return gradient(
        reduction.typed(kinds), len(kinds), wrt, numbers_of(kinds), reached=reached, has_result=False
    )


def _names(reduction: Expression[Any], kinds: tuple[ArgumentType, ...]) -> list[str]:
    """Return the names of a derived expression's operands: the arguments, and the gradients of results."""
    arguments = [f"a{n}" for n in range(len(kinds))]
    return [*arguments, *[f"g{n}" for n in range(len(reduction.outputs))]]


def _options(reduction: Expression[Any], *, is_exact: bool) -> dict[str, Any]:
    precision = None if is_exact else reduction.precision
    return {"operation": f"{reduction.operation}.slope", "precision": precision}


KINDS.insert(0, _slopes_of_rows)
