"""Context managers whose ``__aenter__`` a task may leave half-way, by closing its await; see `_messages`."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, ParamSpec, TypeVar, cast

from trio.lowlevel import enable_ki_protection

__all__ = ["leavable_context"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class _Step(Generic[T_co]):
    """A step of an async generator.

    Until Python 3.12, an `await` that is closed does not reach the generator, which would wait for ever.
    """

    __slots__ = ("_step",)

    def __init__(self, step: Awaitable[T_co]) -> None:
        self._step = step

    def __await__(self) -> Generator[Any, Any, T_co]:
        step: Any = self._step.__await__()
        go_on: Callable[[Any], Any] = step.send
        argument: Any = None
        while True:
            try:
                trap = go_on(argument)
            except StopIteration as end:
                return cast("T_co", end.value)
            try:
                go_on, argument = step.send, (yield trap)
            except BaseException as error:  # noqa: ASYNC103, BLE001  # raised by the step
                go_on, argument = step.throw, error


class _LeavableContext(AbstractAsyncContextManager[T_co, "bool | None"]):
    __slots__ = ("_manager",)

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    @enable_ki_protection
    async def __aenter__(self) -> T_co:
        try:
            return cast("T_co", await _Step(anext(self._manager.gen)))
        except StopAsyncIteration:
            raise RuntimeError("the generator of a context manager has not yielded") from None

    @enable_ki_protection
    async def __aexit__(self, *error: object) -> bool | None:
        return cast("bool | None", await self._manager.__aexit__(*error))  # noqa: ASYNC102  # as without this


def leavable_context(
    function: Callable[P, AsyncGenerator[T]],
) -> Callable[P, AbstractAsyncContextManager[T, bool | None]]:
    """Make a context manager of an async generator, as `asynccontextmanager` does, which a task may leave."""
    make = asynccontextmanager(function)

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T, bool | None]:
        return _LeavableContext(make(*args, **kwargs))

    return enter
