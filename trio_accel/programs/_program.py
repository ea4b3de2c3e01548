"""The handle of an open program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import attrs
import trio

from ..actors import ActorStoppedError
from ..backends.base import ContextPoisonedError, LibraryError, Refused
from ..backends.base.programs import GONE
from ..backends.base.trees import build
from ..devices import Device, Operation, RecoveryCost, opened
from ._actor import ProgramActor
from ._messages import Fetch, MethodCall, Result, StateArray, TellResult, message_class
from ._method import Method, describe_function, find_method

__all__ = ["FunctionProgram", "OpenProgram", "Opened", "Program"]

P = ParamSpec("P")
T = TypeVar("T")

# Calls whose results were kept, and went with an error of the program, are made so often again.
_MOST_REPEATS = 2
_MOST_FORGOTTEN = 64


@attrs.frozen(eq=False, kw_only=True)
class Opened:
    """What was opened.

    Attributes:
        device: Where it runs.
        name: Its name in the tree.
        target: The class or function.
        library: Import path of its actor, with its definition.
        frozen: Arrays that it was opened with, and none of its methods changes.
        state: The others.
        on_close: Called when it is closed.
    """

    device: Device
    name: str
    target: Callable[..., Any]
    library: str
    frozen: Sequence[StateArray]
    state: Sequence[StateArray]
    on_close: Callable[[], None]


class OpenProgram:
    """An open program: what `Program` and `FunctionProgram` share.

    It is an async context manager that closes it.

    Attributes:
        name: Its name in the tree and in statistics.
        device: Where it runs.
    """

    def __init__(self, opened: Opened) -> None:
        self.name: str = opened.name
        self.device: Device = opened.device
        self._opened = opened
        self._is_closed = False
        self._methods: dict[object, tuple[Method, Sequence[StateArray]]] = {}
        self._slots = itertools.count()
        # Of results that nobody fetches.
        self._left: set[int] = set()
        self._asking = 0
        self._idle = trio.Event()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<{type(self).__name__} {self.name!r} on {self.device.path}, {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()  # noqa: ASYNC102  # what it does when it is cancelled is bounded

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def is_asking(self) -> bool:
        """Whether a call has not ended."""
        return self._asking > 0

    @property
    def recovery(self) -> RecoveryCost:
        """How long it takes after a loss until this program is there again, as measured by now, and why.

        Once the program is closed, only the context is left of it.
        """
        library = ProgramActor.library_of(self._opened.library.partition("?")[2])
        return opened(self.device).state.recoveries.cost([library])

    async def aclose(self) -> None:
        """End the program, and let go of its arrays, once it has served what it was asked.

        If this is cancelled, it does not wait for that. Its actor ends, in workers that stand ready too, and
        no later context makes it again. The arrays that it was opened with are given back if nobody else
        refers to them. Closing it twice does nothing.
        """
        was_closed, self._is_closed = self._is_closed, True
        opened = self._opened
        if was_closed:
            await trio.lowlevel.checkpoint()
            return
        try:
            while self._asking:
                self._idle = trio.Event()
                await self._idle.wait()
        finally:
            with trio.move_on_after(opened.device.options.close_grace + 1.0, shield=True):
                await opened.device.close_library(opened.library)
            self._opened = attrs.evolve(opened, frozen=(), state=())
            self._methods.clear()
            opened.on_close()

    async def _ask(self, given: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Ask for a call of a method."""
        method, state = self._method(given)
        bound = method.bind(args, kwargs)
        out = bound.arguments.pop("out", None) if method.takes_out else None
        self._asking += 1
        try:
            if method.out is None:
                return await self._ask_unknown(method, state, bound)
            message = message_class(MethodCall, method.where)
            call = message(self._opened.library, method, bound, out, self._opened.frozen, state, None, ())
            return await self.device.ask(call)
        except Refused as refused:
            raise _own_error(refused, method)  # noqa: B904  # its cause is set there
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()

    async def _ask_unknown(self, method: Method, state: Sequence[StateArray], bound: Any) -> Any:
        """Ask for a call, and fetch what it has returned."""
        message = message_class(MethodCall, method.where)
        library, changes = self._opened.library, bool(method.updates or method.state)
        for number in itertools.count():
            slot, generation = next(self._slots), self.device.generation
            forget = tuple(itertools.islice(self._left, _MOST_FORGOTTEN))
            try:
                call = message(library, method, bound, None, self._opened.frozen, state, slot, forget)
                found = await self.device.ask(call)
                self._left.difference_update(forget)
                return await self._fetch(method, slot, found)
            except Refused:
                raise  # nothing was kept
            except LibraryError as error:
                self._left.add(slot)
                if error.code != GONE:
                    raise
                # A neighbour's error costs this asker nothing; to lose a result with its context is to lose
                # the call.
                is_lost = self.device.generation != generation
                if changes or number >= (self.device.options.retry if is_lost else _MOST_REPEATS):
                    raise _lost(method, error, changes=changes) from error
            except BaseException:
                self._left.add(slot)
                raise
        raise AssertionError  # pragma: no cover  # the loop has no end

    async def _fetch(self, method: Method, slot: int, found: Result | int) -> Any:
        library = self._opened.library
        if isinstance(found, int):
            message = message_class(TellResult, f"{method.where}.result")
            found = cast("Result", await self.device.ask(message(library, slot, found)))
            self._left.add(slot)
        arrays: list[object] = []
        if found.arrays:
            fetch = message_class(Fetch, f"{method.where}.fetch")
            arrays = await self.device.ask(fetch(library, slot, found.arrays))
            self._left.discard(slot)
        return build(found.tree, arrays)

    def _method(self, given: object) -> tuple[Method, Sequence[StateArray]]:
        if self._is_closed:
            raise ActorStoppedError(f"program {self.name!r} is closed", path=self.device.path)
        known = self._methods.get(given)
        if known is None:
            method = self._find(given)
            known = self._methods[given] = method, _one_of_each_block(self._opened.state, method)
        return known

    def _find(self, given: object) -> Method:
        raise NotImplementedError


class Program(OpenProgram, Generic[T]):
    """A class of the program's own that runs on a device. Made by `open_program`."""

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
            What it has returned, with references in place of arrays.

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

    def operation(self, method: Callable[Concatenate[T, ...], Any] | str) -> type[Operation[Any, Any]]:
        """The class of the operations that call a method: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(method).where)

    def _find(self, given: object) -> Method:
        return find_method(cast("type[object]", self._opened.target), given)


class FunctionProgram(OpenProgram, Generic[P]):
    """A function of the program's own that runs on a device. Made by `open_program`."""

    async def ask(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function where it runs, and wait for its result; see `Program.ask`."""
        return await self._ask(None, args, kwargs)

    def operation(self) -> type[Operation[Any, Any]]:
        """The class of the operations that call it: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(None).where)

    def _find(self, given: object) -> Method:
        return describe_function(self._opened.target)


def _one_of_each_block(state: Sequence[StateArray], method: Method) -> Sequence[StateArray]:
    """What order and memory depend on: blocks. One that a method changes stands for all in its block."""
    found: dict[int, StateArray] = {}
    for array in sorted(state, key=lambda array: array.parameter not in method.state):
        found.setdefault(id(array.ref.block), array)
    return tuple(found.values())


def _own_error(refused: Refused, method: Method) -> Exception:
    """The error by which a method has refused a request, of the class that the method declares."""
    cause, refused.__cause__ = refused.__cause__, None
    if refused.code not in range(len(method.refuses)):
        refused.__cause__ = cause
        return refused
    cls = method.refuses[cast("int", refused.code)]
    error = cause
    if not isinstance(error, cls):
        # It comes from a worker, which sends a class of the program's own as text.
        text = refused.message
        with suppress(Exception):
            error = cls(str(cause).removeprefix(f"{cls.__module__}.{cls.__qualname__}: "))
            for note in getattr(cause, "__notes__", ()):
                error.add_note(note)
        if not isinstance(error, cls):
            return Refused(text, device=refused.device, operation=refused.operation)
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        # No coroutine can raise them.
        refused.__cause__ = error
        return refused
    # By this `Batcher` knows a refusal.
    error.__cause__ = refused
    return error


def _lost(method: Method, error: LibraryError, *, changes: bool) -> ContextPoisonedError:
    advice = "make the arrays that it changes again, then ask again" if changes else "ask again"
    return ContextPoisonedError(
        f"the result of {method.where} was lost: the program was made anew before it was fetched; {advice}",
        device=error.device,
        operation=error.operation,
        generation=error.generation,
    )
