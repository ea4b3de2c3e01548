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

    def compose(self, given: list[Any], axis: Any, *, keepdims: bool) -> Any:
        """Compose the reduction of calls with gradients."""
        values = self.map(*given)
        if self.dtype is not None:
            values = values.cast(self.dtype)
        made = getattr(arrays, self.reduce)(values, axis=axis, keepdims=keepdims)
        if self.post is None:
            return made
        count = math.prod(values.shape) // max(1, math.prod(made.shape))
        return self.post(*[made if name == "a" else count for name in self.reads])


@functools.lru_cache(1024)
def _parts(function: ArrayFunction) -> _Parts | None:
    own = getattr(function.make, "__self__", None)
    if not isinstance(own, Reduction):
        return None
    name, reduce = own.operation, own.reduce
    if reduce not in REDUCTIONS:
        raise refuse(name, f"it combines values by {reduce!r}")
    after = None
    if own.post is not None:
        after = Elementwise[Any](own.post, operation=f"{name}.post")
    return _Parts(
        own.inputs,
        Elementwise[Any](own.text, inputs=own.inputs, operation=f"{name}.map"),
        reduce,
        own.dtype,
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
    given = [*call.args, *[named[name] for name in parts.inputs[len(call.args) :]]]
    places = [place for place, one in enumerate(given) if is_operand(one)]

    @functools.cache
    def made() -> list[Any]:
        def again(*leaves: Any) -> Any:
            operands = dict(zip(places, leaves, strict=True))
            values = [operands.get(place, one) for place, one in enumerate(given)]
            return parts.compose(values, named.get("axis"), keepdims=named.get("keepdims", False))

        return pulled(again, [given[place] for place in places], g)

    def slope(number: int, one: Any) -> Any:
        return arrays.zeros_like(one) if parts.reduce in _STEPS else made()[number]

    for number, place in enumerate(places):
        yield given[place], partial(slope, number, given[place])


KINDS.append(_reduction_slopes)
