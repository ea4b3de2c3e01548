"""Large arrays of saves: files by content in a folder of the store, named by a save (D199)."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import closing, suppress
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..backends.base import DType, NotSupportedError
from ..weights._files import OpenFile, encode_header
from ._errors import StoreError

_LEAST_BYTES = 1 << 20
# The digest of the content, and the epoch of the writer; the suffix marks an incomplete file.
_NAME = re.compile(r"[0-9a-f]{64}-(\d+)(\.part)?")


# Saves in databases have its module and name: neither may change.
@attrs.frozen
class SavedArray:
    """The placeholder in a save for an array in a file.

    Attributes:
        file: The file's name, in the folder of the entity.
    """

    file: str


class ArrayFiles:
    """The files of an entity, as one owner sees them.

    An owner may be stopped anywhere, and continue when a later owner exists. These rules keep the later
    owner's files complete, whatever the earlier one does then:

    * The later owner's first save is the one found by `Store.take`. From then on the earlier owner cannot
      commit, so that save is also the last one that it knows. The earlier owner removes none of its files.
    * New files have the epoch of their owner in their names, and no owner removes a file with a later epoch.
      So all new files of the later owner are safe from the earlier one's writes, sweeps and removals.
    * If the earlier owner writes a file too late, no save names it, because the following commit is fenced.

    Every method blocks. If a commit fails with another error than a fence, the save may have been kept. Then
    its files stay until the next owner's `load`, which knows.

    Args:
        root: The folder of the store; None for none.
        entity: The name of the entity.
        epoch: The epoch of its owner.
    """

    def __init__(self, root: str | None, entity: str, epoch: int) -> None:
        self._root, self._entity, self._epoch = root, entity, epoch
        digest = hashlib.blake2b(entity.encode(), digest_size=16).hexdigest()
        self._folder = os.path.join(root or "<a store without a folder>", digest)
        # Files of the last committed save, and of the save in progress.
        self._named, self._next = set[str](), set[str]()

    def load(self, saved: dict[str, Any] | None) -> dict[str, Any] | None:
        """Put arrays into the save that this owner has found, and remove files that it does not name.

        Raises:
            StoreError: A file is missing or damaged; nothing is removed.
        """
        files = {name: value.file for name, value in (saved or {}).items() if isinstance(value, SavedArray)}
        arrays = {name: self._read(file) for name, file in files.items()}
        self._named = self._next = set(files.values())
        # A crash leaves files: of a save before its commit, and of the one before after it.
        with suppress(OSError):
            matches = filter(None, map(_NAME.fullmatch, os.listdir(self._folder)))
            self._remove({name[0] for name in matches if int(name[1]) <= self._epoch} - self._named)
        return saved and {**saved, **arrays}

    def put(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Write large arrays to disk; the returned save names their files in their place.

        Raises:
            StoreError: A file cannot be written; all new files are removed.
        """
        names_by_digest, result = {name.partition("-")[0]: name for name in self._named}, dict(saved)
        try:
            for name, value in saved.items():
                if self._root is not None and (header := _header(value)):
                    array = np.ascontiguousarray(value)
                    digest = _digest(array)
                    if digest not in names_by_digest:
                        names_by_digest[digest] = f"{digest}-{self._epoch}"
                        self._write(os.path.join(self._folder, names_by_digest[digest]), header, array)
                    result[name] = SavedArray(names_by_digest[digest])
        except OSError as error:
            self._remove(
                {*names_by_digest.values(), *(f"{name}.part" for name in names_by_digest.values())}
                - self._named
            )
            raise StoreError(f"{self._entity}: cannot write an array to {self._folder}: {error}") from error
        self._next = {value.file for value in result.values() if isinstance(value, SavedArray)}
        return result

    def settle(self, is_kept: bool) -> None:
        """Remove files that no save names, when the save of `put` was committed (`is_kept`) or fenced."""
        previous, self._named = self._named, self._next if is_kept else self._named
        self._remove((previous | self._next) - self._named)
        self._next = self._named

    def _remove(self, names: set[str]) -> None:
        for name in names:
            # A file that stays is removed by the next owner.
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, name))

    def _read(self, name: str) -> npt.NDArray[Any]:
        path = os.path.join(self._folder, name)
        try:
            with closing(OpenFile(path)) as file:
                [info] = file.header.tensors.values()
                array = np.empty(info.shape, info.dtype.dtype)
                file.read(array.reshape(-1).view(np.uint8), info.offset)
        except (OSError, ValueError, NotSupportedError) as error:
            text = f"{self._entity}: its array in {path} cannot be read: {error}"
            raise StoreError(text, is_damaged=True) from error
        if _digest(array) != name.partition("-")[0]:
            text = f"{self._entity}: its array in {path} is damaged: it is not what was written"
            raise StoreError(text, is_damaged=True)
        return array

    def _write(self, path: str, header: bytes, array: npt.NDArray[Any]) -> None:
        # Do not create the parent: if a file system is not mounted, its mount point must stay empty.
        root = os.path.dirname(self._folder)
        for folder in (root, self._folder):
            with suppress(FileExistsError):
                os.mkdir(folder)
        with open(path + ".part", "wb") as file:
            file.writelines([header, array.view(np.uint8).data])
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".part", path)
        # Each folder's name is an entry of its parent.
        for folder in (self._folder, root, os.path.dirname(root)):
            number = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def _header(value: object) -> bytes:
    """Return the header of an array's file; empty for values that stay in the save."""
    # The format has neither objects and texts nor the other order of bytes, and not all numbers.
    with suppress(TypeError, NotSupportedError):
        if type(value) is np.ndarray and value.nbytes >= _LEAST_BYTES:
            return encode_header([("array", DType.of(value.dtype), value.shape, value.nbytes)], {})
    return b""


def _digest(array: npt.NDArray[Any]) -> str:
    digest = hashlib.blake2b(array.view(np.uint8).data, digest_size=32)
    digest.update(f"{array.dtype} {array.shape}".encode())
    return digest.hexdigest()
