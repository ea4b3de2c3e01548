"""Gradients by the first argument, made of the slope that an expression has there.

The expression of a function has the text of its slope, as `slopes` of `Expression`. The public gradient,
`*_grad`, and the rule of `ta.grad` are both made of that text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from ..actors import arguments_of
from ..devices import AccelRef, Call
from ..expressions import Elementwise, ExpressionArgument, expression

__all__ = ["FIRST", "slope_of"]

FIRST: list[str] = []
"""The names of other functions than expressions whose gradient by the first argument is their `*_grad`."""

ParametersP = ParamSpec("ParametersP")


def slope_of(
    function: Callable[ParametersP, Call[AccelRef]],
    run: Callable[..., Coroutine[Any, Any, AccelRef]] | None = None,
) -> Callable[[Callable[[], None]], Callable[Concatenate[ExpressionArgument, ParametersP], Call[AccelRef]]]:
    """Make the gradient of a function, which has the function's arguments after its own, `grad`.

    The name and the docstring are those of a function without parameters. Its body is empty.

    Args:
        function: The function. `expression` or `loss` has declared it, unless there is `run`.
        run: Is called with all arguments by their names.
    """
    declared: Any = function
    first = inspect.Parameter(
        "grad", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="ExpressionArgument"
    )
    signature = inspect.signature(function)
    signature = signature.replace(parameters=[first, *signature.parameters.values()])

    def make(own: Any) -> Any:
        own.__signature__ = signature
        own.__annotations__ = {"grad": first.annotation, **function.__annotations__}
        if isinstance(of := getattr(declared, "expression", None), Elementwise):
            text = of.slopes[of.inputs[0]]
            return expression(f"g = grad; {text}", precision="float32")(own)
        FIRST.append(declared.__name__)
        return arguments_of(own, run or declared.derived)(own)

    return make
