"""Stores of durable entities: the common part, SQLite and PostgreSQL."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
import uuid
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
from ._marks import ChangeCount, Mark
from ._seals import sealed, unsealed

__all__ = ["Entry", "Journal", "PostgresStore", "SqliteStore", "Store"]

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
# SQLite's alone, see `SqliteStore`.
_COUNT_TABLE = """create table if not exists accel_changes (
    id integer primary key, store blob not null, number bigint not null)"""
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
_FORGET = "delete from accel_messages where entity = ? and (number <= ? or at < ?)"
# The size of SQLite's smallest page.
_LEAST_BYTES = 512
# A file with this size is checked at its opening, in less than 0.1 s.
_MAX_CHECKED_BYTES = 16 << 20
# SQLite's codes for a file that no repetition mends.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
# Another process writes or recovers the file, or opens it first; seconds between two attempts.
_BUSY, _POLL_INTERVAL = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}, 0.001
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
        return _typed(rows[0][0], int) if rows else 0

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
            _typed(owner, str)
            _typed(epoch, int)
        if rows and not takes_over and rows[0][0] != program:
            raise FencedError("another program has opened the store since")
        self._sql(_COUNT, program)
        return self._number("select epoch from accel_epoch where id = 1")

    def _take(self, entity: str, epoch: int) -> Journal:
        # The owner's row is locked from here on, so messages of other owners are stored by now, or never.
        self._sql(_CLAIM_SQL, entity, epoch)
        now = self._check_owner(entity, epoch)
        saves = self._sql("select number, saved from accel_saves where entity = ?", entity)
        saved = None
        if saves:
            number, data = saves[0]
            saved = (_typed(number, int), unsealed(data, entity, number, "saved"))
        saved_number = saved[0] if saved else 0
        rows = self._sql(_READ, entity)
        stored = [_entry(entity, *row) for row in rows]
        entries = tuple(entry for entry in stored if entry.number > saved_number)
        for expected, entry in enumerate(entries, saved_number + 1):
            if entry.number != expected:
                text = f"the store is damaged at {entity}: message {expected} is missing; restore a backup"
                raise StoreError(text, is_damaged=True)
        number = entries[-1].number if entries else saved_number
        first, oldest = min(saved_number, number - self.ids), now - self.keep
        replies = {
            entry.id: entry.reply
            for entry, row in zip(stored, rows, strict=True)
            if entry.number > first and (entry.number > saved_number or row[1] >= oldest)
        }
        return Journal(number, saved, entries, replies)

    def _write(self, entity: str, epoch: int, entry: Entry, saved: bytes | None) -> None:
        at = self._check_owner(entity, epoch)
        number = entry.number
        message = sealed(entry.message, entity, number, "message")
        reply = sealed(entry.reply, entity, number, entry.id, at, "reply")
        self._sql(_KEEP, entity, number, at, entry.id, message, reply)
        if saved is not None:
            self._keep_state(entity, entry.number, saved, at)

    def _save(self, entity: str, epoch: int, number: int, saved: bytes) -> None:
        now = self._check_owner(entity, epoch)
        self._keep_state(entity, number, saved, now)

    def _keep_state(self, entity: str, number: int, saved: bytes, now: float) -> None:
        saved_number = self._number("select number from accel_saves where entity = ?", entity)
        self._sql(_SAVE, entity, number, sealed(saved, entity, number, "saved"))
        # Of messages that never run again, only the replies are needed.
        self._sql(_EMPTY, b"", entity, saved_number, number)
        # Searching for old ones takes milliseconds, so not every save does it.
        every = max(1, self.ids // 10)
        if number // every > saved_number // every:
            first, oldest = number - self.ids, now - self.keep
            for row in self._sql(_OLD, entity, first, oldest):
                _reply(entity, *row)
            self._sql(_FORGET, entity, first, oldest)

    def _check_owner(self, entity: str, epoch: int) -> float:
        """Return the time by the clock of the database, if the entity has this owner."""
        rows = self._sql(_OWNER, entity)
        owner = _typed(rows[0][0], int) if rows else 0
        if owner != epoch:
            # Owners get their epochs from this count.
            counts = self._sql("select epoch from accel_epoch where id = 1")
            if counts and owner > _typed(counts[0][0], int):
                text = (
                    f"the store is damaged: the owner of {entity} is of epoch {owner}, which no one has got"
                )
                raise StoreError(f"{text}; restore a backup", is_damaged=True)
            raise FencedError(f"{entity}: its owner is of epoch {owner}, and this one of epoch {epoch}")
        return _typed(rows[0][1], float)


def _entry(entity: str, number: object, at: object, id_: object, message: object, reply: object) -> Entry:
    """Return the message of a row, after a check of all its columns."""
    whole_reply = _reply(entity, number, at, id_, reply)
    whole_message = unsealed(message, entity, number, "message")
    return Entry(_typed(number, int), _typed(id_, str), whole_message, whole_reply)


def _reply(entity: str, number: object, at: object, id_: object, reply: object) -> bytes:
    """Return the reply of a row, after a check of its columns."""
    _typed(at, float)
    return unsealed(reply, entity, number, id_, at, "reply", former_row=(entity, number, id_, "reply"))


def _typed(value: object, kind: type[T]) -> T:
    """Return a value of a row, which SQLite may return with another type."""
    if not isinstance(value, kind):
        text = f"the store is damaged: a row must have {kind.__name__}, and has {type(value).__name__}"
        raise StoreError(f"{text}; restore a backup", is_damaged=True)
    return value


def _beside(store: SqliteStore) -> str:
    return f"{store.path}.arrays"


@attrs.define(eq=False)
class SqliteStore(Store):
    """A store in a file for all processes of one host.

    SQLite's log needs memory that processes share, which network file systems lack.

    SQLite leaves out the end of its log from the first damaged byte on, without a word, and acknowledged
    messages with it. So the database counts its changes, and a file with the suffix ``-mark`` has the highest
    count that was acknowledged (D233). If the database has less at its opening, it raises `StoreError`.

    Attributes:
        path: The file; SQLite's log and its index, and the mark, are next to it.
        folder: See `Store.folder`; by default a folder next to the file with the suffix ``.arrays``.
    """

    is_shared: ClassVar[bool] = False
    words: ClassVar[Mapping[str, str]] = {
        # Lock the file before reading, because a reader must not wait for a lock.
        "BEGIN": "begin immediate",
        "FOR UPDATE": "",
        "NOW": "(julianday('now') - 2440587.5) * 86400.0",
        "BYTES": "blob",
        "EXISTING": "select name from sqlite_master where type = 'table'",
    }

    path: str = attrs.field(converter=absolute)
    folder: str | None = attrs.field(
        kw_only=True, default=attrs.Factory(_beside, takes_self=True), converter=optional(absolute)
    )

    _mark: Mark | None = attrs.field(default=None, init=False, repr=False)
    # The number of changed rows before the current transaction.
    _changes: int = attrs.field(default=0, init=False, repr=False)

    def _connect(self) -> None:
        # SQLite would overwrite a file without a whole header.
        with suppress(FileNotFoundError):
            if 0 < os.path.getsize(self.path) < _LEAST_BYTES:
                text = f"{self.path} is damaged: it is shorter than any database; restore a backup"
                raise StoreError(text, is_damaged=True)
        database = sqlite3.connect(self.path, timeout=0.0, isolation_level=None, check_same_thread=False)
        # An error of SQLite would quote text outside UTF-8, which a damaged value may be.
        database.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        try:
            database.execute("pragma journal_mode = wal")
            # With less, the last messages of before a power cut are lost, and they were acknowledged.
            database.execute("pragma synchronous = full")
        except sqlite3.Error:
            database.close()
            raise
        self._database = database

    def _disconnect(self) -> None:
        super()._disconnect()
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()

    def _begin(self) -> None:
        end = time.monotonic() + 0.9 * self.timeout
        while True:
            try:
                super()._begin()
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() >= end:
                    raise
            # SQLite itself looks every 100 ms in the end, and misses the gaps between the commits of others.
            time.sleep(_POLL_INTERVAL)
        self._changes = self._database.total_changes
        if self._mark is None:
            # SQLite has read its log by now, and has left out what it cannot read.
            mark = Mark(self.path)
            try:
                mark.check(self._change_count())
            except BaseException:
                mark.close()
                raise
            self._mark = mark

    def _commit(self) -> None:
        count = None
        if self._database.total_changes != self._changes:
            count = self._counted()
        super()._commit()
        # Only now, because the mark must not have a change that a power cut can undo.
        if count is not None and self._mark is not None:
            self._mark.advance(count)

    def _counted(self) -> ChangeCount:
        """Count this transaction, and return the new count."""
        self._sql("update accel_changes set number = number + 1 where id = 1")
        [(store, number)] = self._sql("select store, number from accel_changes where id = 1")
        return ChangeCount(store, number)

    def _change_count(self) -> ChangeCount:
        if not self._sql("select 1 from sqlite_master where name = 'accel_changes'"):
            # It is new, or of an older version.
            return ChangeCount(b"", 0)
        rows = self._sql("select store, number from accel_changes where id = 1")
        return (
            ChangeCount(_typed(rows[0][0], bytes), _typed(rows[0][1], int)) if rows else ChangeCount(b"", 0)
        )

    def _make_tables(self) -> None:
        # A row that damage has hidden would be missed by nobody else.
        if os.path.getsize(self.path) <= _MAX_CHECKED_BYTES:
            [[report]] = self._sql("pragma integrity_check(1)")
            if report != "ok":
                text = f"{self.path} is damaged: {report}; restore a backup"
                raise StoreError(text, is_damaged=True)
        super()._make_tables()
        self._sql(_COUNT_TABLE)
        self._sql("insert into accel_changes values (1, ?, 0) on conflict do nothing", uuid.uuid4().bytes)

    def _has_damage(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


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
