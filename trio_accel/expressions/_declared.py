"""Functions of arrays, each declared by an expression, a signature and a docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from ..actors import binder, signed_like
from ..backends.base import DType
from ..devices import AccelRef, Call, Function, Operation, called
from ._arguments import ARRAYS
from ._elementwise import Elementwise
from ._reduction import ComputeReduction, Reduction, Rowwise
from ._views import check_array

__all__ = ["DECLARED", "DeclaredExpression", "DeclaredReduction", "expression", "like", "reduction", "rows"]

DECLARED: dict[Function, Any] = {}
"""Functions as `expression`, `reduction` and `rows` make them, by what their calls know."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ParametersP = ParamSpec("ParametersP")

_OPTIONS = ("out", "shape")
_OF_ROWS = ("axis", "keepdims", "out")


class DeclaredFunction(Protocol[ParametersP]):
    """A function of arrays, as the decorators of this module make it."""

    message: Callable[ParametersP, Operation[Any, AccelRef]]
    """Makes its message, for `Device.ask` and `Device.submit`."""

    def __call__(self, *args: ParametersP.args, **kwargs: ParametersP.kwargs) -> Call[AccelRef]:
        """Compute it on the device of its arrays, once it is awaited."""
        ...


class DeclaredReduction(DeclaredFunction[ParametersP], Protocol[ParametersP]):
    """A function of arrays, as `reduction` and `rows` make it."""

    text: str
    """The expression of rows that it computes; see `Rowwise`."""
    wide: str | None
    """The same for arrays of float64 and complex128; see `Rowwise`."""
    precision: str | None
    """The least that it computes in; see `Rowwise`."""


class DeclaredExpression(DeclaredFunction[ParametersP], Protocol[ParametersP]):
    """A function of arrays, as `expression` makes it."""

    elementwise: Elementwise[AccelRef]
    """The expression that it computes."""


def expression(
    text: str,
    *,
    library: str = ARRAYS,
    promoted: Sequence[str] | None = None,
    truths: Sequence[str] = (),
    precision: str | None = None,
    slopes: Mapping[str, str] | None = None,
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], DeclaredExpression[ParametersP]]:
    """Declare a function that computes an expression for each element.

    The parameters of the function, but for the keywords `out` and `shape`, are the inputs of the expression,
    in order. Its body is a docstring alone. Parameters with a default may be left out, and what is annotated
    with ``float`` never widens the result.

    Args:
        text: The expression; see `jit.elementwise`.
        library: Import path of the library actor that serves it.
        promoted: The inputs that are promoted to one dtype by the array API standard, see `Elementwise`; all
            but those with ``float`` by default.
        truths: The inputs that must be truth values.
        precision: See `Elementwise`.
        slopes: See `Elementwise`.

    Raises:
        TypeError: The expression contradicts the function. The message begins with file and line.
    """
    again = functools.partial(
        expression, library=library, promoted=promoted, truths=truths, precision=precision
    )

    def declare(function: Any) -> Any:
        code = function.__code__
        parameters = inspect.signature(function).parameters
        names, numbers = _inputs(parameters, _OPTIONS)
        try:
            made = Elementwise[AccelRef](
                text,
                inputs=names,
                operation=_operation(function),
                library=library,
                promoted=[name for name in names if name not in numbers] if promoted is None else promoted,
                truths=truths,
                precision=precision,
                slopes=slopes,
            )
        except (TypeError, ValueError) as error:
            place = f"{code.co_filename}:{code.co_firstlineno}"
            raise TypeError(f"{place}: {function.__name__}: {error}") from error

        def message(*arguments: Any, **named: Any) -> Any:
            given = bound(arguments, named)
            return made.compute(*_taken(given, names, numbers), **given)

        is_plain = not numbers and all(parameters[name].default is inspect.Parameter.empty for name in names)
        bound = binder(made.operation, function)
        make = made.compute if is_plain else message
        return _declared(
            function, Function(made.operation, make), elementwise=made, message=make, again=again
        )

    return declare


def reduction(
    reduce: str, text: str = "x", *, library: str = ARRAYS
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], DeclaredReduction[ParametersP]]:
    """Declare a function that reduces an array along axes.

    Its parameters are the array, and of `axis`, `keepdims`, `out` and `dtype` those that it takes. Its body
    is a docstring alone.

    Args:
        reduce: How values are combined; see `Reduction`.
        text: The values, an expression of the array.
        library: Import path of the library actor that serves it.
    """

    def declare(function: Any) -> Any:
        bound = binder(_operation(function), function)
        array = next(iter(inspect.signature(function).parameters))

        @functools.cache
        def made(dtype: str | None) -> Reduction:
            return Reduction(
                text, reduce, inputs=[array], dtype=dtype, operation=_operation(function), library=library
            )

        def message(*arguments: Any, **named: Any) -> ComputeReduction:
            given = bound(arguments, named)
            dtype = given.pop("dtype", None)
            try:
                chosen = None if dtype is None else DType.of(dtype).value
            except TypeError as error:
                raise TypeError(f"{_operation(function)}: {error}") from None
            return made(chosen).compute(given.pop(array), **given)

        again = functools.partial(reduction, library=library)
        ask = Function(_operation(function), message)
        more = {"text": f"{reduce}({text})", "wide": None, "precision": None, "again": again}
        return _declared(function, ask, message=message, **more)

    return declare


def rows(
    text: str,
    *,
    precision: str | None = "float32",
    library: str = ARRAYS,
    wide: str | None = None,
    arrays: Sequence[str] = (),
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], DeclaredReduction[ParametersP]]:
    """Declare a function that computes an expression of rows.

    Its parameters but for `axis`, `keepdims` and `out` are the inputs of the expression, in order. Its body
    is a docstring alone. What is annotated with ``float`` never widens the result.

    Args:
        text: See `Rowwise`.
        precision: See `Rowwise`.
        library: See `Rowwise`.
        wide: See `Rowwise`.
        arrays: The inputs that must be arrays; the others may be numbers.
    """

    def declare(function: Any) -> Any:
        parameters = inspect.signature(function).parameters
        names, numbers = _inputs(parameters, _OF_ROWS)
        named = {"operation": _operation(function), "library": library}
        made = Rowwise(text, names, precision=precision, wide=wide, **named)
        bound = binder(_operation(function), function)

        def message(*arguments: Any, **options: Any) -> ComputeReduction:
            given = bound(arguments, options)
            check_array(made.operation, **{name: given[name] for name in arrays})
            return made.compute(*_taken(given, names, numbers), **given)

        ask = Function(_operation(function), message, ask=made.ask)
        again = functools.partial(rows, precision=precision, library=library, arrays=arrays)
        more = {"text": text, "wide": wide, "precision": precision, "again": again}
        return _declared(function, ask, message=message, **more)

    return declare


def like(
    other: FunctionT, *texts: str, **options: str | Mapping[str, str] | None
) -> Callable[[Callable[..., None]], FunctionT]:
    """Declare a function with the signature of another one, by the decorator that has declared that.

    The name and the docstring are those of a function without parameters but ``self`` in a class. Its body is
    empty.

    Args:
        other: The other one.
        texts: The texts of its decorator.
        options: Options of its decorator that are others than there; `wide` of `rows` is always its own.
    """
    declared: Any = other

    def declare(own: Callable[..., None]) -> FunctionT:
        return cast("FunctionT", declared.again(*texts, **options)(signed_like(other, own)))

    return declare


def _inputs(
    parameters: Mapping[str, inspect.Parameter], options: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the parameters that are inputs of the expression, and those of them that widen no result."""
    names = [name for name in parameters if name not in options]
    return names, [name for name in names if parameters[name].annotation == "float"]


def _taken(given: dict[str, Any], names: Sequence[str], numbers: Collection[str]) -> list[Any]:
    """Take the inputs out of the arguments of a call; numbers that widen no result become Python's."""
    for name in numbers:
        if isinstance(given[name], np.generic):
            given[name] = given[name].item()
    return [given.pop(name) for name in names]


def _declared(function: Any, ask: Function, **attributes: Any) -> Any:
    declared: Any = functools.wraps(function)(called(ask))
    declared.__dict__.update(attributes)
    DECLARED[declared.asked] = declared
    return declared


def _operation(function: Any) -> str:
    """Return the name of an operation: that of its package, and its own."""
    package = next(part for part in reversed(function.__module__.split(".")) if not part.startswith("_"))
    return f"{package}.{function.__name__}"
