"""Functions of arrays, each declared by an expression, a signature and a docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, Protocol

from ..devices import AccelRef, Operation
from ._elementwise import Elementwise

__all__ = ["DeclaredExpression", "expression"]

ParametersP = ParamSpec("ParametersP")

_OPTIONS = ("out", "shape")


class DeclaredExpression(Protocol[ParametersP]):
    """A function of arrays, as `expression` makes it."""

    @property
    def elementwise(self) -> Elementwise[AccelRef]:
        """The expression that it computes."""
        ...

    @property
    def message(self) -> Callable[ParametersP, Operation[Any, AccelRef]]:
        """Makes its message, for `Device.ask` and `Device.submit`."""
        ...

    def __call__(
        self, *args: ParametersP.args, **kwargs: ParametersP.kwargs
    ) -> Coroutine[Any, Any, AccelRef]:
        """Compute it on the device of its arrays."""
        ...


def expression(
    text: str, *, library: str, promoted: Sequence[str] | None = None, truths: Sequence[str] = ()
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], DeclaredExpression[ParametersP]]:
    """Declare a function that computes an expression for each element.

    The parameters of the function, but for the keywords `out` and `shape`, are the inputs of the expression,
    in order. Its body is a docstring alone.

    Args:
        text: The expression; see `jit.elementwise`.
        library: Import path of the library actor that serves it.
        promoted: The inputs that are promoted to one dtype by the array API standard, see `Elementwise`; all
            by default.
        truths: The inputs that must be truth values.

    Raises:
        TypeError: The expression contradicts the function. The message begins with file and line.
    """

    def declare(function: Any) -> Any:
        code = function.__code__
        package = next(part for part in reversed(function.__module__.split(".")) if not part.startswith("_"))
        names = tuple(name for name in inspect.signature(function).parameters if name not in _OPTIONS)
        try:
            made = Elementwise[AccelRef](
                text,
                inputs=names,
                operation=f"{package}.{function.__name__}",
                library=library,
                promoted=names if promoted is None else promoted,
                truths=truths,
            )
        except (TypeError, ValueError) as error:
            place = f"{code.co_filename}:{code.co_firstlineno}"
            raise TypeError(f"{place}: {function.__name__}: {error}") from error

        @functools.wraps(function)
        async def ask(*arguments: Any, **named: Any) -> AccelRef:
            return await made(*arguments, **named)

        declared: Any = ask
        declared.elementwise, declared.message = made, made.compute
        return declared

    return declare
