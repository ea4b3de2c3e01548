"""Durable entities: each message is one transaction of a store, before its reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import attrs
import trio

from ..actors import ActorFailedError, ActorStoppedError, Directive, Policy, Ref, Request, Restart, handles
from ..backends.base import ContextLostError, InputFailedError, StaleRefError
from ..devices import AccelRef
from ._entities import Entity, Home, Resident
from ._errors import FencedError, NotRepeatableError, StoreError
from ._frames import packed, unpack
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
    _number: int
    _replies: dict[str, bytes]

    async def ask(self, message: Any, number: str | None, *, is_told: bool) -> Any:
        async with self._lock:
            self._check()
            assert number is not None  # its reference has made one
            for attempt in range(_ATTEMPTS):
                try:
                    await self._run_once(message, number, is_told=is_told)
                    break
                except (ContextLostError, StaleRefError, InputFailedError):
                    # A device has lost its context, and nothing of this message is in the store.
                    if attempt + 1 == _ATTEMPTS:
                        raise
                except (ActorStoppedError, ActorFailedError):
                    # If its home has ended it, the store has nothing of this message, and it is asked again.
                    self._check()
                    raise
            return unpack([self._replies[number]])

    async def _run_once(self, message: Any, number: str, *, is_told: bool) -> None:
        is_whole = False
        try:
            ref = self._ref or await self._recover()
            if number not in self._replies:
                # A handler may change its message.
                text = packed((message, is_told))
                try:
                    result = await self._run(ref, message, number, is_told=is_told)
                except self._cls.refuses:
                    is_whole = True
                    raise
                await self._write(ref, number, text, packed(result))
            is_whole = True
        finally:
            if not is_whole and self._ref is not None:
                # Its arrays differ from the store, so the next message begins from the store.
                self._ref.cancel("its state is not that of the store")
                self._ref = None

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
            state = await self._run(ref, _Save(), number)
            # The files of a save are on disk before the transaction begins.
            saved = packed(await trio.to_thread.run_sync(self._files.put, state))
        entry = Entry(message_number, number, text, reply)
        try:
            await self._stored(self._store.write, self._target.text, self._home.epoch, entry, saved)
        except FencedError:
            await self._settle(False)  # noqa: ASYNC120  # it is shielded
            raise
        self._number, self._replies[number] = message_number, reply
        if len(self._replies) > _REPLIES:
            del self._replies[next(iter(self._replies))]
        if saved is not None:
            await self._settle(True)

    async def _stored(self, call: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Call the store, and again if it could not begin because another process held the lock."""
        end = trio.current_time() + self._residents.patience
        while True:
            try:
                return await call(*arguments)
            except StoreError as error:
                if error.is_begun or trio.current_time() >= end:
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

    async def _recover(self) -> Ref[Any]:
        """Start it, and restore its state from the store."""
        directives: dict[type[Exception], Directive] = {Exception: Directive.STOP}
        policy = Policy(directives=directives | dict.fromkeys(self._cls.refuses, Directive.RESUME))
        store, name = self._store, self._target.text
        self._ref, self._home = await self._spawn(policy)
        journal = await self._stored(store.take, name, self._home.epoch)
        saved = None if journal.saved is None else unpack([journal.saved[1]])
        self._files = ArrayFiles(store.folder, name, self._home.epoch)
        saved = await trio.to_thread.run_sync(self._files.load, saved)
        await self._run(self._ref, _Load(saved), None)
        for entry in journal.entries:
            message, is_told = unpack([entry.message])
            reply = packed(await self._run(self._ref, message, entry.id, is_told=is_told))
            # Bytes of equal values differ until they have been read once.
            if packed(unpack([reply])) != packed(unpack([entry.reply])):
                raise NotRepeatableError(
                    f"{name}: message {entry.number}, {type(message).__name__}, has replied "
                    f"{unpack([reply])!r}, and {unpack([entry.reply])!r} before"
                )
        self._number, self._replies = journal.number, dict(journal.replies)
        return self._ref


class DurableEntity(Entity):
    """An entity whose messages are kept in a store, so that it continues on any node.

    Each message is one transaction, before its reply. At a new home, `load` gets the last saved state, and
    later messages run again; so handlers must not use a clock or randomness of their own. A message with a
    known id gets the stored reply, and is not executed. An error outside of `refuses` ends the incarnation,
    and the next one begins from the store, so that half-changed arrays are never seen.

    Attributes:
        save_every: The number of messages between two saves; with 1, no message ever runs again.
        refuses: Errors of handlers that have not changed anything.
    """

    save_every: ClassVar[int] = 20
    refuses: ClassVar[tuple[type[Exception], ...]] = ()
    is_durable: ClassVar[bool] = True
    resident: ClassVar[type[Resident]] = _DurableResident

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
