"""A store of durable entities in SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import attrs
from attrs.converters import optional

from ..backends.base.kit.marks import ChangeCount, Mark, MarkError
from ._errors import StoreError
from ._records import Record
from ._store import Entry, Journal, Rows, StateChange, Store, absolute, typed

__all__ = ["SqliteStore"]

# The second row of changes is a copy of the epoch and its program.
_TABLES = """
    accel_changes (id integer primary key, store blob not null, number bigint not null);
    accel_records (entity text primary key, record blob not null) without rowid"""
_COPY_EPOCH = """insert into accel_changes values (2, ?, ?)
    on conflict (id) do update set store = excluded.store, number = excluded.number"""
_KEEP_RECORD = """insert into accel_records values (?, ?)
    on conflict (entity) do update set record = excluded.record"""
# The size of SQLite's smallest page.
_LEAST_BYTES = 512
# A file with this size is checked at its opening, in less than 0.1 s.
_MAX_CHECKED_BYTES = 16 << 20
# The log is written to the file from this size on, as SQLite does by itself; and the bytes of a small step.
_MAX_LOG_BYTES, _STEP_BYTES = 4 << 20, 6 * 4120
# SQLite's codes for a file that no repetition mends.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
# Another process writes or recovers the file, or opens it first; seconds between two attempts.
_BUSY, _POLL_INTERVAL = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}, 0.001


def _beside(store: SqliteStore) -> str:
    return f"{store.path}.arrays"


@attrs.define(eq=False)
class SqliteStore(Store):
    """A store in a file for all processes of one host.

    SQLite's log needs memory that processes share, which network file systems lack.

    SQLite leaves out the end of its log from the first damaged byte on, without a word, and acknowledged
    messages with it. So the database counts its changes, and a file with the suffix ``-mark`` has the highest
    count that was acknowledged (D233), and a count that the file has without its log. If one has less at its
    opening, it raises `StoreError`. And each entity has a record of its rows (see `_records`).

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
    # The approximate bytes in the log since the last complete checkpoint by this connection.
    _log_bytes: int = attrs.field(default=_MAX_LOG_BYTES, init=False, repr=False)

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
            # See `_checkpoint`.
            database.execute("pragma wal_autocheckpoint = 0")
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
                mark.check(self._change_count)
                mark.check_base(self._file_count)
            except MarkError as error:
                mark.close()
                raise StoreError(str(error), is_damaged=True) from error
            except BaseException:
                mark.close()
                raise
            self._mark, self._log_bytes = mark, _MAX_LOG_BYTES

    def _commit(self) -> None:
        count = None
        if self._database.total_changes != self._changes:
            count = self._counted()
        super()._commit()
        # Only now, because the mark must not have a change that a power cut can undo.
        if count is not None and self._mark is not None:
            self._mark.advance(count)
            self._log_bytes += _STEP_BYTES
            if self._log_bytes > _MAX_LOG_BYTES:
                self._checkpoint(count, self._mark)

    def _checkpoint(self, count: ChangeCount, mark: Mark) -> None:
        """Write the log to the file, as far as other processes allow it."""
        # The transaction is committed, and SQLite reports a full disk to the next one, too.
        with suppress(sqlite3.Error):
            [(is_busy, frames, written)] = self._sql("pragma wal_checkpoint(passive)")
            if not is_busy and frames == written:
                mark.advance_base(count)
                self._log_bytes = 0

    def _file_count(self) -> ChangeCount:
        """Return the number of changes in the file, without its log."""
        # SQLite's own connection, because closing a file here would release all its locks of this process.
        uri = f"{Path(self.path).as_uri()}?immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            try:
                rows = database.execute("select store, number from accel_changes where id = 1").fetchall()
            except sqlite3.Error:
                rows = []
        return ChangeCount(typed(rows[0][0], bytes), typed(rows[0][1], int)) if rows else ChangeCount(b"", 0)

    def _counted(self) -> ChangeCount:
        """Count this transaction, and return the new count."""
        self._sql("update accel_changes set number = number + 1 where id = 1")
        count = self._change_count()
        if not count.store:
            raise self._damage("its count of changes is missing")
        return count

    def _change_count(self) -> ChangeCount:
        if not self._sql("select 1 from sqlite_master where name = 'accel_changes'"):
            # It is new, or of an older version.
            return ChangeCount(b"", 0)
        rows = self._sql("select store, number from accel_changes where id = 1")
        return ChangeCount(typed(rows[0][0], bytes), typed(rows[0][1], int)) if rows else ChangeCount(b"", 0)

    def _make_tables(self) -> None:
        # A row that damage has hidden would be missed by nobody else.
        if os.path.getsize(self.path) <= _MAX_CHECKED_BYTES:
            [[report]] = self._sql("pragma integrity_check(1)")
            if report != "ok":
                text = f"{self.path} is damaged: {report}; restore a backup"
                raise StoreError(text, is_damaged=True)
        super()._make_tables()
        for table in _TABLES.split(";"):
            self._sql(f"create table if not exists {table}")
        self._sql("insert into accel_changes values (1, ?, 0) on conflict do nothing", uuid.uuid4().bytes)

    def _next_epoch(self, program: str, takes_over: bool) -> int:
        copies = self._sql("select store, number from accel_changes where id = 2")
        if copies:
            copy = typed(copies[0][1], int), typed(copies[0][0], bytes)
            rows = self._sql("select epoch, program from accel_epoch where id = 1")
            epoch, owner = (typed(rows[0][0], int), _encoded(typed(rows[0][1], str))) if rows else (0, b"")
            # An older version makes no copy, so its epoch is larger.
            if epoch < copy[0] or (epoch == copy[0] and owner != copy[1]):
                raise self._damage(f"its last epoch was {copy[0]}, and it has {epoch}, or another program")
        number = super()._next_epoch(program, takes_over)
        self._sql(_COPY_EPOCH, _encoded(program), number)
        return number

    def _take(self, entity: str, epoch: int) -> Journal:
        owners = self._sql("select epoch from accel_owners where entity = ?", entity)
        owner = typed(owners[0][0], int) if owners else None
        record = self._record(entity)
        now, rows = self._claim(entity, epoch), self._rows(entity)
        row_record = _record_of(rows, epoch)
        if owner is None:
            if record is not None or row_record != Record(epoch):
                raise self._damage("its owner is missing", entity)
        # An older version writes no records.
        elif record is not None and record.epoch >= owner:
            if record.epoch > owner:
                raise self._damage(f"its owner is of epoch {owner}, and was of {record.epoch}", entity)
            if attrs.evolve(record, epoch=epoch) != row_record:
                raise self._damage(
                    f"it must have {record.described()}, and has {row_record.described()}", entity
                )
        self._sql(_KEEP_RECORD, entity, row_record.encoded())
        return self._journal(rows, now)

    def _write(self, entity: str, epoch: int, entry: Entry, saved: bytes | None) -> StateChange | None:
        change = super()._write(entity, epoch, entry, saved)
        self._log_bytes += len(entry.message) + len(entry.reply) + len(saved or b"")
        record = self._owned_record(entity, epoch).with_message(entry.number)
        if change is not None:
            record = record.with_save(entry.number, change.seal, change.forgotten)
        self._sql(_KEEP_RECORD, entity, record.encoded())
        return change

    def _save(self, entity: str, epoch: int, number: int, saved: bytes) -> StateChange:
        change = super()._save(entity, epoch, number, saved)
        self._log_bytes += len(saved)
        record = self._owned_record(entity, epoch).with_save(number, change.seal, change.forgotten)
        self._sql(_KEEP_RECORD, entity, record.encoded())
        return change

    def _record(self, entity: str) -> Record | None:
        rows = self._sql("select record from accel_records where entity = ?", entity)
        return Record.decoded(entity, rows[0][0]) if rows else None

    def _owned_record(self, entity: str, epoch: int) -> Record:
        record = self._record(entity)
        if record is None or record.epoch != epoch:
            raise self._damage(f"its record of epoch {epoch} is missing", entity)
        return record

    def _damage(self, fault: str, entity: str | None = None) -> StoreError:
        subject = (
            f"{self.path} is damaged" if entity is None else f"the store {self.path} is damaged at {entity}"
        )
        return StoreError(f"{subject}: {fault}; restore a backup", is_damaged=True)

    def _has_damage(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def _record_of(rows: Rows, epoch: int) -> Record:
    numbers = [entry.number for entry, _ in rows.messages]
    return Record.of_rows(epoch, numbers, rows.saved[0] if rows.saved else 0, rows.seal)


def _encoded(program: str) -> bytes:
    # A damaged text may have surrogates.
    return program.encode(errors="surrogatepass")
