"""A store of durable entities in PostgreSQL."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import attrs

from ..backends.base.kit.modules import import_extra
from ._store import SqlStore

__all__ = ["PostgresStore"]

# Two processes cannot make a table at the same time, even with `if not exists`; so one waits for this lock.
_TABLES_LOCK = 0x74_72_69_6F


@attrs.define(eq=False)
class PostgresStore(SqlStore):
    """A store in a database of PostgreSQL, which nodes of all hosts may use. Needs the extra ``postgres``.

    The tables, whose names begin with ``accel_``, are made in the first schema of the search path. What was
    acknowledged is as safe as the server's ``synchronous_commit`` says.

    Attributes:
        dsn: Where the database is: a URL, or ``"host=... dbname=..."``.
        folder: See `SqlStore.folder`; by default None, as nobody knows which folders all hosts see.
    """

    is_shared: ClassVar[bool] = True
    words: ClassVar[Mapping[str, str]] = {
        "?": "%s",
        # A call that has waited for a lock must see what was written meanwhile, whatever the default is.
        "BEGIN": "begin isolation level read committed",
        "NOW": "extract(epoch from clock_timestamp())::float8",
        "BYTES": "bytea",
    }

    dsn: str = attrs.field(repr=False)  # it may have a password
    _psycopg: Any = attrs.field(factory=lambda: import_extra("psycopg", "postgres"), init=False, repr=False)

    def _connect(self) -> None:
        # libpq takes whole seconds, and no fewer than two.
        seconds = max(2, round(self.timeout))
        self._database = self._psycopg.connect(self.dsn, autocommit=True, connect_timeout=seconds)
        milliseconds = round(900 * self.timeout)
        self._database.execute(f"set statement_timeout = {milliseconds}")
        # An owner that was stopped in the middle must not have the next one wait for its lock.
        self._database.execute(f"set idle_in_transaction_session_timeout = {milliseconds // 2 + 1}")

    def _give_up(self) -> None:
        # Only the socket can be closed from another thread: the one that waits for it wakes up and fails.
        with suppress(Exception), socket.socket(fileno=os.dup(self._database.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def _make_tables(self) -> None:
        self._sql("select pg_advisory_xact_lock(?)", _TABLES_LOCK)
        super()._make_tables()
