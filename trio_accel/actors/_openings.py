"""Context managers and deferred results with errors that explain their correct use."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

from trio.lowlevel import enable_ki_protection

from ._contexts import leavable_context

__all__ = ["NotAwaited", "Opening", "Silenced", "not_copied", "opens", "silence", "to_await"]

P = ParamSpec("P")
T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_Opens: TypeAlias = Callable[P, AbstractAsyncContextManager[T, bool | None]]


class Silenced:
    """Base class of objects that warn on deletion if nobody has awaited them."""

    __slots__ = ()

    def silence(self) -> None:
        """Suppress the warning."""


def silence(*values: Any) -> None:
    """Suppress the warnings of unawaited objects, because an error has refused them.

    Args:
        values: The awaitables, or lists and tuples of them. Other objects are ignored.
    """
    for value in values:
        for item in cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Silenced):
                item.silence()
            elif inspect.iscoroutine(item) and inspect.getcoroutinestate(item) == inspect.CORO_CREATED:
                item.close()


class NotAwaited:
    """Base class of placeholders for a later result. Errors about wrong use explain the right use.

    Attributes:
        what_to_do: The right use.
    """

    __slots__ = ()
    what_to_do: str

    if not TYPE_CHECKING:  # a type checker finds it without, and would find every attribute with it

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {self.what_to_do}"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError(f"a plain `with` does not do; {self.what_to_do}")

        # Python looks this up before it enters the block.
        __exit__ = __enter__

        def __aiter__(self) -> NoReturn:
            raise TypeError(f"`async for` needs an open block; {self.what_to_do}")


class Opening(NotAwaited):
    """A context manager that works only in ``async with``."""

    def __init__(self, manager: AbstractAsyncContextManager[Any, bool | None], what_to_do: str) -> None:
        self._manager = manager
        self.what_to_do = what_to_do

    # Ctrl-C between the body and the manager's own exit would end the task without closing the resource, and
    # end Trio's run with an internal error.
    @enable_ki_protection
    async def __aenter__(self) -> Any:
        return await self._manager.__aenter__()

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, traceback)  # noqa: ASYNC102  # as without this

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise TypeError(self.what_to_do)


class ToAwait(Silenced, Coroutine[Any, Any, T]):
    """The coroutine of a function that makes arrays, with errors that ask for the `await`.

    Args:
        coroutine: The coroutine.
        method: The call of the function, such as ``"device.put(...)"``.
    """

    __slots__ = ("_coroutine", "_method")

    def __init__(self, coroutine: Coroutine[Any, Any, T], method: str) -> None:
        self._coroutine = coroutine
        self._method = method

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Let the coroutine end without running it."""
        self._coroutine.close()

    def silence(self) -> None:
        """Suppress the warning."""
        silence(self._coroutine)

    if not TYPE_CHECKING:  # a type checker finds it without, and would find every attribute with it

        def __getattr__(self, name: str) -> NoReturn:
            # Libraries probe coroutines by names such as `cr_frame`.
            if name.startswith(("_", "cr_", "gi_", "ag_", "what_")):
                raise AttributeError(name)
            if name != "to_host":  # this package probes for it as well
                self.silence()
            raise AttributeError(
                f"a coroutine does not have the attribute {name!r}; {self.advice('.' + name)}"
            )

    def advice(self, use: str) -> str:
        """Return how to use the result as the program uses the coroutine."""
        return f"await it first: (await {self._method}){use}, or in blocking code b.wait({self._method}){use}"


# Errors show the class, whose objects are coroutines to a program.
ToAwait.__name__ = "coroutine"


def _refusing(use: str) -> Callable[..., Any]:
    def refuse(self: ToAwait[Any], *operands: object) -> Any:
        if any(isinstance(operand, Silenced) and not isinstance(operand, ToAwait) for operand in operands):
            return NotImplemented  # the array refuses it, and names the function
        silence(self, *operands)
        raise TypeError(f"a coroutine is not an array; {self.advice(use)}")  # of its module

    return refuse


_USES = {
    "getitem": "[...]",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
for _special, _sign in _USES.items():
    setattr(ToAwait, f"__{_special}__", _refusing(f" {_sign} ..." if _special != "getitem" else _sign))
    if _special != "getitem":
        setattr(ToAwait, f"__r{_special}__", _refusing(""))
for _special in ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "len", "iter", "float", "int"):
    setattr(ToAwait, f"__{_special}__", _refusing(""))


def to_await(method: str) -> Callable[[FunctionT], FunctionT]:
    """Make a function that makes arrays, whose coroutine refuses to be used like the array.

    Args:
        method: The call of the method, such as ``"device.put(...)"``, for errors.
    """

    def decorate(function: FunctionT) -> FunctionT:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return ToAwait(function(*args, **named), method)

        return cast("FunctionT", call)

    return decorate


def not_copied(noun: str, advice: str) -> TypeError:
    """Make the error for an attempt to pickle an object, or to copy it with the copy module."""
    return TypeError(f"{noun} belongs to its process and can be neither pickled nor copied; {advice}")


def opens(text: str) -> Callable[[Callable[P, AsyncGenerator[T]]], _Opens[P, T]]:
    """Make a context manager from an async generator, like `asynccontextmanager`, but explain wrong use.

    Args:
        text: The right use.
    """

    def decorate(function: Callable[P, AsyncGenerator[T]]) -> _Opens[P, T]:
        manager: Any = leavable_context(function)
        factory = wraps(function)(lambda *args, **kwargs: Opening(manager(*args, **kwargs), text))
        return cast("_Opens[P, T]", factory)

    return decorate
