"""Checksums of the values in a store.

A sealed value begins with a mark and a digest of its row's name and its contents, so that a value of another
row does not pass either. Values from versions without seals have no mark, and are returned as they are. A
mark with a few wrong or missing bytes is a damaged mark.
"""

from __future__ import annotations

import hashlib

from ._errors import StoreError

# The first byte begins no pickle, so a value of an older version never has the mark.
_MARK = b"\xa7accel1\n"
_DIGEST_BYTES = 16
SEAL_BYTES = _DIGEST_BYTES
"""The size of the result of `seal_of`."""
NO_SEAL = bytes(SEAL_BYTES)
"""In place of the seal of a missing value."""
# The number of equal bytes from which a beginning is a damaged mark.
_SIMILAR = 4


def _digest(data: bytes, row: tuple[object, ...]) -> bytes:
    digest = hashlib.blake2b(repr(row).encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()


def sealed(data: bytes, *row: object) -> bytes:
    """Return a value with its seal.

    Args:
        data: The value.
        row: The name of its place: its entity, its number and its column; and other columns without a seal.
    """
    return b"".join([_MARK, _digest(data, row), data])


def unsealed(data: object, *row: object, former_row: tuple[object, ...] = ()) -> bytes:
    """Return the value of `sealed`, or a value without a seal from an older version.

    Args:
        data: The stored value.
        row: The name of its place.
        former_row: The name of its place in older versions; empty if it is the same.

    Raises:
        StoreError: The value differs from the one that was stored.
    """
    if not isinstance(data, bytes):
        raise _damaged(row, f"it must be bytes, and is {type(data).__name__}")
    mark, value = data[: len(_MARK)], data[len(_MARK) + _DIGEST_BYTES :]
    if mark == _MARK:
        digest = data[len(_MARK) : len(_MARK) + _DIGEST_BYTES]
        if digest != _digest(value, row) and not (former_row and digest == _digest(value, former_row)):
            raise _damaged(row, "it differs from its checksum")
        return value
    is_cut = bool(data) and _MARK.startswith(data)
    if is_cut or sum(map(int.__eq__, mark, _MARK)) >= _SIMILAR:
        raise _damaged(row, "the mark before its checksum is wrong")
    return data


def seal_of(data: bytes) -> bytes:
    """Return the seal of a stored value, or a digest if it has none."""
    if data.startswith(_MARK):
        return data[len(_MARK) : len(_MARK) + _DIGEST_BYTES]
    return _digest(data, ())


def _damaged(row: tuple[object, ...], reason: str) -> StoreError:
    row_name = ", ".join(map(str, row))
    return StoreError(
        f"the store is damaged at {row_name}: {reason}; restore a backup of the store, or of this row",
        is_damaged=True,
    )
