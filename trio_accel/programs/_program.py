"""The handles of open programs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)
from weakref import WeakKeyDictionary, WeakSet

import attrs
import numpy.typing as npt
import trio

from ..actors import (
    ActorFailedError,
    ActorStoppedError,
    ParkingLot,
    TaskEvent,
    TaskLock,
    bind_arguments,
    not_copied,
)
from ..backends.base import LibraryError, QueueFullError, Refused
from ..backends.base.contract.program_definition import build
from ..backends.base.kit.programs import INSTANCE_LOST
from ..devices import AccelRef, Device, Operation, RecoveryCost, opened, refuse_recording
from ..devices.base._progress import chosen_listener
from ._messages import (
    CallResult,
    Expectations,
    Fetch,
    MethodCall,
    ProgramActor,
    Returned,
    TellResult,
    message_class,
)
from ._method import PlainT, ProgramMethod, describe_function, find_method
from ._opened import Anew, Opened, StateArray, lost, never, own_error
from ._progress import chosen_callback, heard
from ._streams import END, Items, ItemStream, bind_items

__all__ = ["FunctionProgram", "Program"]

P = ParamSpec("P")
T = TypeVar("T")
ItemT = TypeVar("ItemT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


# The callable programs of each device.
_programs: WeakKeyDictionary[Device, WeakSet[OpenProgram]] = WeakKeyDictionary()
# The maximum repetitions of a call after an error of the program has destroyed its retained result.
_MOST_REPEATS = 2
_MOST_FORGOTTEN = 64
# The device queue also limits requests that wait for a context to this number.
_MOST_PARKED = 1024


def ended_programs(device: Device) -> list[OpenProgram]:
    """Return the open programs of a device that have ended for good, sorted by name."""
    ended = [program for program in _programs.get(device, ()) if program.has_ended and not program.is_closed]
    return sorted(ended, key=lambda program: program.name)


class OpenProgram:
    """An open program: base of `Program` and `FunctionProgram`.

    It is an async context manager that closes it.

    Attributes:
        name: The name in the tree and in statistics.
        device: The device that it runs on.
    """

    def __reduce__(self) -> NoReturn:
        raise not_copied("an open program", "open one where it is needed: ta.open_program(device, ...)")

    def __init__(self, opened: Opened) -> None:
        self.name: str = opened.name
        self.device: Device = opened.device
        self._opened = opened
        self._is_closed = False
        # The generation in which a call was refused because the program has ended for good.
        self._ended: int | None = None
        self._methods: dict[object, tuple[ProgramMethod, Sequence[StateArray]]] = {}
        self._slots = itertools.count()
        self._expectations = Expectations()
        # Slots of unwanted results.
        self._left: set[int] = set()
        # Arguments of streams among them, because a generator may access its arrays while it is closed.
        self._held: dict[int, inspect.BoundArguments] = {}
        self._asking = 0
        self._idle: TaskEvent | None = None
        # D140: resets run one after the other; calls are parked until all are over.
        self._turn = TaskLock()
        self._resets = 0
        self._parked = ParkingLot()
        _programs.setdefault(self.device, WeakSet()).add(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<{type(self).__name__} {self.name!r} on {self.device.path}, {state}>"

    if not TYPE_CHECKING:  # a type checker reports the call

        def __call__(self, *args: object, **kwargs: object) -> object:
            raise TypeError("a program is not called itself: write await program.ask(...)")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()  # noqa: ASYNC102  # what it does when it is cancelled is bounded

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def is_asking(self) -> bool:
        """Whether a call is in progress."""
        return self._asking > 0

    @property
    def recovery(self) -> RecoveryCost:
        """The measured time from a loss until this program is ready again, and its reasons.

        Once the program is closed, only the context is left of it.
        """
        library = ProgramActor.library_of(self._opened.library.partition("?")[2])
        return opened(self.device).state.recoveries.cost([library])

    @property
    def is_damaged(self) -> bool:
        """Whether an array of its constructor is damaged, lost or released.

        Calls are refused then, until `reset` replaces the array.
        """
        arrays = (*self._opened.frozen, *self._opened.state)
        return not all(array.ref.block.is_usable_as(array.ref.spec) for array in arrays)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good, because it failed more often than its intensity allows.

        The first call refused for this reason reveals it. `reset` restarts the program, and so does the next
        context of the device.
        """
        return self._ended == self.device.generation

    async def aclose(self) -> None:
        """End the program, and release its arrays, once it has served all calls.

        If this is cancelled, it does not wait for the calls. The actor ends, also in spare workers, and later
        contexts do not make it again. The arrays of its constructor are released if there are no other
        references to them. Closing it twice does nothing.
        """
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            await trio.lowlevel.checkpoint()
            return
        try:
            async with self._turn:
                await self._wait_idle()
        finally:
            opened = self._opened
            await _end(opened)  # noqa: ASYNC102  # it shields itself
            self._opened = attrs.evolve(opened, frozen=(), state=(), prepare_again=never)
            self._methods.clear()
            opened.thaw()
            opened.on_close()

    async def _wait_idle(self) -> None:
        """Wait until no call is open; only the task with the turn may do so."""
        while self._asking:
            self._idle = TaskEvent()
            await self._idle.wait()

    async def _reset(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Make it again, with some arguments replaced; see `Program.reset`."""
        refuse_recording("reset", "reset the program before the capture, or after a replay")
        self._resets += 1
        try:
            async with self._turn:
                self._check_open()
                anew = await self._opened.prepare_again(args, kwargs)
                await self._wait_idle()
                self._check_open()
                # Check after the wait, because a call may have damaged an array meanwhile.
                anew.check(self.device)
                await self._replace(anew)
        finally:
            self._resets -= 1
            if not self._resets:
                self._parked.unpark_all()

    async def _replace(self, anew: Anew) -> None:
        """Replace the instance, or keep the old one if that fails."""
        previous = self._opened
        # D140: the old instance ends first, because a GPU may lack memory for two.
        await _end(previous)
        opened = await anew.start()
        if self._is_closed:
            # The closing task was cancelled, and did not wait.
            await _end(opened)
            opened.thaw()
            self._check_open()
        self._opened, self._ended = opened, None
        self._methods.clear()
        self._held.clear()
        previous.thaw()

    async def _wait_reset(self) -> None:
        """Wait until all resets of the program are over.

        Raises:
            QueueFullError: Too many calls wait already.
        """
        while self._resets:
            if len(self._parked) >= _MOST_PARKED:
                raise QueueFullError(
                    f"{_MOST_PARKED} calls wait already for the reset of program {self.name!r}",
                    device=self.device.name,
                )
            await self._parked.park()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ActorStoppedError(f"program {self.name!r} is closed", path=self.device.path)

    async def _ask(self, method_or_name: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Call a method."""
        # Both are functions of C, and most asks have neither.
        if chosen_callback() is not None or chosen_listener() is not None:
            ask = heard(
                self._method(method_or_name)[0].full_name, partial(self._ask, method_or_name, args, kwargs)
            )
            if ask is not None:
                return await ask
        if self._resets:
            await self._wait_reset()
        method, state = self._method(method_or_name)
        if method.yields:
            raise TypeError(
                f"{method.full_name} yields, but an ask has a single reply; open it as a program, and "
                "iterate: async with program.stream(...) as items"
            )
        bound = bind_arguments(method.full_name, method.signature, args, kwargs)
        out = bound.arguments.pop("out", None) if method.takes_out else None
        if method.out is None:
            return await self._counted(method, partial(self._ask_unknown, method, state, bound))
        make, opened = message_class(MethodCall, method.full_name), self._opened
        call = make(opened.library, method, bound, opened, state, out)
        return await self._counted(method, partial(self.device.ask, call))

    async def _counted(self, method: ProgramMethod, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call that blocks resets, and convert its errors to the errors of the method."""
        self._asking += 1
        try:
            return await ask()
        except Refused as refused:
            raise own_error(refused, method)  # noqa: B904  # its cause is set there
        except ActorFailedError as error:
            # The supervisor is a child of the context; a crashed program is a child of the supervisor.
            if error.path.rpartition("/")[0] == f"{self.device.path}/context":
                self._ended = self.device.generation
            raise
        finally:
            self._asking -= 1
            if not self._asking and self._idle is not None:
                self._idle.set()

    async def _ask_unknown(self, method: ProgramMethod, state: Sequence[StateArray], bound: Any) -> Any:
        """Call a method, and fetch its result, unless the reply already has it."""
        for number in itertools.count():
            generation = self.device.generation
            try:
                return await self._ask_once(method, state, bound)
            except Refused:
                raise  # nothing was kept
            except LibraryError as error:
                if error.code != INSTANCE_LOST:
                    raise
                # This caller must not suffer from a neighbour's error; but losing a result with its context
                # is like losing the call.
                is_lost = self.device.generation != generation
                if method.changes or number >= (self.device.options.retry if is_lost else _MOST_REPEATS):
                    raise lost(method, error) from error
        raise AssertionError  # pragma: no cover  # the loop has no end

    async def _ask_once(
        self,
        method: ProgramMethod,
        state: Sequence[StateArray],
        bound: Any,
        item: tuple[int, int] | None = None,
    ) -> Any:
        slot, forget = next(self._slots), tuple(itertools.islice(self._left, _MOST_FORGOTTEN))
        make, opened = message_class(MethodCall, method.full_name), self._opened
        fields = method, bound, opened, state, None, slot, forget, self._expectations, item
        try:
            returned = await self.device.ask(make(opened.library, *fields))
            self._left.difference_update(forget)
            for number in forget:
                self._held.pop(number, None)
            return END if returned.result == 0 else await self._fetch(method, slot, returned)
        except Refused:
            raise  # nothing was kept
        except BaseException:
            self._left.add(slot)
            raise

    def _stream(
        self, method_or_name: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> AbstractAsyncContextManager[ItemStream[Any]]:
        """Open a stream of a method that yields."""
        method, _ = self._method(method_or_name)
        bound = bind_items(method, args, kwargs)
        items = Items(
            method,
            bound,
            self.device,
            lambda: next(self._slots),
            partial(self._item, method_or_name),
            self._leave,
        )
        return items.open()

    async def _item(
        self, method_or_name: object, bound: inspect.BoundArguments, item: tuple[int, int]
    ) -> Any:
        """Request an item of a method that yields; `END` after the last one."""
        if chosen_callback() is not None or chosen_listener() is not None:
            ask = heard(
                self._method(method_or_name)[0].full_name, partial(self._item, method_or_name, bound, item)
            )
            if ask is not None:
                return await ask
        if self._resets:
            await self._wait_reset()
        method, state = self._method(method_or_name)
        try:
            return await self._counted(method, partial(self._ask_once, method, state, bound, item))
        except LibraryError as error:
            if error.code != INSTANCE_LOST:
                raise
            raise lost(method, error) from error

    def _leave(self, number: int, bound: inspect.BoundArguments) -> None:
        """Have a later call close a generator, because it takes too long now."""
        if not self._is_closed:
            self._left.add(number)
            self._held[number] = bound

    async def _fetch(self, method: ProgramMethod, slot: int, returned: Returned) -> Any:
        library, result = self._opened.library, returned.result
        if isinstance(result, int):
            message = message_class(TellResult, f"{method.full_name}.result")
            result = cast("CallResult", await self.device.ask(message(library, slot, result)))
            self._left.add(slot)
        if result.arrays is None:
            return build(result.tree, returned.expected)
        self._expectations.note(returned.keys, tuple((dtype, tuple(shape)) for dtype, shape in result.arrays))
        arrays: list[object] = []
        if result.arrays:
            fetch = message_class(Fetch, f"{method.full_name}.fetch")
            arrays = await self.device.ask(fetch(library, slot, result.arrays))
            self._left.discard(slot)
        return build(result.tree, arrays)

    def _method(self, method_or_name: object) -> tuple[ProgramMethod, Sequence[StateArray]]:
        self._check_open()
        entry = self._methods.get(method_or_name) if isinstance(method_or_name, Hashable) else None
        if entry is None:
            method = self._find(method_or_name)
            entry = self._methods[method_or_name] = method, _one_of_each_block(self._opened.state, method)
        return entry

    def _find(self, method_or_name: object) -> ProgramMethod:
        raise NotImplementedError


class Program(OpenProgram, Generic[T]):
    """A class of your own that runs on a device. Made by `open_program`."""

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
        """Call a method in the process of the program, and wait for its result.

        Args:
            method: The method, as ``Encoder.encode``; or its name.
            args: Arguments of the method: device arrays, NumPy arrays, which are copied to the device first,
                None, numbers, strings, bytes, and dicts, lists and tuples of these.
            kwargs: Keyword arguments of the method.

        Returns:
            The result, with references in place of arrays. Type checkers know its type if the method is
            annotated with numbers, strings, collections of these, or a NumPy array; otherwise it is Any.

        Raises:
            TypeError, ValueError, AttributeError: The method does not exist, or does not take the arguments.
            StaleRefError: An array was released or lost, possibly one of the constructor.
            Refused: The method refuses the request. Errors of the classes declared by ``method(refuses=...)``
                are also refusals, and are raised unchanged. The program continues.
            ActorFailedError: The method raised another error, which is the cause. The program restarts, or
                has ended because it failed more often than its intensity allows.
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

        Each item is an operation, and its result follows the rules of `ask`. Other calls may be served
        between two items. At most `prefetch` items are unread (see `method`), so a slow reader delays the
        method. At the end of the block the generator is closed, between two items: code that runs then sees
        `is_cancelled`, and its ``finally`` runs. A deadline ends it the same way. The arrays among the
        arguments live until then. A thread-local setting must not span a ``yield``.

        A lost context ends a stream by `ContextLostError`, and so does a restart of the program. With
        ``method(resumes=True)`` the stream continues: the method is called again, with the yielded items as
        `resume`. So the reader sees no gap, and no item twice. After eight losses without an item in between
        it ends.

        Args:
            method: The method, as ``Model.generate``; or its name.
            args: Its arguments, as for `ask`. NumPy arrays are copied to the device once.
            kwargs: Its keyword arguments.

        Returns:
            An async context manager around the async iterator.

        Raises:
            TypeError, ValueError, AttributeError: The method does not exist, does not yield, or does not take
                the arguments.
            Exception: The iterator raises the errors of `ask`, at the item that failed. The end of the block
                raises errors of the generator while it is closed.
        """
        return self._stream(method, args, kwargs)

    async def reset(self, /, *args: object, **kwargs: object) -> None:
        """Make the program again, instead of closing it and opening another one.

        Its constructor gets its previous arguments, with the given ones replaced. So ``reset(weights=saved)``
        gives new contents to damaged or lost ``weights``. Other arrays stay as they are.

        Running calls end first. Later calls wait, 1024 at most, and run on the new instance. Several resets
        run one after the other, before the waiting calls. If a reset fails or is cancelled, nothing is
        replaced: the program keeps its previous arrays, and the next call makes an instance from these.

        Restarts are counted from zero, and a program that has ended for good lives again. It takes memory for
        both sets of arrays, because the previous arrays exist until it is done.

        Args:
            args: Arguments of the constructor, as for `open_program`. Arrays have the dtype and shape of the
                arrays that they replace.
            kwargs: Keyword arguments of the constructor.

        Raises:
            TypeError, ValueError: Arguments that the constructor does not take; an array with another dtype,
                shape or device.
            StaleRefError: A retained or new array is damaged, lost or released.
            ContextLostError: The context was lost meanwhile, and more often than `retry` allows.
            ActorStoppedError: The program is closed.
            NotSupportedError: In the step of a graph.
            Exception: The error of the constructor or `warm_up`, with a note that names it.
        """
        await self._reset(args, kwargs)

    def operation(self, method: Callable[Concatenate[T, ...], Any] | str) -> type[Operation[Any, Any]]:
        """The class of the operations that call a method: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(method).full_name)

    def _find(self, method_or_name: object) -> ProgramMethod:
        return find_method(cast("type[object]", self._opened.target), method_or_name)

    if not TYPE_CHECKING:  # a type checker would find every attribute with it

        def __getattr__(self, name: str) -> Any:
            cls, advice = self._opened.target, ""
            if callable(getattr(cls, name, None)):
                advice = f"; write await program.ask({cls.__name__}.{name}, ...)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")


class FunctionProgram(OpenProgram, Generic[P, ReplyT_co]):
    """A function of your own that runs on a device. Made by `open_program`."""

    async def ask(self, *args: P.args, **kwargs: P.kwargs) -> ReplyT_co:
        """Call the function where it runs, and wait for its result; see `Program.ask`."""
        return cast("ReplyT_co", await self._ask(None, args, kwargs))

    def stream(
        self: FunctionProgram[P, Iterator[ItemT]], *args: P.args, **kwargs: P.kwargs
    ) -> AbstractAsyncContextManager[ItemStream[ItemT]]:
        """Call the function, which yields, and iterate over its items; see `Program.stream`."""
        return self._stream(None, args, kwargs)

    async def reset(self) -> None:
        """Make it again; it lives again if it has ended for good. See `Program.reset`."""
        await self._reset((), {})

    def operation(self) -> type[Operation[Any, Any]]:
        """Return the class of the operations that call it: `trio_accel.testing.inject_fault` takes it."""
        return message_class(MethodCall, self._find(None).full_name)

    def _find(self, method_or_name: object) -> ProgramMethod:
        return describe_function(self._opened.target)


async def _end(opened: Opened) -> None:
    """Stop all contexts from making it again; takes a bounded time, even if a call does not end."""
    with trio.move_on_after(opened.device.options.close_grace + 1.0, shield=True):
        await opened.device.close_library(opened.library)


def _one_of_each_block(state: Sequence[StateArray], method: ProgramMethod) -> Sequence[StateArray]:
    """Return the arrays that a method changes, and one array of each other block, for order and memory."""
    changed = [array for array in state if array.parameter in method.state]
    changed_blocks = {array.ref.block for array in changed}
    array_by_block = {array.ref.block: array for array in state if array.ref.block not in changed_blocks}
    return (*changed, *array_by_block.values())
