"""The mark of a database in SQLite: a file next to it with numbers of its changes, to notice missing ones.

SQLite leaves out the end of its log from the first damaged byte on, without an error. And it applies a log to
any file, even to an earlier copy. So the database counts its changes, and the mark has these counts:

* The acknowledged count is written after the commit, and need not reach the disk before an acknowledgement.
  So it is never ahead of an undamaged database, even after a power cut, if commits wait for the disk.
* The base is a count that the file has without its log. It is written after a complete checkpoint, which has
  waited for the disk.
* The boot of the machine in which the acknowledged count was written. If commits do not wait for the disk, a
  power cut may undo acknowledged changes, so the count is valid for this boot only.

Each count has 48 bytes. All of them are in one sector, and each is written at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs

__all__ = ["ChangeCount", "Mark", "MarkError"]

_FORMAT = struct.Struct("<8s16sQ")
_DIGEST_BYTES = 16
_SIZE = _FORMAT.size + _DIGEST_BYTES
# The beginnings of the counts, in the order of their offsets.
_ACKNOWLEDGED, _BASE, _BOOT = b"\xa7mark1\n\0", b"\xa7base1\n\0", b"\xa7boot1\n\0"
_OFFSETS = {kind: number * _SIZE for number, kind in enumerate((_ACKNOWLEDGED, _BASE, _BOOT))}


class MarkError(Exception):
    """The database lacks changes, or the mark is damaged."""


@attrs.frozen(order=False)
class ChangeCount:
    """A number of changes.

    Attributes:
        store: The random id of the database, 16 bytes; empty if it has none.
        number: The number of its changes.
    """

    store: bytes
    number: int


class Mark:
    """The mark next to a database.

    Args:
        path: The path of the database.
        owner: The name of the database in errors.
        unit: The name of its changes in errors.
        waits_for_disk: Whether each commit waits for the disk.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: str, *, owner: str = "store", unit: str = "changes", waits_for_disk: bool = True
    ) -> None:
        self.path: str = f"{path}-mark"
        self._owner, self._unit = owner, unit
        self._boot = None if waits_for_disk else _boot()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def check(self, read_count: Callable[[], ChangeCount]) -> None:
        """Compare the database with the acknowledged count.

        Args:
            read_count: Returns the count in the database. It is called after the mark was read, because
                another process may commit meanwhile.

        Raises:
            MarkError: The database lacks acknowledged changes, or the mark is damaged.
        """
        acknowledged = self._checked(_ACKNOWLEDGED)
        if acknowledged is not None and (self._boot is None or self._boot == self._checked(_BOOT)):
            fault = "it has {} of the {} {} that were acknowledged by {}"
            self._compare(read_count(), acknowledged, fault)

    def check_base(self, read_count: Callable[[], ChangeCount]) -> None:
        """Compare the file of the database with the base, if this is known.

        Args:
            read_count: Returns the count in the file, without its log.

        Raises:
            MarkError: The file lacks changes, or the mark is damaged.
        """
        base = self._checked(_BASE)
        if base is not None:
            self._compare(read_count(), base, "without its log, it has {} of the {} {} that are in {}")

    def advance(self, count: ChangeCount) -> None:
        """Note changes that were committed; another process may have noted later ones."""
        if self._boot is not None and self._boot != self._decoded(_BOOT):
            # Counts of an earlier boot may be larger than those after a power cut.
            self._write(_ACKNOWLEDGED, count)
            self._write(_BOOT, self._boot)
        self._advance(_ACKNOWLEDGED, count)

    def advance_base(self, count: ChangeCount) -> None:
        """Note changes that are in the file and on disk."""
        self._advance(_BASE, count)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def _compare(self, count: ChangeCount, minimum: ChangeCount, fault: str) -> None:
        if count.store != minimum.store or count.number < minimum.number:
            number = count.number if count.store == minimum.store else 0
            text = fault.format(number, minimum.number, self._unit, self.path)
            raise MarkError(
                f"the {self._owner} is damaged: {text}; restore a backup, and remove that file with it"
            )

    def _checked(self, kind: bytes) -> ChangeCount | None:
        # A power cut may leave a new file empty, or with zeros. Earlier versions wrote the first count only.
        if not any(os.pread(self._descriptor, _SIZE, _OFFSETS[kind])):
            return None
        count = self._decoded(kind)
        if count is None:
            raise MarkError(
                f"{self.path} is damaged, so it is unknown whether the {self._owner} lacks {self._unit}; "
                f"remove the file if the {self._owner} has all of them"
            )
        return count

    def _decoded(self, kind: bytes) -> ChangeCount | None:
        data = os.pread(self._descriptor, _SIZE, _OFFSETS[kind])
        content, digest = data[: _FORMAT.size], data[_FORMAT.size :]
        if len(data) != _SIZE or digest != _digest(content):
            return None
        found_kind, store, number = _FORMAT.unpack(content)
        return ChangeCount(store, number) if found_kind == kind else None

    def _advance(self, kind: bytes, count: ChangeCount) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            current = self._decoded(kind)
            if current is None or current.store != count.store or current.number < count.number:
                self._write(kind, count)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _write(self, kind: bytes, count: ChangeCount) -> None:
        content = _FORMAT.pack(kind, count.store, count.number)
        os.pwrite(self._descriptor, content + _digest(content), _OFFSETS[kind])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _boot() -> ChangeCount:
    """Return this boot's id as a count; a random number if the system does not tell the id."""
    with suppress(OSError, ValueError):
        return ChangeCount(uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes, 0)
    return ChangeCount(uuid.uuid4().bytes, 0)
