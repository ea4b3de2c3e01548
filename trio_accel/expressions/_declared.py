"""Functions of arrays, each declared by an expression, a signature and a docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from ..actors import binder, signed_like
from ..backends.base import DType
from ..devices import AccelRef, ArrayFunction, Call, Operation, called
from ._arguments import ARRAYS
from ._expression import Elementwise, LaterElementwise
from ._reduction import LaterReduction, Reduction
from ._views import check_array

__all__ = ["DECLARED", "DeclaredExpression", "expression", "like"]

DECLARED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Functions as `expression` makes them, by the numbers of what their calls know."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ParametersP = ParamSpec("ParametersP")

_OPTIONS = ("out", "shape")
_OF_ROWS = ("axis", "keepdims", "out", "dtype")


class DeclaredFunction(Protocol[ParametersP]):
    """A function of arrays, as the decorators of this module make it."""

    message: Callable[ParametersP, Operation[Any, AccelRef]]
    """Makes its message, for `Device.ask` and `Device.submit`."""

    def __call__(self, *args: ParametersP.args, **kwargs: ParametersP.kwargs) -> Call[AccelRef]:
        """Compute it on the device of its arrays, once it is awaited."""
        ...


class DeclaredExpression(DeclaredFunction[ParametersP], Protocol[ParametersP]):
    """A function of arrays, as `expression` makes it."""

    expression: Elementwise[AccelRef] | Reduction
    """The expression that it computes."""


def expression(
    text: str | Callable[[], str] = "x",
    *,
    axes: bool = False,
    reduce: str | None = None,
    library: str = ARRAYS,
    promoted: Sequence[str] | None = None,
    truths: Sequence[str] = (),
    precision: str | None = None,
    wide: str | None = None,
    slopes: Mapping[str, str] | None = None,
    arrays: Sequence[str] = (),
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], DeclaredExpression[ParametersP]]:
    """Declare a function that computes an expression, of each element or along axes.

    The parameters of the function are the inputs of the expression, in order, except for the keywords `out`
    and `shape`; or along axes `axis`, `keepdims`, `out`, and with `reduce` `dtype`. Its body consists of a
    docstring. Parameters with a default may be omitted, and a parameter annotated with ``float`` never widens
    the result.

    Args:
        text: The expression, or a function that makes it at its first use; see `jit.elementwise`, and along
            axes `Reduction`.
        axes: Whether ``sum(...)`` and the like in the text are along the axes of a call.
        reduce: How the values of the text are combined along axes; see `Reduction`.
        library: Import path of the library actor that serves it.
        promoted: The inputs of an element-wise expression that are promoted to one dtype by the array API
            standard, see `Expression`; by default all without ``float``.
        truths: The inputs that must be truth values.
        precision: See `Expression`.
        wide: See `Expression`.
        slopes: See `Expression`.
        arrays: The inputs that must be arrays; the others may be numbers.

    The expression is parsed at its first use, which raises `TypeError` if it contradicts the function; the
    message begins with file and line.
    """
    redeclare = functools.partial(
        expression,
        axes=axes,
        library=library,
        promoted=promoted,
        truths=truths,
        precision=precision,
        arrays=arrays,
    )

    def declare(function: Any) -> Any:
        parameters, operation = inspect.signature(function).parameters, _operation(function)
        is_along = axes or reduce is not None
        names = [name for name in parameters if name not in (_OF_ROWS if is_along else _OPTIONS)]
        numbers = [name for name in names if parameters[name].annotation == "float"]
        named: dict[str, Any] = {
            "inputs": names,
            "operation": operation,
            "library": library,
            "precision": precision,
            "wide": wide,
            "slopes": slopes,
            "truths": truths,
        }

        def parts(dtype: str | None = None) -> dict[str, Any]:
            source = text if isinstance(text, str) else text()
            if is_along:
                return {"text": source, "reduce": reduce, "dtype": dtype, **named}
            chosen = [name for name in names if name not in numbers] if promoted is None else promoted
            return {"text": source, "promoted": chosen, **named}

        code = function.__code__
        location = f"{code.co_filename}:{code.co_firstlineno}: {function.__name__}"
        kind: Any = LaterReduction if is_along else LaterElementwise
        first = kind(parts, location)

        @functools.cache
        def converted(dtype: str) -> Reduction:
            return Reduction(**parts(dtype))

        bound = binder(operation, function)

        def message(*arguments: Any, **options: Any) -> Any:
            values = bound(arguments, options)
            variant = first
            if (dtype := values.pop("dtype", None)) is not None:
                try:
                    variant = converted(DType.of(dtype).value)
                except TypeError as error:
                    raise TypeError(f"{operation}: {error}") from None
            if arrays:
                check_array(operation, **{name: values[name] for name in arrays})
            if numbers:
                _convert(values, numbers)
            return variant.compute(*[values.pop(name) for name in names], **values)

        is_plain = not (is_along or numbers) and all(
            parameters[name].default is inspect.Parameter.empty for name in names
        )
        ask = first.ask if is_along and reduce is None else None
        asked = ArrayFunction(operation, first.compute if is_plain else message, ask=ask)
        return _declared(function, asked, expression=first, message=message, again=redeclare)

    return declare


def like(
    template: FunctionT, *texts: str, **options: str | Mapping[str, str] | None
) -> Callable[[Callable[..., None]], FunctionT]:
    """Declare a function with the signature of another one, by the decorator that has declared the other.

    The name and the docstring come from a function in a class, with ``self`` as its only parameter and an
    empty body.

    Args:
        template: The other function.
        texts: The texts of its decorator.
        options: Options of its decorator that differ from the other's. `wide`, `reduce` and `slopes` are
            never taken from the other.
    """
    declared: Any = template

    def declare(function: Callable[..., None]) -> FunctionT:
        return cast("FunctionT", declared.again(*texts, **options)(signed_like(template, function)))

    return declare


def _convert(values: dict[str, Any], numbers: Collection[str]) -> None:
    """Convert NumPy's numbers that must not widen a result to Python's."""
    for name in numbers:
        if isinstance(values[name], np.generic):
            values[name] = values[name].item()


def _declared(function: Any, ask: ArrayFunction, **attributes: Any) -> Any:
    declared: Any = functools.wraps(function)(called(ask))
    declared.__dict__.update(attributes)
    DECLARED[ask.number] = declared
    return declared


def _operation(function: Any) -> str:
    """Return the name of an operation: its package's name and its own."""
    package = next(part for part in reversed(function.__module__.split(".")) if not part.startswith("_"))
    return f"{package}.{function.__name__}"
