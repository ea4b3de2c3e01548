"""The mark of a store: a file with the number of its changes that were acknowledged.

The mark is written after the database, and need not reach the disk before an acknowledgement. So it is never
ahead of an undamaged database, even after a power cut. Its 48 bytes are in one sector, in one write.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct

import attrs

from ._errors import StoreError

_FORMAT = struct.Struct("<8s16sQ")
_MAGIC, _DIGEST_BYTES = b"\xa7mark1\n\0", 16
_SIZE = _FORMAT.size + _DIGEST_BYTES


@attrs.frozen(order=False)
class ChangeCount:
    """A number of changes.

    Attributes:
        store: The random id of the store, 16 bytes; empty if it has none.
        number: The number of its changes.
    """

    store: bytes
    number: int


class Mark:
    """The mark next to the file of a store.

    Args:
        path: The path of the store.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path: str = f"{path}-mark"
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def check(self, count: ChangeCount) -> None:
        """Compare the database with the mark.

        Raises:
            StoreError: The database lacks acknowledged changes, or the mark is damaged.
        """
        data = os.pread(self._descriptor, _SIZE, 0)
        # A power cut may leave a new file empty, or with zeros.
        if not any(data):
            return
        acknowledged = _decoded(data)
        if acknowledged is None:
            raise StoreError(
                f"{self.path} is damaged, so it is unknown whether the store lacks changes; remove the file "
                "if the store has all of them",
                is_damaged=True,
            )
        if count.store != acknowledged.store or count.number < acknowledged.number:
            number = count.number if count.store == acknowledged.store else 0
            raise StoreError(
                f"the store is damaged: it has {number} of the {acknowledged.number} changes that were "
                f"acknowledged by {self.path}; restore a backup, and remove that file with it",
                is_damaged=True,
            )

    def advance(self, count: ChangeCount) -> None:
        """Note changes that were committed; another process may have noted later ones."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            current = _decoded(os.pread(self._descriptor, _SIZE, 0))
            if current is None or current.store != count.store or current.number < count.number:
                os.pwrite(self._descriptor, _encoded(count), 0)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _encoded(count: ChangeCount) -> bytes:
    data = _FORMAT.pack(_MAGIC, count.store, count.number)
    return data + _digest(data)


def _decoded(data: bytes) -> ChangeCount | None:
    content, digest = data[: _FORMAT.size], data[_FORMAT.size :]
    if len(data) != _SIZE or digest != _digest(content):
        return None
    magic, store, number = _FORMAT.unpack(content)
    return ChangeCount(store, number) if magic == _MAGIC else None
