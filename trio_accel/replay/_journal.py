"""Journals: storage for the entries of a recording, and their reading.

An entry is a tuple of plain values, pickled. The reader refuses all opcodes except the ones for plain values,
so that a stranger's journal runs nothing, and takes no more memory than its length allows. A journal of your
own needs two methods, `append` and `entries`.
"""

from __future__ import annotations

import os
import pickle
import sqlite3
import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..backends.base import AccelError
from ..backends.base.kit.marks import ChangeCount, Mark, MarkError

__all__ = ["FileJournal", "JournalError", "MemoryJournal", "RecordingJournal", "SqliteJournal"]

FORMAT = 1
"""Number of the format of entries."""

PROTOCOL = 5
"""Protocol of the pickles that entries are."""

Entry: TypeAlias = tuple[Any, ...]
"""The kind of an entry, and its values."""

_MAGIC = b"trio_accel journal\n"
# A frame is this head and an entry: the length of the entry, the check of the head, and the checksum of all.
_FRAME = struct.Struct("<QI")
_LENGTH_BITS = 48
# In place of a length, in the frame after the last entry.
_END = (1 << _LENGTH_BITS) - 1
# A damaged schema may contain text outside UTF-8, and lengths above the memory.
_SQLITE_ERRORS = sqlite3.Error, UnicodeError, MemoryError
# The count of a journal has no id.
_NO_ID = bytes(16)
_COLUMNS = "number integer primary key, entry blob not null, checksum integer"


class JournalError(AccelError):
    """A journal cannot be written, or contains something else than a recording."""


class RecordingJournal(Protocol):
    """Stores the entries of a recording, in order."""

    def append(self, entry: bytes, /) -> None:
        """Keep an entry. It must outlive the process once this returns, if the journal is to survive a kill.

        It may be called by a thread, but by one at a time.
        """
        ...

    def entries(self) -> Iterator[bytes]:
        """Yield all entries in their order."""
        ...


class MemoryJournal:
    """Entries in the memory of this process."""

    def __init__(self) -> None:
        self._entries: list[bytes] = []

    def append(self, entry: bytes, /) -> None:
        """See `RecordingJournal.append`."""
        self._entries.append(entry)

    def entries(self) -> Iterator[bytes]:
        """See `RecordingJournal.entries`."""
        return iter(tuple(self._entries))


class _Frame(NamedTuple):
    """A stored entry.

    Attributes:
        entry: The entry; None if it is incomplete.
        start: The offset of its first byte in the file.
        end: The offset after its last byte.
        is_checked: Whether the length is certain.
        is_end: Whether it marks the end of the journal, and has no entry.
    """

    entry: bytes | None
    start: int
    end: int
    is_checked: bool
    is_end: bool = False


class FileJournal:
    """Entries in a file, each written by one call, so that a killed process loses no stored entry.

    A new recording is appended to the file. If the process was killed while writing, the last entry may lack
    its last bytes: it is left out, and the next recording overwrites it. Each entry has a checksum of its
    place, length and content, so that a changed byte anywhere, or a missing part before the end, raises
    `JournalError`. An ended recording writes an end, so that missing entries before it are noticed.

    Args:
        path: The file. The first entry creates it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._descriptor: int | None = None

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def append(self, entry: bytes, /) -> None:
        """See `RecordingJournal.append`.

        Raises:
            JournalError: The file is not a journal, or is damaged.
            OSError: The file cannot be written.
        """
        if self._descriptor is None:
            end = self._end()
            self._descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600)
            if os.fstat(self._descriptor).st_size > end:
                os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            if not end:
                self._write(_MAGIC)
        start = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        checks = _head_check(start, len(entry)), zlib.crc32(entry, _seed(start))
        self._write(_FRAME.pack(checks[0] << _LENGTH_BITS | len(entry), checks[1]) + entry)

    def close(self) -> None:
        """Write the end of the journal after the last entry. A later entry overwrites it.

        Raises:
            OSError: The file cannot be written.
        """
        if self._descriptor is None:
            return
        start = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        self._write(_FRAME.pack(_head_check(start, _END) << _LENGTH_BITS | _END, _seed(start)))
        os.close(self._descriptor)
        self._descriptor = None

    def is_ended(self) -> bool:
        """Return whether the journal has an end, so that no entry before it is missing.

        Raises:
            OSError: The file cannot be read.
        """
        with self.path.open("rb") as file:
            start = os.fstat(file.fileno()).st_size - _FRAME.size
            file.seek(max(0, start))
            head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            return False
        word, checksum = _FRAME.unpack(head)
        return _is_end(word, checksum, start)

    def entries(self) -> Iterator[bytes]:
        """See `RecordingJournal.entries`.

        Raises:
            JournalError: The file is not a journal, or is damaged before its end.
            OSError: The file cannot be read.
        """
        return (frame.entry for frame in self._frames() if frame.entry is not None)

    def left_out(self) -> int:
        """Return the size of an incomplete last entry in bytes; 0 if the last entry is complete.

        Raises:
            JournalError: The file is not a journal, or is damaged before its end.
            OSError: The file cannot be read.
        """
        return sum(
            frame.end - frame.start for frame in self._frames() if frame.entry is None and not frame.is_end
        )

    def _write(self, content: bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            # The next entry may be shorter than the torn one, so the next call removes the torn one first.
            os.close(self._descriptor)
            self._descriptor = None
            raise

    def _end(self) -> int:
        """Return the offset of the next entry.

        Raises:
            JournalError: The file is not a journal, or is damaged.
        """
        if not self.path.exists() or not (size := self.path.stat().st_size):
            return 0
        end = len(_MAGIC)
        if size < end and _MAGIC.startswith(self.path.read_bytes()):
            # The first write was interrupted.
            return 0
        for frame in self._frames():
            if frame.entry is None and not frame.is_checked:
                # A wrong length would look the same, and the bytes after it may be whole entries.
                raise JournalError(
                    f"{self.path}: the last entry, at byte {frame.start}, is incomplete or damaged, and an "
                    "earlier version wrote it without a check of its length; record to another file"
                )
            end = frame.start if frame.entry is None else frame.end
        return end

    def _frames(self) -> Iterator[_Frame]:
        """Yield the entries; the last one may be incomplete."""
        with self.path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise JournalError(f"{self.path} is not a journal: it does not begin with {_MAGIC!r}")
            size = os.fstat(file.fileno()).st_size
            number, end = 0, len(_MAGIC)
            while end < size:
                number, start = number + 1, end
                head = file.read(_FRAME.size)
                if len(head) < _FRAME.size:
                    yield _Frame(None, start, size, is_checked=True)
                    return
                word, checksum = _FRAME.unpack(head)
                if start + _FRAME.size == size and _is_end(word, checksum, start):
                    yield _Frame(None, start, size, is_checked=True, is_end=True)
                    return
                check, length = word >> _LENGTH_BITS, word & _END
                # Earlier versions wrote neither a check nor empty entries.
                is_right = check == _head_check(start, length) and length < _END if check else length > 0
                end, entry = start + _FRAME.size + length, b""
                if is_right:
                    entry = file.read(min(length, size))
                    seed = _seed(start) if check else 0
                    if end > size and not _is_longer(entry, length, seed, checksum):
                        yield _Frame(None, start, size, is_checked=bool(check))
                        return
                    is_right = end <= size and zlib.crc32(entry, seed) == checksum
                if not is_right:
                    raise JournalError(
                        f"{self.path} is damaged: entry {number}, at byte {start} of {size}, has a wrong "
                        "checksum, so the recording is not complete; replay a copy from before the damage"
                    )
                yield _Frame(entry, start, end, is_checked=bool(check))


def _seed(start: int) -> int:
    """Return the checksum of an entry's place, so that entries after a missing part are wrong."""
    return zlib.crc32(start.to_bytes(8, "little"))


def _head_check(start: int, length: int) -> int:
    """Return 16 bits for the head of a frame, never with a byte of 0, as earlier versions wrote there."""
    check = zlib.crc32(length.to_bytes(8, "little"), _seed(start))
    return (check % 255 + 1) << 8 | (check // 255 % 255 + 1)


def _is_end(word: int, checksum: int, start: int) -> bool:
    """Return whether the head of a frame is the end of a journal."""
    return word == _head_check(start, _END) << _LENGTH_BITS | _END and checksum == _seed(start)


def _is_longer(content: bytes, length: int, seed: int, checksum: int) -> bool:
    """Return whether an entry is whole, and a changed bit in its length makes it look incomplete.

    Args:
        content: The bytes after the head of the frame, up to the end of the file.
        length: The length of the entry by its head, above the length of `content`.
        seed: The checksum before the content.
        checksum: The checksum of the entry by its head.
    """
    lengths = [length ^ 1 << bit for bit in range(_LENGTH_BITS) if length & 1 << bit]
    view = memoryview(content)
    return any(zlib.crc32(view[:n], seed) == checksum for n in lengths if n <= len(view))


class SqliteJournal:
    """Entries in a database of SQLite, each in its own commit, with a checksum.

    The database has the number of its entries in another table, because damage can hide the last rows of a
    table from SQLite without an error. A file with the suffix ``-mark`` has this number too, because SQLite
    leaves out the end of its log from the first damaged byte on. After a power cut, it is not compared.

    Args:
        path: The database.

    Raises:
        JournalError: The file is not a database, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._is_checked = False
        mark = Path(f"{self.path}-mark")
        with self._errors("is not a journal"):
            if not self.path.exists():
                # It belongs to a removed journal.
                mark.unlink(missing_ok=True)
            self._database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                # The error refers to this object, and its log would be applied to a later file of this path.
                self._database.close()
                raise

    def _open(self) -> None:
        # Text is not decoded, because errors would quote it, and differs from the type of an entry.
        self._database.text_factory = bytearray
        self._database.execute("pragma journal_mode=wal")
        self._database.execute("pragma synchronous=normal")
        if not self._has("entries"):
            with self._transaction():
                self._make_tables()
        # The commits do not wait for the disk, so the mark is valid until the machine ends.
        self._mark = Mark(str(self.path), owner="journal", unit="entries", waits_for_disk=False)
        self._mark.check(lambda: ChangeCount(_NO_ID, self._count()))

    def __del__(self) -> None:
        if hasattr(self, "_database"):
            self._database.close()
        if hasattr(self, "_mark"):
            self._mark.close()

    def append(self, entry: bytes, /) -> None:
        """See `RecordingJournal.append`.

        The first call checks the database, which takes as long as reading all entries.

        Raises:
            JournalError: The database is damaged, or cannot be written.
        """
        with self._errors("cannot be written"), self._transaction():
            if not self._is_checked:
                self._prepare()
            [(number,)] = self._database.execute("select coalesce(max(number), 0) from entries")
            self._check_count(number, self._count())
            row = number + 1, entry, zlib.crc32(entry, _seed(number + 1))
            self._database.execute("insert into entries (number, entry, checksum) values (?, ?, ?)", row)
            self._database.execute("update entry_count set number = ?", row[:1])
        self._is_checked = True
        with self._errors("cannot be written"):
            self._mark.advance(ChangeCount(_NO_ID, row[0]))

    def entries(self) -> Iterator[bytes]:
        """See `RecordingJournal.entries`.

        Raises:
            JournalError: The database is damaged.
        """
        number = 0
        try:
            # Read first, because another process may append an entry meanwhile.
            count = self._count()
            checksums = "checksum" if self._has_checksums() else "null"
            rows = self._database.execute(f"select number, entry, {checksums} from entries order by number")  # noqa: S608
            for number, (stored, entry, checksum) in enumerate(rows, 1):
                is_whole = stored == number and type(entry) is bytes
                if not is_whole or checksum not in (None, zlib.crc32(entry, _seed(number))):
                    raise JournalError(
                        f"{self.path} is damaged: entry {number} is missing or has a wrong checksum"
                    )
                yield entry
            self._check_count(number, count)
        except _SQLITE_ERRORS as error:
            raise JournalError(f"{self.path} is damaged after entry {number}: {error}") from error

    @contextmanager
    def _errors(self, text: str) -> Generator[None]:
        """Raise `JournalError` with the path and a text for an error of SQLite in the block."""
        try:
            yield
        except MarkError as error:
            raise JournalError(f"{self.path}: {error}") from error
        except (*_SQLITE_ERRORS, OSError) as error:
            raise JournalError(f"{self.path} {text}: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._database.execute("begin immediate")
        try:
            yield
            self._database.execute("commit")
        except BaseException:
            # SQLite itself ends the transaction after some errors.
            with suppress(sqlite3.Error):
                self._database.execute("rollback")
            raise

    def _has(self, table: str) -> bool:
        return bool(self._database.execute("select 1 from sqlite_master where name = ?", (table,)).fetchall())

    def _has_checksums(self) -> bool:
        """Return whether the table has checksums, which earlier versions did not write."""
        columns = self._database.execute("pragma table_info(entries)")
        return any(name == b"checksum" for _, name, *_ in columns)

    def _count(self) -> int:
        """Return the number of entries by their count, which earlier versions did not write: then 0.

        Raises:
            JournalError: The count is missing.
        """
        if not self._has("entry_count"):
            return 0
        rows = self._database.execute("select number from entry_count").fetchall()
        if len(rows) != 1 or type(rows[0][0]) is not int:
            raise JournalError(f"{self.path} is damaged: its count of entries is missing")
        return rows[0][0]

    def _check_count(self, number: int, count: int) -> None:
        """Refuse fewer entries than counted; earlier versions append entries without counting them.

        Raises:
            JournalError: An entry is missing.
        """
        if number < count:
            raise JournalError(f"{self.path} is damaged: entry {number + 1} is missing, its count is {count}")

    def _make_tables(self) -> None:
        """Create the tables of a new journal.

        Raises:
            JournalError: The database has a journal without its entries.
        """
        if self._has("entries"):
            # Another process has created them meanwhile.
            return
        [(pages,)] = self._database.execute("pragma page_count")
        [(tables,)] = self._database.execute("select count(*) from sqlite_master")
        if self._has("entry_count") or (pages > 1 and not tables):
            raise JournalError(f"{self.path} is damaged: its table of entries is missing")
        self._database.execute(f"create table entries ({_COLUMNS})")
        self._make_count(0)

    def _make_count(self, number: int) -> None:
        self._database.execute("create table entry_count (id integer primary key, number integer not null)")
        self._database.execute("insert into entry_count values (1, ?)", (number,))

    def _prepare(self) -> None:
        """Check the database, and add the checksums and the count that earlier versions did not write.

        Raises:
            JournalError: The database is damaged.
        """
        # SQLite would write a new entry over others if the free space of a page is wrong.
        [(report,)] = self._database.execute("pragma integrity_check(1)")
        if report != b"ok":
            raise JournalError(f"{self.path} is damaged: {report.decode(errors='replace')}")
        number = sum(1 for _ in self.entries())
        if not self._has_checksums():
            self._database.execute("alter table entries add column checksum integer")
        if not self._has("entry_count"):
            self._make_count(number)


def pack(entry: Entry) -> bytes:
    """Make bytes of an entry."""
    return pickle.dumps(entry, PROTOCOL)


# The opcodes of plain values, each with the bytes that follow it.
_FIXED = {
    **dict.fromkeys(b".(t)N\x85\x86\x87\x88\x89\x94", 0),
    **dict(zip(b"\x80\x95JKMGhj", (1, 8, 4, 1, 2, 8, 1, 4), strict=True)),
}
# Opcodes with a content after a length field, with the size of that field in bytes.
_LENGTH_BYTES = dict(zip(b"\x8a\x8b\x8cX\x8dCB\x8e", (1, 4, 1, 4, 8, 1, 4, 8), strict=True))
# The maximum values per byte in an entry: a pickle stores equal shapes once.
_VALUES_PER_BYTE = 64


def _check_opcodes(entry: bytes) -> None:
    """Refuse names and calls, and opcodes that take memory without content.

    Raises:
        JournalError: There is one.
    """
    position = 0
    while position < len(entry):
        opcode, position = entry[position], position + 1
        if size := _LENGTH_BYTES.get(opcode):
            position += size + int.from_bytes(entry[position : position + size], "little")
        elif opcode in _FIXED:
            position += _FIXED[opcode]
        else:
            raise JournalError(
                f"an entry of the journal holds more than plain values: opcode {opcode:#x} at byte "
                f"{position - 1}"
            )


def _count(value: object, counts: dict[int, int]) -> int:
    """Count the values in a tuple, each as often as it occurs."""
    items: Any = value
    if type(value) is not tuple:
        return 1
    count = counts.get(id(items))
    if count is None:
        count = counts[id(items)] = 1 + sum([_count(item, counts) for item in items])
    return count


def unpack(entry: bytes) -> Entry:
    """Read an entry.

    Raises:
        JournalError: It is none.
    """
    _check_opcodes(entry)
    try:
        value: Any = pickle.loads(entry)  # noqa: S301  # its opcodes make plain values alone
        count = _count(value, {})
    except Exception as error:  # noqa: BLE001  # whatever a damaged pickle raises
        # Some errors quote the entry, which may have data of the program.
        raise JournalError(f"an entry of the journal cannot be read: {type(error).__name__}") from None
    kind = type(value).__name__
    if kind != "tuple" or not value or type(value[0]) is not str:
        raise JournalError(f"an entry of the journal must be a tuple with its kind first, got a {kind}")
    if count > _VALUES_PER_BYTE * len(entry):
        raise JournalError(f"an entry of the journal has {count} values in {len(entry)} bytes")
    plain: Entry = value
    return plain


def read(journal: RecordingJournal) -> list[Entry]:
    """Read a journal.

    Raises:
        JournalError: It is none, or of a newer format.
    """
    entries: list[Entry] = []
    for number, content in enumerate(journal.entries(), 1):
        try:
            entries.append(unpack(content))
        except JournalError as error:
            error.message = f"entry {number}: {error.message}"
            raise
    if not entries or entries[0][0] != "header":
        raise JournalError("the journal is empty: its header is missing")
    for entry in entries:
        if entry[0] == "header" and (len(entry) < 3 or entry[1] != FORMAT):
            file_format = entry[1] if len(entry) > 1 and type(entry[1]) is int else None
            raise JournalError(
                f"the journal has format {file_format!r:.20}, this version reads format {FORMAT}"
            )
    return entries


def left_out(journal: RecordingJournal) -> int:
    """Return the size of an incomplete last entry in bytes, which a reader leaves out."""
    return journal.left_out() if isinstance(journal, FileJournal) else 0


def is_ended(journal: RecordingJournal) -> bool:
    """Return whether no entry can be missing at the end, without a trace."""
    return not isinstance(journal, FileJournal) or journal.is_ended()
