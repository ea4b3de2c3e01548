"""Durable entities: each message is one transaction of a store, before its reply."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import attrs
import trio

from ..actors import (
    ActorFailedError,
    ActorStoppedError,
    Directive,
    Policy,
    Ref,
    Request,
    Restart,
    describe,
    handles,
)
from ..backends.base import ContextLostError, InputFailedError, StaleRefError
from ..devices import AccelRef
from ._entities import Entity, Home, Resident
from ._errors import FencedError, NotRepeatableError, StoreError
from ._frames import are_same, packed, unpack
from ._saves import ArrayFiles
from ._store import Entry, Store

__all__ = ["DurableEntity", "Saved"]

Saved: TypeAlias = Mapping[str, Any]
"""The state of a durable entity: plain values and arrays by name."""

# The number of replies kept in memory for repeated messages; and the number of attempts for a message whose
# device loses its context.
_REPLIES, _ATTEMPTS = 10_000, 3
# Seconds before a store that could not begin is called again.
_PAUSE = 0.05
# A stored message has the message, and whether it was told.
_MESSAGE_PARTS = 2
# The maximum length of a container whose items are compared after a handler that only reads.
_MAX_COMPARED = 1000

T = TypeVar("T")


@attrs.frozen
class _Save(Request["DurableEntity", "dict[str, Any]"]):
    """Request the state to save."""


@attrs.frozen
class _Load(Request["DurableEntity", None]):
    """Begin with a saved state."""

    saved: Saved | None


@attrs.frozen
class _Idle(Request["DurableEntity", None]):
    """Wait for earlier messages."""


class _DurableResident(Resident):
    """A durable entity with its home here: it serves its messages in order, each with a transaction."""

    restart: ClassVar[Restart] = Restart.TEMPORARY
    _home: Home
    _files: ArrayFiles
    # The numbers of the last message, and of the last one in a save.
    _number: int = 0
    _saved_number: int = 0
    _replies: dict[str, bytes]

    async def ask(self, message: Any, number: str | None, *, is_told: bool) -> Any:
        async with self._lock:
            self._check()
            assert number is not None  # its reference has made one
            try:
                return unpack([await self._repeated(self._run_once, message, number, is_told)])
            except (ActorStoppedError, ActorFailedError):
                # If its home has ended it, the store has nothing of this message, and it is asked again.
                self._check()
                raise

    async def save(self) -> None:
        # Another owner saves it itself.
        with suppress(FencedError):
            await self._repeated(self._save_unsaved)

    async def _repeated(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Do some work, and again if a device loses its context, because the store has nothing of it then."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await work(*arguments)
            except (ContextLostError, StaleRefError, InputFailedError):
                self._discard()
        return await work(*arguments)

    def _discard(self) -> None:
        """End an incarnation that differs from the store; the next one begins from the store."""
        if self._ref is not None:
            self._ref.cancel("its state is not that of the store")
            self._ref = None

    async def _run_once(self, message: Any, number: str, is_told: bool) -> bytes:
        is_whole = False
        try:
            ref = self._ref or await self._recover()
            reply = self._replies.get(number)
            if reply is None:
                # A handler may change its message.
                text = b"" if self._only_reads(message) else packed((message, is_told))
                try:
                    result = await self._run(ref, message, number, is_told=is_told)
                except self._cls.refuses:
                    is_whole = True
                    raise
                reply = packed(result)
                if text:
                    await self._write(ref, number, text, reply)
                else:
                    # A later owner may have changed the state.
                    await self._stored(self._store.check, self._target.text, self._home.epoch)
            is_whole = True
            return reply
        finally:
            if not is_whole:
                self._discard()

    def _only_reads(self, message: object) -> bool:
        handler = self._cls.__handlers__.get(type(message))
        return handler is not None and handler.reads

    @property
    def _store(self) -> Store:
        store: Store | None = self._residents.store
        if store is None:
            raise TypeError(f"{self._target.text} is a DurableEntity, which needs a cluster with a store")
        return store

    async def _write(self, ref: Ref[Any], number: str, text: bytes, reply: bytes) -> None:
        """Store a message, and after every `save_every` messages also the state of the entity."""
        message_number, saved = self._number + 1, None
        if message_number % self._cls.save_every == 0:
            saved = await self._state(ref, number)
        entry = Entry(message_number, number, text, reply)
        await self._commit(saved, self._store.write, entry, saved)
        self._number, self._replies[number] = message_number, reply
        if len(self._replies) > _REPLIES:
            del self._replies[next(iter(self._replies))]
        if saved is not None:
            self._saved_number = message_number

    async def _save_unsaved(self) -> None:
        """Store the state, unless the last save has it."""
        if self._number == self._saved_number:
            return
        if self._ref is None or self._ref.is_terminated:
            # The table may have a newer epoch by now, which belongs to the next owner.
            await self._recover(self._home.epoch)
        assert self._ref is not None
        saved = await self._state(self._ref, None)
        await self._commit(saved, self._store.save, self._number, saved)
        self._saved_number = self._number

    async def _state(self, ref: Ref[Any], number: str | None) -> bytes:
        """Return the state to store; its files are on disk, because the transaction names them."""
        state = await self._run(ref, _Save(), number)
        return packed(await trio.to_thread.run_sync(self._files.put, state))

    async def _commit(
        self, saved: bytes | None, call: Callable[..., Awaitable[None]], *arguments: object
    ) -> None:
        try:
            await self._stored(call, self._target.text, self._home.epoch, *arguments)
        except FencedError:
            await self._settle(False)  # noqa: ASYNC120  # it is shielded
            raise
        if saved is not None:
            await self._settle(True)

    async def _stored(self, call: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Call the store, and again if it could not begin because another process held the lock."""
        end = trio.current_time() + self._residents.patience
        while True:
            try:
                return await call(*arguments)
            except StoreError as error:
                if error.is_begun or error.is_damaged or trio.current_time() >= end:
                    raise
            await trio.sleep(_PAUSE)

    async def _settle(self, is_kept: bool) -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._files.settle, is_kept)

    async def _run(self, ref: Ref[Any], message: Any, number: str | None, *, is_told: bool = False) -> Any:
        self._home.message_id = number
        try:
            if not is_told:
                return await ref.ask(message)
            await ref.tell(message)
            return await ref.ask(_Idle())
        except ActorFailedError as error:
            raise error.__cause__ or error from None
        except ActorStoppedError as error:
            # Nobody waits for a told message, so its error is the error with which the actor ended.
            raise (await ref.wait_terminated()).error or error from None

    async def _recover(self, epoch: int | None = None) -> Ref[Any]:
        """Start it, and restore its state from the store; own it by an epoch, or by that of the table."""
        directives: dict[type[Exception], Directive] = {Exception: Directive.STOP}
        policy = Policy(directives=directives | dict.fromkeys(self._cls.refuses, Directive.RESUME))
        store, name = self._store, self._target.text
        self._ref, self._home = await self._spawn(policy, epoch)
        journal = await self._stored(store.take, name, self._home.epoch)
        saved = None if journal.saved is None else self._stored_value("its save", journal.saved[1], _is_save)
        self._files = ArrayFiles(store.folder, name, self._home.epoch)
        saved = await trio.to_thread.run_sync(self._files.load, saved)
        await self._run(self._ref, _Load(saved), None)
        for entry in journal.entries:
            label = f"message {entry.number}"
            message, is_told = self._stored_value(label, entry.message, _is_message)
            if self._only_reads(message):
                continue
            reply = packed(await self._run(self._ref, message, entry.id, is_told=is_told))
            old_value = self._stored_value(f"the reply to {label}", entry.reply)
            if not are_same(new_value := unpack([reply]), old_value):
                raise NotRepeatableError(
                    f"{name}: {label}, {type(message).__name__}, has replied {new_value!r}, and "
                    f"{old_value!r} before; run it by the code of before, or declare its handler with "
                    "reads=True if it changes nothing"
                )
        self._number, self._replies = journal.number, dict(journal.replies)
        self._saved_number = 0 if journal.saved is None else journal.saved[0]
        return self._ref

    def _stored_value(
        self, label: str, data: bytes, is_whole: Callable[[Any], bool] = lambda value: True
    ) -> Any:
        try:
            value: Any = unpack([data])
            if not is_whole(value):
                raise ValueError(f"it is {value!r:.100}")  # noqa: TRY301  # as any damage
            return value
        except Exception as error:
            text = f"{self._target.text}: {label} in the store cannot be read: {describe(error)}"
            raise StoreError(text, is_damaged=True) from error


def _is_save(value: Any) -> bool:
    return isinstance(value, dict)


def _is_message(value: Any) -> bool:
    return isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == _MESSAGE_PARTS


def _parts(actor: object) -> dict[str, list[object]]:
    """Return the attributes of an actor, each with the items of a container."""
    names = vars(actor).keys() - {"context", "home"}
    return {name: [vars(actor)[name], *_items(vars(actor)[name])] for name in names}


def _items(value: object) -> list[object]:
    if not isinstance(value, (list, dict, set, bytearray, deque)):
        return []
    container = cast("Any", value)
    if len(container) > _MAX_COMPARED:
        return [len(container)]
    items = [*container.items()] if isinstance(value, dict) else [*container]
    return [part for item in items for part in (item if isinstance(value, dict) else (item,))]


def _must_be_equal(actor: object, message: object, old_parts: dict[str, list[object]]) -> None:
    new_parts = _parts(actor)
    for name in old_parts.keys() | new_parts.keys():
        old, new = old_parts.get(name, []), new_parts.get(name, [])
        if len(old) != len(new) or any(map(operator.is_not, old, new)):
            raise RuntimeError(
                f"{type(actor).__name__}: the handler of {type(message).__name__} has reads=True, and has "
                f"changed self.{name}; declare it without reads, because the change is not stored"
            )


def _checked(
    function: Callable[..., Coroutine[object, object, object]],
) -> Callable[..., Coroutine[object, object, object]]:
    """Make a handler that only reads fail if it changes an attribute."""

    @functools.wraps(function)
    async def check(self: object, message: object) -> object:
        old_parts = _parts(self)
        try:
            reply = await function(self, message)
        except Exception:
            _must_be_equal(self, message, old_parts)
            raise
        _must_be_equal(self, message, old_parts)
        return reply

    return check


class DurableEntity(Entity):
    """An entity whose messages are kept in a store, so that it continues on any node.

    Each message is one transaction, before its reply. At a new home, `load` gets the last saved state, and
    later messages run again; so handlers must not use a clock or randomness of their own. A message with a
    known id gets the stored reply, and is not executed. An error outside of `refuses` ends the incarnation,
    and the next one begins from the store, so that half-changed arrays are never seen. An orderly end saves
    the state, so that no message runs again.

    A message whose handler has ``@handles(..., reads=True)`` is not stored, so it never runs again, and its
    id is not remembered. If such a handler changes an attribute, or an item of a list, dict or set in one,
    the message fails and the change is undone. Changes deeper inside are not noticed.

    Attributes:
        save_every: The number of messages between two saves; with 1, no message ever runs again.
        refuses: Errors of handlers that have not changed anything.
    """

    save_every: ClassVar[int] = 20
    refuses: ClassVar[tuple[type[Exception], ...]] = ()
    is_durable: ClassVar[bool] = True
    resident: ClassVar[type[Resident]] = _DurableResident

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__handlers__ = {
            message: attrs.evolve(handler, function=_checked(handler.function), attempt=None)
            if handler.reads
            else handler
            for message, handler in cls.__handlers__.items()
        }

    async def save(self) -> Saved:
        """Return the state for `load`; nothing may change its arrays before the message is answered."""
        raise NotImplementedError(f"{type(self).__name__} must define save()")

    async def load(self, saved: Saved | None) -> None:
        """Begin with the state from `save`, with NumPy arrays; or with None at the very beginning."""
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    @handles(_Save)
    async def _save(self, message: _Save) -> dict[str, Any]:
        saved = await self.save()
        return {
            name: await value.to_host() if isinstance(value, AccelRef) else value
            for name, value in saved.items()
        }

    @handles(_Load)
    async def _load(self, message: _Load) -> None:
        await self.load(message.saved)

    @handles(_Idle)
    async def _idle(self, message: _Idle) -> None:
        pass
