"""Gradients by the first argument, made of the slope that an expression has there.

The public gradient, `*_grad`, and the rule of `ta.grad` are both derived from the expression of the function.
If the derived slope is wrong somewhere, or slow, the expression has a slope by hand, as `slopes` of
`Expression`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec

from ..actors import arguments_of
from ..backends.base import DType
from ..backends.base.expressions import Weak, parse
from ..devices import AccelRef, Call
from ..expressions import Elementwise, ExpressionArgument, expression

__all__ = ["DERIVED", "slope_of", "slope_text"]

DERIVED = set[str]()
"""The names of the functions whose slope by the first argument is derived. Bounds do not make it 0 at NaN."""

ParametersP = ParamSpec("ParametersP")


def slope_text(elementwise: Elementwise[AccelRef], numbers: Collection[str]) -> str:
    """Return the source of an expression's slope by its first input.

    Args:
        elementwise: The expression.
        numbers: The inputs that are numbers.
    """
    if elementwise.slopes:
        return elementwise.slopes[elementwise.inputs[0]]
    # These are imported at first use, because few programs that import the package derive a slope.
    from ..derivatives._derive import gradient
    from ..derivatives._steps import text_of

    kinds = [Weak.float if name in numbers else DType.float64 for name in elementwise.inputs]
    program = gradient(
        elementwise.typed(tuple(kinds)),
        len(kinds),
        0,
        frozenset(n for n, kind in enumerate(kinds) if kind is Weak.float),
        has_result=False,
        passes_nan=True,
    )
    names = dict(enumerate((*elementwise.inputs, "g")))
    return text_of(program.steps, {"slope": program.outputs[0]}, names, is_typed=False)


def slope_of(
    function: Callable[ParametersP, Call[AccelRef]],
    run: Callable[..., Coroutine[Any, Any, AccelRef]] | None = None,
) -> Callable[[Callable[[], None]], Callable[Concatenate[ExpressionArgument, ParametersP], Call[AccelRef]]]:
    """Make the gradient of a function, which has the function's arguments after its own, `grad`.

    The name and the docstring come from a function without parameters and with an empty body.

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

    def make(stub: Any) -> Any:
        stub.__signature__ = signature
        stub.__annotations__ = {"grad": first.annotation, **function.__annotations__}
        if isinstance(of := getattr(declared, "expression", None), Elementwise):
            if not of.slopes:
                DERIVED.add(of.operation)
            return expression(partial(_public_text, of, signature.parameters), precision="float32")(stub)
        return arguments_of(stub, run or declared.derived)(stub)

    return make


def _public_text(of: Elementwise[AccelRef], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the text of a public gradient, which reads all of its arguments."""
    numbers = [name for name, parameter in parameters.items() if parameter.annotation == "float"]
    text = f"g = grad\n{slope_text(of, numbers)}"
    unread = [name for name in of.inputs if name not in parse(text).inputs]
    return "\n".join([text, *[f"slope = where({name} == {name}, slope, slope)" for name in unread]])
