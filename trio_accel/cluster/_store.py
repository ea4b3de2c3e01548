"""Stores of durable entities: the common part, and PostgreSQL."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import attrs
import trio
from attrs.converters import optional

from ..actors import TaskLock, is_number, must_be_whole, run_in_thread, validator
from ..backends.base.kit.modules import deferred_extra
from ._errors import FencedError, StoreError
from ._seals import NO_SEAL, seal_of, sealed, unsealed

__all__ = ["Entry", "Journal", "PostgresStore", "Store"]

T = TypeVar("T")

# Two processes cannot create a table at the same time, even with `if not exists`; so they take this lock.
_TABLES_LOCK = 0x74_72_69_6F

# Fixed-size columns come first, because columns after long byte strings are slow to find.
_TABLES = """
    accel_epoch (id integer primary key, epoch bigint not null, program text not null);
    accel_owners (entity text primary key, epoch bigint not null);
    accel_saves (entity text primary key, number bigint not null, saved BYTES not null);
    accel_messages (entity text, number bigint, at double precision not null, id text not null,
        message BYTES not null, reply BYTES not null, primary key (entity, number), unique (entity, id))"""
_TABLE_NAMES = frozenset({"accel_epoch", "accel_owners", "accel_saves", "accel_messages"})
_COUNT = """insert into accel_epoch values (1, 1, ?)
    on conflict (id) do update set epoch = accel_epoch.epoch + 1, program = excluded.program"""
_CLAIM_SQL = """insert into accel_owners values (?, ?)
    on conflict (entity) do update set epoch = excluded.epoch where accel_owners.epoch <= excluded.epoch"""
_OWNER = "select epoch, NOW from accel_owners where entity = ? FOR UPDATE"
# The time of a row is checked before it decides on the row, so it is no condition here.
_READ = "select number, at, id, message, reply from accel_messages where entity = ? order by number"
_KEEP = "insert into accel_messages values (?, ?, ?, ?, ?, ?)"
_SAVE = """insert into accel_saves values (?, ?, ?)
    on conflict (entity) do update set number = excluded.number, saved = excluded.saved"""
_EMPTY = "update accel_messages set message = ? where entity = ? and number > ? and number <= ?"
_OLD = "select number, at, id, reply from accel_messages where entity = ? and number > ? and at < ?"
_FORGOTTEN = "from accel_messages where entity = ? and (number <= ? or at < ?)"
_seconds = validator("be seconds above 0", lambda value: is_number(value, 1e-3, 1e9))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that processes in other folders understand.

    Raises:
        TypeError: It is not a path.
    """
    if not isinstance(cast("object", path), (str, os.PathLike)):
        raise TypeError(f"a store's path or folder must be a str or a path, got {path!r}")
    return os.path.abspath(path)


@attrs.frozen
class Entry:
    """A message in a journal.

    Attributes:
        number: The number, from 1 on for each entity.
        id: The id that identifies a repeated message; unique for an entity.
        message: The message.
        reply: The reply to it.
    """

    number: int
    id: str
    message: bytes
    reply: bytes


@attrs.frozen
class Journal:
    """The contents of a store from which an entity recovers.

    Attributes:
        number: The number of the last message; 0 without any.
        saved: The number of the last message in the save, and the saved state; None without any.
        entries: The messages after the save, in order.
        replies: The replies by message id, including messages before the save.
    """

    number: int
    saved: tuple[int, bytes] | None
    entries: tuple[Entry, ...]
    replies: Mapping[str, bytes]


@attrs.frozen
class Rows:
    """The rows of an entity.

    Attributes:
        saved: See `Journal.saved`.
        seal: The seal of the save.
        messages: The messages in order, with their times.
    """

    saved: tuple[int, bytes] | None
    seal: bytes
    messages: tuple[tuple[Entry, float], ...]


@attrs.frozen
class StateChange:
    """The effect of a save.

    Attributes:
        seal: The seal of the save.
        forgotten: The numbers of the removed messages.
    """

    seal: bytes
    forgotten: Sequence[int]


@attrs.define(kw_only=True, eq=False)
class Store:
    """Stores the messages of durable entities, and their owners, in a database.

    A store is handed to other processes before it is opened, and each of them opens its own connection.

    Calls run one at a time, in a thread, over one connection. A call that has begun is always awaited, even
    if cancelled, so that its effect is known. After any error the connection is closed, which rolls back the
    transaction; the next call opens another one.

    Attributes:
        is_shared: Whether nodes on several hosts may use it.
        ids: The number of replies that are kept for messages before the last save.
        keep: The seconds for which these replies are kept, by the clock of the database.
        timeout: The maximum seconds of a call.
        folder: The absolute path of a folder that all nodes see, and no other database uses. Saved arrays
            from 1 MiB on are safetensors files there, written when their content is new. It is created at
            first use; its parent must exist. With None, arrays stay in the database.
    """

    # The database's replacements for words in capitals, and for the placeholder of a value.
    words: ClassVar[Mapping[str, str]]
    is_shared: ClassVar[bool]

    ids: int = attrs.field(default=10_000, validator=must_be_whole(1))
    keep: float = attrs.field(default=86_400.0, validator=_seconds)
    timeout: float = attrs.field(default=5.0, validator=_seconds)
    folder: str | None = attrs.field(default=None, converter=optional(absolute))
    _is_open: bool = attrs.field(default=False, init=False, repr=False)
    _database: Any = attrs.field(default=None, init=False, repr=False)
    _lock: TaskLock = attrs.field(factory=TaskLock, init=False, repr=False)
    # An abandoned call still uses its thread for a while, and the next one waits for that.
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False, repr=False
    )

    def __reduce__(self) -> tuple[object, ...]:
        options = {field.name: getattr(self, field.name) for field in attrs.fields(type(self)) if field.init}
        return partial(type(self), **options), ()

    async def open(self) -> None:
        """Connect, and create missing tables.

        Raises:
            StoreError: The store cannot be reached.
        """
        self._is_open = True
        await self._run(self._make_tables)

    async def aclose(self) -> None:
        """Disconnect; later calls are refused."""
        self._is_open = False
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self.timeout):
            async with self._lock:
                await run_in_thread(self._disconnect, limiter=self._limiter)

    async def next_epoch(self, program: str = "", *, takes_over: bool = True) -> int:
        """Return a number above all numbers returned before, in any process.

        Args:
            program: The caller's id.
            takes_over: Whether it owns the store from now on; otherwise it must be the last owner.

        Raises:
            FencedError: Another program has taken the store since.
            StoreError: The store cannot be reached, or has failed.
        """
        return await self._run(self._next_epoch, program, takes_over)

    async def take(self, entity: str, epoch: int) -> Journal:
        """Own an entity from now on, so that an owner with an earlier epoch can no longer write.

        Raises:
            FencedError: An owner with a later epoch exists.
            StoreError: The store cannot be reached, or has failed.
        """
        return await self._run(self._take, entity, epoch)

    async def write(self, entity: str, epoch: int, entry: Entry, saved: bytes | None = None) -> None:
        """Store a message, and the state saved after it: both or none.

        Raises:
            FencedError: The entity has an owner with another epoch.
            StoreError: The store cannot be reached, has failed, or already has the number or the id. The
                message may have been kept; `take` finds out.
        """
        await self._run(self._write, entity, epoch, entry, saved)

    async def save(self, entity: str, epoch: int, number: int, saved: bytes) -> None:
        """Store the state after the last message, so that no message runs again.

        Args:
            entity: The name of the entity.
            epoch: The epoch of its owner.
            number: The number of its last message.
            saved: The state.

        Raises:
            FencedError: The entity has an owner with another epoch.
            StoreError: The store cannot be reached, or has failed; the state may have been kept.
        """
        await self._run(self._save, entity, epoch, number, saved)

    async def check(self, entity: str, epoch: int) -> None:
        """Return if an owner still has its entity.

        Raises:
            FencedError: The entity has an owner with another epoch.
            StoreError: The store cannot be reached, or has failed.
        """
        await self._run(self._check_owner, entity, epoch)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        async with self._lock:
            if not self._is_open:
                raise StoreError(
                    f"{type(self).__name__} is not open; write await store.open() before its first use, and "
                    "await store.aclose() after the last"
                )
            # The thread takes it and writes, or the time-out does and the thread fails: `pop` is atomic.
            right = {"write": True}
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self.timeout):
                call = partial(self._transact, right, work, *arguments)
                try:
                    return await run_in_thread(call, limiter=self._limiter, is_abandonable=True)
                except GeneratorExit:
                    # The caller has left half-way, so a call that has not begun must not write.
                    right.pop("write", None)
                    raise
            is_begun = not right.pop("write", False)
            # A thread that waits for the database cannot be cancelled.
            self._give_up()
            text = f"{type(self).__name__} has not answered within {self.timeout:g} s"
            raise StoreError(text, is_begun=is_begun)

    def _transact(self, right: dict[str, bool], work: Callable[..., T], *arguments: Any) -> T:
        is_begun = False
        try:
            self._begin()
            is_begun = right.pop("write")
            result = work(*arguments)
            self._commit()
            return result
        except Exception as error:
            self._disconnect()
            if isinstance(error, (FencedError, StoreError)):
                raise
            text = f"{type(self).__name__}: {type(error).__name__}: {error}"
            raise StoreError(text, is_begun=is_begun, is_damaged=self._has_damage(error)) from error

    def _begin(self) -> None:
        """Begin a transaction, and connect first if necessary."""
        if self._database is None:
            self._connect()
        self._sql("BEGIN")

    def _commit(self) -> None:
        self._sql("commit")

    def _connect(self) -> None:
        """Connect. A lock timeout is shorter than `timeout`, so that the database can report the lock."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        # A lost connection cannot be closed properly.
        with suppress(Exception):
            if database is not None:
                database.close()

    def _has_damage(self, error: Exception) -> bool:
        """Return whether the database reports that it is damaged."""
        return False

    def _give_up(self) -> None:
        """Make a call fail that has taken too long; runs in Trio's thread."""

    def _sql(self, statement: str, *values: object) -> Sequence[Any]:
        for word, said in self.words.items():
            statement = statement.replace(word, said)
        with closing(self._database.execute(statement, values)) as cursor:
            return cursor.fetchall() if cursor.description else ()

    def _number(self, statement: str, *values: object) -> int:
        rows = self._sql(statement, *values)
        return typed(rows[0][0], int) if rows else 0

    def _make_tables(self) -> None:
        existing = _TABLE_NAMES & {str(row[0]) for row in self._sql("EXISTING")}
        if existing and (missing := ", ".join(sorted(_TABLE_NAMES - existing))):
            text = f"{type(self).__name__} is damaged: it lacks the table {missing}; restore a backup"
            raise StoreError(text, is_damaged=True)
        for table in _TABLES.split(";"):
            self._sql(f"create table if not exists {table}")

    def _next_epoch(self, program: str, takes_over: bool) -> int:
        rows = self._sql("select program, epoch from accel_epoch where id = 1 FOR UPDATE")
        for owner, epoch in rows:
            typed(owner, str)
            typed(epoch, int)
        if rows and not takes_over and rows[0][0] != program:
            raise FencedError("another program has opened the store since")
        self._sql(_COUNT, program)
        return self._number("select epoch from accel_epoch where id = 1")

    def _take(self, entity: str, epoch: int) -> Journal:
        now = self._claim(entity, epoch)
        return self._journal(self._rows(entity), now)

    def _claim(self, entity: str, epoch: int) -> float:
        """Own an entity, and return the time by the clock of the database."""
        # The owner's row is locked from here on, so messages of other owners are stored by now, or never.
        self._sql(_CLAIM_SQL, entity, epoch)
        owner, now = self._owner(entity)
        if owner < epoch:
            text = (
                f"the store is damaged: the owner of {entity} stays of epoch {owner} when {epoch} claims it"
            )
            raise StoreError(f"{text}; restore a backup", is_damaged=True)
        self._must_own(entity, owner, epoch)
        return now

    def _rows(self, entity: str) -> Rows:
        """Return the save and the messages of an entity.

        Raises:
            StoreError: A row is damaged.
        """
        saved, seal = None, NO_SEAL
        for number, data in self._sql("select number, saved from accel_saves where entity = ?", entity):
            saved, seal = (typed(number, int), unsealed(data, entity, number, "saved")), seal_of(data)
        rows = self._sql(_READ, entity)
        messages = tuple((_entry(entity, *row), row[1]) for row in rows)
        numbers = [entry.number for entry, _ in messages]
        saved_number = saved[0] if saved else 0
        later = [number for number in numbers if number > saved_number]
        missing = set(range(saved_number + 1, saved_number + 1 + len(later))) - set(later)
        if missing or any(map(operator.ge, numbers, numbers[1:])):
            # Without a missing number, one occurs twice.
            fault = f"message {min(missing)} is missing" if missing else "a message occurs twice"
            text = f"the store is damaged at {entity}: {fault}; restore a backup"
            raise StoreError(text, is_damaged=True)
        return Rows(saved, seal, messages)

    def _journal(self, rows: Rows, now: float) -> Journal:
        saved_number = rows.saved[0] if rows.saved else 0
        entries = tuple(entry for entry, _ in rows.messages if entry.number > saved_number)
        number = entries[-1].number if entries else saved_number
        first, oldest = min(saved_number, number - self.ids), now - self.keep
        replies = {
            entry.id: entry.reply
            for entry, timestamp in rows.messages
            if entry.number > first and (entry.number > saved_number or timestamp >= oldest)
        }
        return Journal(number, rows.saved, entries, replies)

    def _write(self, entity: str, epoch: int, entry: Entry, saved: bytes | None) -> StateChange | None:
        now = self._check_owner(entity, epoch)
        number = entry.number
        message = sealed(entry.message, entity, number, "message")
        reply = sealed(entry.reply, entity, number, entry.id, now, "reply")
        self._sql(_KEEP, entity, number, now, entry.id, message, reply)
        return None if saved is None else self._keep_state(entity, number, saved, now)

    def _save(self, entity: str, epoch: int, number: int, saved: bytes) -> StateChange:
        now = self._check_owner(entity, epoch)
        return self._keep_state(entity, number, saved, now)

    def _keep_state(self, entity: str, number: int, saved: bytes, now: float) -> StateChange:
        saved_number = self._number("select number from accel_saves where entity = ?", entity)
        data = sealed(saved, entity, number, "saved")
        self._sql(_SAVE, entity, number, data)
        # Of messages that never run again, only the replies are needed.
        self._sql(_EMPTY, b"", entity, saved_number, number)
        # Searching for old ones takes milliseconds, so not every save does it.
        every = max(1, self.ids // 10)
        forgotten: Sequence[int] = ()
        if number // every > saved_number // every:
            first, oldest = number - self.ids, now - self.keep
            for row in self._sql(_OLD, entity, first, oldest):
                _reply(entity, *row)
            forgotten = [row[0] for row in self._sql(f"select number {_FORGOTTEN}", entity, first, oldest)]
            self._sql(f"delete {_FORGOTTEN}", entity, first, oldest)
        return StateChange(seal_of(data), forgotten)

    def _check_owner(self, entity: str, epoch: int) -> float:
        """Return the time by the clock of the database, if the entity has this owner."""
        owner, now = self._owner(entity)
        self._must_own(entity, owner, epoch)
        return now

    def _owner(self, entity: str) -> tuple[int, float]:
        """Return the epoch of the owner, 0 without any, and the time by the clock of the database."""
        for owner, now in self._sql(_OWNER, entity):
            return typed(owner, int), typed(now, float)
        return 0, 0.0

    def _must_own(self, entity: str, owner: int, epoch: int) -> None:
        if owner != epoch:
            # Owners get their epochs from this count.
            counts = self._sql("select epoch from accel_epoch where id = 1")
            if counts and owner > typed(counts[0][0], int):
                text = (
                    f"the store is damaged: the owner of {entity} is of epoch {owner}, which no one has got"
                )
                raise StoreError(f"{text}; restore a backup", is_damaged=True)
            raise FencedError(f"{entity}: its owner is of epoch {owner}, and this one of epoch {epoch}")


def _entry(
    entity: str, number: object, timestamp: object, id_: object, message: object, reply: object
) -> Entry:
    """Return the message of a row, after a check of all its columns."""
    whole_reply = _reply(entity, number, timestamp, id_, reply)
    whole_message = unsealed(message, entity, number, "message")
    return Entry(typed(number, int), typed(id_, str), whole_message, whole_reply)


def _reply(entity: str, number: object, timestamp: object, id_: object, reply: object) -> bytes:
    """Return the reply of a row, after a check of its columns."""
    typed(timestamp, float)
    return unsealed(reply, entity, number, id_, timestamp, "reply", former_row=(entity, number, id_, "reply"))


def typed(value: object, kind: type[T]) -> T:
    """Return a value of a row, which SQLite may return with another type."""
    if not isinstance(value, kind):
        text = f"the store is damaged: a row must have {kind.__name__}, and has {type(value).__name__}"
        raise StoreError(f"{text}; restore a backup", is_damaged=True)
    return value


@attrs.define(eq=False)
class PostgresStore(Store):
    """A store in a PostgreSQL database, for nodes on all hosts. Needs the extra ``postgres``.

    The tables, with the prefix ``accel_``, are created in the first schema of the search path. The server's
    ``synchronous_commit`` determines how safe acknowledged messages are.

    Attributes:
        dsn: The database, as a URL or ``"host=... dbname=..."``.
        folder: See `Store.folder`; by default None, because it is unknown which folders all hosts see.
    """

    is_shared: ClassVar[bool] = True
    words: ClassVar[Mapping[str, str]] = {
        "?": "%s",
        # After waiting for a lock, a call must see the writes made meanwhile, whatever the default is.
        "BEGIN": "begin isolation level read committed",
        "NOW": "extract(epoch from clock_timestamp())::float8",
        "BYTES": "bytea",
        "EXISTING": "select tablename from pg_tables where schemaname = any(current_schemas(false))",
    }

    # It may have a password.
    dsn: str = attrs.field(repr=False, validator=attrs.validators.instance_of(str))
    _load_psycopg: Callable[[], Any] = attrs.field(
        factory=partial(deferred_extra, "psycopg", "postgres"), init=False, repr=False
    )
    _is_given_up: bool = attrs.field(default=False, init=False, repr=False)

    def _connect(self) -> None:
        # libpq accepts only integers of at least two seconds.
        seconds = max(2, round(self.timeout))
        self._database = self._load_psycopg().connect(self.dsn, autocommit=True, connect_timeout=seconds)
        milliseconds = round(900 * self.timeout)
        self._database.execute(f"set statement_timeout = {milliseconds}")
        # The next owner must not wait for the lock of an owner stopped within a transaction.
        self._database.execute(f"set idle_in_transaction_session_timeout = {milliseconds // 2 + 1}")

    def _begin(self) -> None:
        is_kept, self._is_given_up = self._database is not None, False
        try:
            super()._begin()
        except Exception:
            if self._is_given_up or not is_kept:
                raise
            # The server may have been started again since the last call.
            self._disconnect()
            super()._begin()

    def _give_up(self) -> None:
        self._is_given_up = True
        # Other threads can only close the socket, which wakes up the waiting thread with an error.
        with suppress(Exception), socket.socket(fileno=os.dup(self._database.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def _make_tables(self) -> None:
        self._sql("select pg_advisory_xact_lock(?)", _TABLES_LOCK)
        super()._make_tables()


def check_store(label: str, store: object) -> None:
    """Refuse anything but a store or None.

    Raises:
        TypeError: It is something else.
    """
    if store is not None and not isinstance(store, Store):
        hint = f"; write SqliteStore({os.fspath(store)!r})" if isinstance(store, (str, os.PathLike)) else ""
        raise TypeError(f"{label}: store must be a Store, got {store!r}{hint}")


@asynccontextmanager
async def opened_store(store: Store | None) -> AsyncGenerator[None]:
    """Keep a store open for the block, if there is one."""
    if store is not None:
        await store.open()
    try:
        yield
    finally:
        if store is not None:
            with trio.CancelScope(shield=True):
                await store.aclose()
