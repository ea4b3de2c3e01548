"""A store of durable entities in a file, by SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import ClassVar

import attrs
from attrs.converters import optional

from ._store import SqlStore, absolute

__all__ = ["SqliteStore"]


@attrs.define(eq=False)
class SqliteStore(SqlStore):
    """A store in a file that all processes of one host may use, and no other host.

    SQLite's log needs memory that processes share, which file systems of networks do not have.

    Attributes:
        path: The file; beside it are SQLite's log and its index.
        folder: See `SqlStore.folder`; by default a folder beside the file, whose name ends with ``.arrays``.
    """

    is_shared: ClassVar[bool] = False
    words: ClassVar[Mapping[str, str]] = {
        # The file is locked before anything is read: who has read may not wait for a lock.
        "BEGIN": "begin immediate",
        "FOR UPDATE": "",
        "NOW": "(julianday('now') - 2440587.5) * 86400.0",
        "BYTES": "blob",
    }

    path: str = attrs.field(converter=absolute)
    folder: str | None = attrs.field(kw_only=True, converter=optional(absolute))

    @folder.default
    def _folder(self) -> str:
        return f"{self.path}.arrays"

    def _connect(self) -> None:
        wait = 0.9 * self.timeout
        self._database = sqlite3.connect(self.path, wait, isolation_level=None, check_same_thread=False)
        self._database.execute("pragma journal_mode = wal")
        # With less, the last messages of before a power cut are lost, and they were acknowledged.
        self._database.execute("pragma synchronous = full")
