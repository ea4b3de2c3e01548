"""Disk cache of compiled code, found again by its source, headers and options.

The contents of the files that a source in C++ includes are part of that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from ..contract.errors import AccelError

# Directives that include a file: #include, #include_next, #embed and __has_include, with comments and line
# splices as the language allows them. A macro as a name cannot be followed.
_GAP = r"(?:[ \t]|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
_NAME = rf"{_GAP}(?:\"(?P<quoted>[^\"\n]+)\"|<(?P<angled>[^>\n]+)>|(?P<other>[^\s\"<]))"
_INCLUDE = re.compile(
    rf"(?:^{_GAP}(?:\#|%:){_GAP}(?:include|include_next|embed)\b|__has_(?:include|embed){_GAP}\(){_NAME}",
    re.MULTILINE,
)
_SPLICE = re.compile(r"\\\r?\n")
# Every header of the CUDA toolkit together is fewer.
_MOST_FILES = 20_000


def header_parts(
    source: str,
    *,
    folder: Path | None = None,
    folders: Sequence[Path] = (),
    first: Sequence[str] = (),
) -> tuple[str | bytes, ...] | None:
    """Find names and digests of everything that a source may include, directly or by other headers.

    Conditions of the preprocessor are not evaluated, so a header counts if it may be included. A header that
    is not found counts by its name: it is the compiler's own, and the compiler's version is another part of
    the key. The search is repeated each time, so a header that appears later changes the result.

    Args:
        source: The text.
        folder: The folder of the file with the text, which is searched first for ``"..."``.
        folders: The folders to search for headers, in order.
        first: Headers that the compiler includes before the source.

    Returns:
        Parts for `code_key`; None if they cannot be determined, because the name of a header is a macro or
        there are too many headers. Then nothing must be kept.
    """
    parts: list[str | bytes] = []
    # Files already read, so that a cycle of headers ends.
    visited: set[Path] = set()
    waiting: list[tuple[str, Path | None, bool]] = []
    if not _follow(source, folder, waiting):
        return None
    waiting += [(name, folder, True) for name in first]
    while waiting:
        name, parent, is_quoted = waiting.pop()
        path = _find(name, parent if is_quoted else None, folders)
        if path is None:
            parts += [name, b""]
            continue
        # The name counts each time: it may mean another file elsewhere.
        parts += [name, str(path)]
        if path in visited:
            continue
        visited.add(path)
        data = _content(path)
        if data is None or len(visited) > _MOST_FILES:
            return None
        parts.append(hashlib.sha256(data).digest())
        if not _follow(data.decode("utf-8", "surrogateescape"), path.parent, waiting):
            return None
    return tuple(parts)


def _follow(text: str, folder: Path | None, waiting: list[tuple[str, Path | None, bool]]) -> bool:
    """Add what a text includes; False if one of the names is a macro."""
    added = set[tuple[str, bool]]()
    for match in _INCLUDE.finditer(_SPLICE.sub("", text)):
        if match["other"]:
            return False
        added.add((match["quoted"] or match["angled"], bool(match["quoted"])))
    waiting += [(name, folder, is_quoted) for name, is_quoted in sorted(added)]
    return True


def _find(name: str, parent: Path | None, folders: Sequence[Path]) -> Path | None:
    for folder in folders if parent is None else (parent, *folders):
        try:
            if (path := folder / name).is_file():
                return path
        except (OSError, ValueError):
            # A name that no file can have.
            continue
    return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


_logger = logging.getLogger("trio_accel.backends")

# First bytes of an entry; another layout of entries gets another number, and its entries are misses.
_MAGIC = b"trioaccel-code-1"
_KEY_BYTES = 32
_HEADER = len(_MAGIC) + 2 * _KEY_BYTES
_TEMPORARY = ".new-"
# A writer needs milliseconds, so a temporary file of this age belongs to a killed one.
_STALE_SECONDS = 600.0
# A writer looks at the folder's size whenever it has added this part of the cap, and makes this part free. So
# eight writers stay under the cap, without a count that they share.
_LOOK_EVERY = 64
_FREE_PART = 8
_DEFAULT_CAP = 1 << 30
# Opened without waiting for anything, and never by way of a link.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@attrs.frozen
class CompiledCode:
    """The outcome of a compilation.

    Attributes:
        code: The code: a cubin, for example.
        names: The symbols in the code, by the name expressions that the compiler was asked for.
    """

    code: bytes
    names: Mapping[str, str] = attrs.field(factory=dict[str, str])


def code_key(**parts: str | bytes | int | tuple[str | bytes, ...]) -> bytes:
    """Make the key of a compilation: a SHA-256 digest of named parts.

    Everything that the result depends on has to be among the parts: the source, the contents of the headers
    (`header_parts`), options, architecture, versions of compiler and driver.
    """
    digest = hashlib.sha256()

    def add(value: str | bytes) -> None:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        # Lengths go before the data, so no two lists of parts give the same bytes.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(b"s" if isinstance(value, str) else b"b")
        digest.update(data)

    for name in sorted(parts):
        value = parts[name]
        items = value if isinstance(value, tuple) else (str(value) if isinstance(value, int) else value,)
        add(name)
        add(f"{type(value).__name__} {len(items)}")
        for item in items:
            add(item)
    return digest.digest()


@attrs.define(eq=False)
class CodeCache:
    """A folder of compiled code, which any number of threads and processes read and write at once.

    No failure of the folder is an error of the program. An unreadable entry is compiled, an unwritable one is
    compiled again next time, and one warning is logged. An entry counts only if it is a regular file of this
    user that no other user may write to, and if its checksum is right. The folder is made with mode 0700. It
    is not used at all if it belongs to another user or if others may write to it, because they could have
    their code run.

    An entry is written to a new file, which is then renamed, so a reader sees a complete entry or none. Above
    the cap, the least recently used entries are removed. Up to eight processes that write at once stay under
    the cap, if their entries are small compared to it.

    Args:
        folder: Its path; made at the first write. None: there is no cache, and everything is compiled.
        cap: Most bytes in it, including the remains of killed writers. An entry larger than an eighth of it
            is not kept.
    """

    folder: Path | None
    cap: int = attrs.field(default=_DEFAULT_CAP, kw_only=True)
    # Bytes until this object looks at the folder again; it looks before its first write.
    _unseen: int = 0
    _has_warned: bool = False

    def __attrs_post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"cap: must be at least 1 byte, got {self.cap}")

    def compiled(self, key: bytes | None, compiler: Callable[[], CompiledCode]) -> CompiledCode:
        """Find code, or compile it and keep it; blocks.

        Args:
            key: A key that `code_key` made; None for code that must not be kept.
            compiler: Compiles the code; its error is raised, and nothing is kept.
        """
        cached = None if key is None else self.find(key)
        if cached is not None:
            return cached
        code = compiler()
        if key is not None:
            self.store(key, code)
        return code

    def find(self, key: bytes) -> CompiledCode | None:
        """Read the entry of a key; None if there is none, or none that can be trusted."""
        data: bytes | None = None
        with self._quietly("read"), self._opened(make=False) as folder:
            if folder is not None:
                data = _read(_name_of(key), folder, self.cap)
        return None if data is None else _decoded(key, data)

    def store(self, key: bytes, code: CompiledCode) -> None:
        """Keep code under a key, if that can be done."""
        data = _encoded(key, code)
        if len(data) > self.cap // _FREE_PART:
            return
        with self._quietly("written to"), self._opened(make=True) as folder:
            if folder is None:
                return
            if len(data) > self._unseen:
                _evict(folder, self.cap - self.cap // _FREE_PART - len(data))
                self._unseen = max(self.cap // _LOOK_EVERY, len(data))
            self._unseen -= len(data)
            _write(_name_of(key), folder, data)

    @contextmanager
    def _opened(self, *, make: bool) -> Generator[int | None, None, None]:
        """Open the folder, if it can be trusted; yield None without a folder."""
        path = self.folder
        if path is None:
            yield None
            return
        if make and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            # D117: all access uses the descriptor, so that nobody can replace this folder by another one.
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"it belongs to user {status.st_uid}, who could have their code run")
            if status.st_mode & _OTHERS_WRITE:
                raise PermissionError("others may write to it, and could have their code run; chmod go-w")
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _quietly(self, action: str) -> Generator[None]:
        """Continue without the cache when the system refuses an operation, and warn once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "the cache of compiled kernels, %s, cannot be %s: %s; kernels are compiled instead. "
                    "TRIO_ACCEL_CACHE_PATH names another folder, TRIO_ACCEL_CACHE_DISABLE=1 does without",
                    self.folder,
                    action,
                    error,
                )


def _name_of(key: bytes) -> str:
    if len(key) != _KEY_BYTES:
        raise ValueError(f"key: must be {_KEY_BYTES} bytes of code_key(), got {len(key)}")
    return key.hex()


def _encoded(key: bytes, code: CompiledCode) -> bytes:
    # JSON contains no zero byte, so the code begins after the first one.
    payload = json.dumps(dict(code.names)).encode() + b"\0" + code.code
    return b"".join((_MAGIC, key, hashlib.sha256(payload).digest(), payload))


def _decoded(key: bytes, data: bytes) -> CompiledCode | None:
    """Return an entry's code; None if it is cut off, damaged, another's, or of another version."""
    payload = data[_HEADER:]
    if data[:_HEADER] != b"".join((_MAGIC, key, hashlib.sha256(payload).digest())):
        return None
    names, _, code = payload.partition(b"\0")
    return CompiledCode(code, json.loads(names))


def _read(name: str, folder: int, max_bytes: int) -> bytes | None:
    try:
        entry = os.open(name, _READ, dir_fd=folder)
    except OSError:
        # The entry is missing, or not a file.
        return None
    try:
        status = os.fstat(entry)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & _OTHERS_WRITE
            or status.st_size > max_bytes
        ):
            return None
        with open(entry, "rb", closefd=False) as file:
            data = file.read()
        with suppress(OSError):
            # The time of use keeps an entry from making way; on a read-only disk nothing makes way anyway.
            os.utime(entry)
        return data
    finally:
        os.close(entry)


def _write(name: str, folder: int, data: bytes) -> None:
    new = f"{_TEMPORARY}{secrets.token_hex(8)}"
    file = os.open(new, _WRITE, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as opened:
            # Nothing is flushed to the disk, because after a power failure the checksum detects incomplete
            # entries.
            opened.write(data)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def _evict(folder: int, max_bytes: int) -> None:
    """Remove the least recently used entries until `max_bytes` remain, and the remains of killed writers."""
    stale = time.time() - _STALE_SECONDS
    files: list[tuple[float, str, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                # Another process may have removed it meanwhile.
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    files.append((status.st_mtime, entry.name, status.st_size))
    total = sum(size for _, _, size in files)
    for used, name, size in sorted(files):
        is_left = name.startswith(_TEMPORARY) and used < stale
        if total <= max_bytes and not is_left:
            continue
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        total -= size


def remove_stale(folder: str | Path, pattern: str) -> None:
    """Remove entries that killed processes of this user have left in a folder; blocks.

    Args:
        folder: The folder.
        pattern: A regular expression of the names, of folders and files.
    """
    stale = time.time() - _STALE_SECONDS
    # On Windows, which has no such user ids, all files belong to 0.
    user = getattr(os, "geteuid", int)()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not re.fullmatch(pattern, entry.name):
                continue
            # Another process may remove it at the same time.
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != user or status.st_mtime >= stale:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def default_code_cache() -> CodeCache:
    """Return the cache that the environment names.

    `TRIO_ACCEL_CACHE_PATH` is its folder; without it, ``trio-accel/kernels`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache``. `TRIO_ACCEL_CACHE_MAXSIZE` is its cap in bytes (1 GiB). `TRIO_ACCEL_CACHE_DISABLE=1` does
    without.

    Raises:
        AccelError: `TRIO_ACCEL_CACHE_MAXSIZE` is not an integer above zero.
    """
    cap = os.environ.get("TRIO_ACCEL_CACHE_MAXSIZE", "").strip() or str(_DEFAULT_CAP)
    if not cap.isdecimal() or not int(cap):
        raise AccelError(f"TRIO_ACCEL_CACHE_MAXSIZE: must be a number of bytes above zero, got {cap!r}")
    return _cache_of(_folder(), int(cap))


@functools.cache
def _cache_of(folder: Path | None, cap: int) -> CodeCache:
    return CodeCache(folder, cap=cap)


def _folder() -> Path | None:
    if os.environ.get("TRIO_ACCEL_CACHE_DISABLE", "0").strip() not in ("", "0"):
        return None
    named = os.environ.get("TRIO_ACCEL_CACHE_PATH")
    if named:
        return Path(named).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:
        # A user without a home.
        return None
    return base.absolute() / "trio-accel" / "kernels"
