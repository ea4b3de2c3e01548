"""Gradients of reductions, composed from the gradients of the expressions and the reduction."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs

from .. import arrays as _arrays
from ..backends.base.expressions import REDUCTIONS
from ..devices import ArrayFunction
from ..expressions import Elementwise, Reduction
from ._backward import KINDS, is_operand, pulled, refuse
from ._elementwise import Rule
from ._memo import memoized

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
# Their results do not change with small changes of an element.
_STEPS = ("any", "all", "argmin", "argmax")


@attrs.frozen(eq=False)
class _Parts:
    """A reduction as three functions: the values, their reduction, and its last step.

    Attributes:
        inputs: Names of the arguments, in order.
        map: Computes the values to reduce.
        reduce: The name of the function of `arrays` that reduces them.
        dtype: Type that they are converted to first; None for none.
        post: Computes the result; None for nothing.
        reads: The inputs of `post`: ``a``, the reduced value, and ``n``, the number of elements.
    """

    inputs: tuple[str, ...]
    map: Elementwise[Any]
    reduce: str
    dtype: Any
    post: Elementwise[Any] | None
    reads: tuple[str, ...]

    def compose(self, arguments: list[Any], axis: Any, *, keepdims: bool) -> Any:
        """Compose the reduction of calls with gradients."""
        values = self.map(*arguments)
        if self.dtype is not None:
            values = values.cast(self.dtype)
        reduced = getattr(arrays, self.reduce)(values, axis=axis, keepdims=keepdims)
        if self.post is None:
            return reduced
        count = math.prod(values.shape) // max(1, math.prod(reduced.shape))
        return self.post(*[reduced if name == "a" else count for name in self.reads])


@memoized
def _parts(function: ArrayFunction) -> _Parts | None:
    reduction = getattr(function.make, "__self__", None)
    if not isinstance(reduction, Reduction):
        return None
    name, reduce = reduction.operation, reduction.reduce
    if reduce not in REDUCTIONS:
        raise refuse(name, f"it combines values by {reduce!r}")
    after = None
    if reduction.post is not None:
        after = Elementwise[Any](reduction.post, operation=f"{name}.post")
    return _Parts(
        reduction.inputs,
        Elementwise[Any](reduction.text, inputs=reduction.inputs, operation=f"{name}.map"),
        reduce,
        reduction.dtype,
        after,
        () if after is None else after.inputs,
    )


def _reduction_slopes(call: Any, g: Any) -> Iterator[Rule] | None:
    """Yield the arguments of a reduction's call, with their gradients; None for another function.

    Raises:
        NotSupportedError: An expression combines the values, and such a reduction has no gradient.
    """
    parts = _parts(call.function)
    return None if parts is None else _slopes(parts, call, g)


def _slopes(parts: _Parts, call: Any, g: Any) -> Iterator[Rule]:
    named = dict(call.named or {})
    arguments = [*call.args, *[named[name] for name in parts.inputs[len(call.args) :]]]
    indices = [index for index, argument in enumerate(arguments) if is_operand(argument)]

    @functools.cache
    def slopes() -> list[Any]:
        def compose(*leaves: Any) -> Any:
            operands = dict(zip(indices, leaves, strict=True))
            values = [operands.get(index, argument) for index, argument in enumerate(arguments)]
            return parts.compose(values, named.get("axis"), keepdims=named.get("keepdims", False))

        return pulled(compose, [arguments[index] for index in indices], g)

    def slope(number: int, argument: Any) -> Any:
        return arrays.zeros_like(argument) if parts.reduce in _STEPS else slopes()[number]

    for number, index in enumerate(indices):
        yield arguments[index], partial(slope, number, arguments[index])


KINDS.append(_reduction_slopes)
