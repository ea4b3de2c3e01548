"""The handles of open programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import numpy.typing as npt

from ..devices import AccelRef, Operation
from ._messages import MethodCall, message_class
from ._method import Method, PlainT, describe_function, find_method
from ._open_program import OpenProgram
from ._streams import ItemStream

__all__ = ["FunctionProgram", "Program"]

P = ParamSpec("P")
T = TypeVar("T")
ItemT = TypeVar("ItemT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class Program(OpenProgram, Generic[T]):
    """A class of the program's own that runs on a device. Made by `open_program`."""

    @overload
    async def ask(
        self, method: Callable[Concatenate[T, P], PlainT], /, *args: P.args, **kwargs: P.kwargs
    ) -> PlainT: ...
    @overload
    async def ask(
        self, method: Callable[Concatenate[T, P], npt.NDArray[Any]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AccelRef: ...
    @overload
    async def ask(
        self, method: Callable[Concatenate[T, P], Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any: ...
    @overload
    async def ask(self, method: str, /, *args: object, **kwargs: object) -> Any: ...
    async def ask(self, method: object, /, *args: object, **kwargs: object) -> Any:
        """Call a method where the program runs, and wait for its result.

        Args:
            method: The method, as ``Encoder.encode``; or its name.
            args: Arguments of the method: arrays of the device, NumPy arrays, which are copied there first,
                None, numbers, strings, bytes, and dicts, lists and tuples of these.
            kwargs: The same, by name.

        Returns:
            Its result, with references in place of arrays. Type checkers know it where the method says that
            it returns numbers, strings, collections of these, or a NumPy array; else it is Any.

        Raises:
            TypeError, ValueError, AttributeError: There is no such method, or it does not take the arguments.
            StaleRefError: An array was released or lost; also one that the program was opened with.
            Refused: The method refuses the request, and so do errors of the classes that it declares by
                ``method(refuses=...)``: these are raised here as they are. The program goes on.
            ActorFailedError: The method raised another error, which is the cause. The program is made anew.
                Or it has failed more often than its intensity allows, and has ended.
            ActorStoppedError: The program is closed.

        See `Device.ask` for cancellation and the errors that any operation can end with.
        """
        return await self._ask(method, args, kwargs)

    @overload
    def stream(
        self, method: Callable[Concatenate[T, P], Iterator[PlainT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AbstractAsyncContextManager[ItemStream[PlainT]]: ...
    @overload
    def stream(
        self,
        method: Callable[Concatenate[T, P], Iterator[npt.NDArray[Any]]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AbstractAsyncContextManager[ItemStream[AccelRef]]: ...
    @overload
    def stream(
        self, method: Callable[Concatenate[T, P], Iterable[Any]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AbstractAsyncContextManager[ItemStream[Any]]: ...
    @overload
    def stream(
        self, method: str, /, *args: object, **kwargs: object
    ) -> AbstractAsyncContextManager[ItemStream[Any]]: ...
    def stream(
        self, method: object, /, *args: object, **kwargs: object
    ) -> AbstractAsyncContextManager[ItemStream[Any]]:
        """Call a method that yields, and iterate over its items as they are made.

        ``async with program.stream(Model.generate, prompt) as tokens: async for token in tokens: ...``

        Each item is an operation, whose result follows the rules of `ask`. Between two items others may be
        served. At most `ahead` items are made that were not read (see `method`), so a reader that is slow
        holds the method back. At the end of the block the generator is closed, between two items: what it
        makes then sees `is_cancelled`, and its ``finally`` runs. A deadline ends it likewise. The arrays
        among the arguments live until then. A setting that holds for a thread must not span a ``yield``.

        A loss of the context ends a stream by `ContextLostError`, and so does a restart of the program. With
        ``method(resumes=True)`` it goes on: the method is called again, with what it has yielded as `resume`.
        So the reader sees no gap, and no item twice. After eight losses without an item in between it ends.

        Args:
            method: The method, as ``Model.generate``; or its name.
            args: Its arguments, as for `ask`. NumPy arrays are copied to the device once.
            kwargs: The same, by name.

        Returns:
            An async context manager around the async iterator.

        Raises:
            TypeError, ValueError, AttributeError: There is no such method, it does not yield, or it does not
                take the arguments.
            Exception: The iterator raises what `ask` would, at the item where it was raised. The end of the
                block raises what the generator raises while it is closed.
        """
        return self._stream(method, args, kwargs)

    async def reset(self, /, *args: object, **kwargs: object) -> None:
        """Make the program anew, in place of closing it and opening another one.

        Its constructor gets the arguments of before, with these in place of those of the same parameters. So
        ``reset(weights=saved)`` gives new contents for damaged or lost ``weights``. Arrays that are not named
        stay as they are.

        Calls that are running end first. Those that come meanwhile wait, 1024 at most, and run on the new
        instance. Several resets run one after the other, before the calls that wait. If one fails or is
        cancelled, nothing is replaced: the program has the arrays of before, and the next call makes an
        instance of these.

        Restarts are counted from zero, and a program that has ended for good lives again. As the arrays of
        before exist until it is done, it takes memory for both.

        Args:
            args: Arguments of the constructor, as for `open_program`. Arrays have the dtype and shape of
                those that they replace.
            kwargs: The same, by name.

        Raises:
            TypeError, ValueError: Arguments that the constructor does not take; an array of another dtype,
                shape or device.
            StaleRefError: An array that is not replaced, or a new one, is damaged, lost or released.
            ContextLostError: The context was lost meanwhile, and more often than `retry` says.
            ActorStoppedError: The program is closed.
            NotSupportedError: In the step of a graph.
            Exception: The error of the constructor or `warm_up`, with a note that names it.
        """
        await self._reset(args, kwargs)

    def operation(self, method: Callable[Concatenate[T, ...], Any] | str) -> type[Operation[Any, Any]]:
        """The class of the operations that call a method: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(method).where)

    def _find(self, given: object) -> Method:
        return find_method(cast("type[object]", self._opened.target), given)

    if not TYPE_CHECKING:  # a type checker would find every attribute with it

        def __getattr__(self, name: str) -> Any:
            cls, told = self._opened.target, ""
            if callable(getattr(cls, name, None)):
                told = f"; write await program.ask({cls.__name__}.{name}, ...)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{told}")


class FunctionProgram(OpenProgram, Generic[P, ReplyT_co]):
    """A function of the program's own that runs on a device. Made by `open_program`."""

    async def ask(self, *args: P.args, **kwargs: P.kwargs) -> ReplyT_co:
        """Call the function where it runs, and wait for its result; see `Program.ask`."""
        return cast("ReplyT_co", await self._ask(None, args, kwargs))

    def stream(
        self: FunctionProgram[P, Iterator[ItemT]], *args: P.args, **kwargs: P.kwargs
    ) -> AbstractAsyncContextManager[ItemStream[ItemT]]:
        """Call the function, which yields, and iterate over its items; see `Program.stream`."""
        return self._stream(None, args, kwargs)

    async def reset(self) -> None:
        """Make it anew; it lives again if it has ended for good. See `Program.reset`."""
        await self._reset((), {})

    def operation(self) -> type[Operation[Any, Any]]:
        """Return the class of the operations that call it: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(None).where)

    def _find(self, given: object) -> Method:
        return describe_function(self._opened.target)
