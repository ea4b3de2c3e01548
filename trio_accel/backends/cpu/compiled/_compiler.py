"""The C++ compiler of the machine: its search, its runs, and the cache of its output (D186)."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import platform
import secrets
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import attrs

from ...base import AccelError, Strs
from ...base.kit.code_cache import CompiledCode, code_key, default_code_cache, remove_stale
from ..runtime._stream import COMPILED

Mode: TypeAlias = Literal["auto", "never", "always"]
Entry: TypeAlias = Callable[[bytes, int, int], int]
"""The function ``run`` of a text: it gets its packed arguments, and the first element and the one after the
last. It holds no lock of the interpreter."""

_logger = logging.getLogger("trio_accel.backends")

OPTIONS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fopenmp-simd", "-fPIC", "-shared", "-w", "-fvisibility=hidden",
    "-fno-exceptions", "-fno-rtti", "-pipe", "-Wl,--as-needed",
)  # fmt: skip
"""Options that do not change which results are rounded, and how."""
_OF_GCC = ("-fno-tree-sink",)
# Vector functions, which `functions.h` defines in two widths, are only called in these.
_WIDE_ALONE, _CALLS_VECTORS = "--param=vect-epilogues-nomask=0", "\nLOOPED("
_WIDE = "-mprefer-vector-width=512"

# Seconds that a compiler may take: a long expression takes one.
_LIMIT = 30.0
# After this number of successive failures, or a single hang, the compiler is not called again.
_MOST_FAILURES = 3
# The launcher also knows the name: it kills the shell of a dead worker, and removes the folder.
_PREFIX = "trio-accel-code-"
_ASKING = b"version"
# The folder is $0, and the source is the first $1 bytes of the input. The shell makes the folder, so that no
# folder exists without a shell to remove it. The input ends when the calling process is done or dead. Then
# the shell ends the compiler with all its children, and removes the folder until nobody writes there.
_SCRIPT = """
mkdir -m 700 "$0" && cd "$0" && head -c "$1" >made.cpp || { rm -rf "$0"; exit; }
shift
("$@" >log 2>&1 </dev/null; echo $?) &
trap '' TERM
read line
kill 0
wait
for pause in 0 0 0.1 0.5 1; do
    rm -rf "$0" && break
    sleep $pause
done
kill -9 0
"""


@attrs.define(eq=False)
class Counts:
    """How often each executor ran, since the process began.

    Attributes:
        compiled: Operations of compiled code.
        by_numpy: Operations of NumPy.
        kernels: Kernels compiled, or found in the disk cache.
    """

    compiled: int = 0
    by_numpy: int = 0
    kernels: int = 0

    def add(self, is_compiled: bool) -> None:
        """Count an operation."""
        if is_compiled:
            self.compiled += 1
        else:
            self.by_numpy += 1

    def now(self) -> tuple[int, int]:
        """Return the kernels, and the operations of compiled code."""
        return self.kernels, self.compiled


counts = Counts()


class CompilerError(Exception):
    """The compiler could not be run, or failed; the text explains why.

    Args:
        text: The reason.
        log: The compiler's output.
    """

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


class CompilerHangsError(CompilerError):
    """The compiler takes too long."""


@attrs.frozen
class Compiler:
    """The compiler of the machine.

    Attributes:
        command: The command that runs it.
        version: The first line of its version.
        options: Options for every source.
    """

    command: Strs
    version: str
    options: Strs

    @property
    def title(self) -> str:
        """Its name and version, for people."""
        return self.version or " ".join(self.command)

    def options_of(self, text: str) -> Strs:
        """Return the options of a text."""
        is_of_gcc = _OF_GCC[0] in self.options
        return (*self.options, *((_WIDE_ALONE,) if is_of_gcc and _CALLS_VECTORS in text else ()))

    def key(self, text: str, options: Strs = (), headers: tuple[str | bytes, ...] = ()) -> bytes:
        """Return the key of a text and its headers: code for another processor would end the process."""
        return code_key(
            kind="cpu",
            text=text,
            compiler=(*self.command, self.version),
            options=(*self.options_of(text), *options),
            headers=headers,
            machine=machine(),
        )

    def compile(self, text: str, options: Strs = (), limit: float | None = None) -> bytes:
        """Compile a text; blocks.

        Raises:
            CompilerError: It fails, takes too long, or cannot be run.
        """
        root = Path(tempfile.gettempdir())
        _sweep(root)
        arguments = (*self.command, *self.options_of(text), *options, "made.cpp", "-o", "made.so")
        folder = root / f"{_PREFIX}{secrets.token_hex(8)}"
        return _run(folder, text.encode(), arguments, _LIMIT if limit is None else limit)


@functools.cache
def _sweep(root: Path) -> None:
    """Remove the folders of compilers with shells that were also killed; once in a process."""
    remove_stale(root, rf"{_PREFIX}[0-9a-f]{{16}}")


def _run(folder: Path, source: bytes, arguments: Strs, limit: float) -> bytes:
    """Run a compiler in a new folder, and return the library that it makes there."""
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    environment |= {"TMPDIR": str(folder), "LC_ALL": "C"}
    process = subprocess.Popen(  # noqa: S603  # the user's own compiler
        ("/bin/sh", "-c", _SCRIPT, folder, str(len(source)), *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    # Its end closes the line.
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(source)
        process.stdin.flush()
        said = process.stdout.fileno()
        poll = select.poll()
        poll.register(said, select.POLLIN)
        if not poll.poll(limit * 1000):
            raise CompilerHangsError(f"it takes longer than {limit:g} s")
        status = os.read(said, 16).decode().strip()
        if not status:
            raise CompilerError(f"{folder.parent} is full; set TMPDIR to another folder")
        if status != "0":
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            raise CompilerError(f"it ended with {status}: {log.strip()[:2000]}", log)
        return (folder / "made.so").read_bytes()


@functools.cache
def machine() -> Strs:
    """Return the facts that code depends on: the C library, and the system's description of the processor."""
    fields = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    library, cpuinfo = "", ""
    with suppress(OSError, ValueError):
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    facts = [f"{name.strip()}:{text}" for name, _, text in lines if name.strip() in fields]
    return (platform.machine(), library, *facts)


@functools.cache
def has_fma() -> bool:
    """Return whether the processor multiplies and adds with one rounding, which our own functions need."""
    return platform.machine() != "x86_64" or _has("fma")


def _has(flag: str) -> bool:
    return flag in " ".join(machine()).split()


def mode() -> Mode:
    """Return the variable `TRIO_ACCEL_CPU_COMPILED`.

    Raises:
        AccelError: It is none of its words.
    """
    setting = os.environ.get("TRIO_ACCEL_CPU_COMPILED", "").strip() or "auto"
    if setting not in ("auto", "never", "always"):
        raise AccelError(f"TRIO_ACCEL_CPU_COMPILED: must be auto, never or always, got {setting!r}")
    return cast("Mode", setting)  # pyright: ignore[reportUnnecessaryCast]  # mypy does not see it


def compiler() -> Compiler | None:
    """Return the compiler of `CXX`, else ``c++``, ``g++`` or ``clang++``; None without a compiler."""
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(4)
def _find(named: str, path: str) -> Compiler | None:
    # Code is loaded from memory with a file name, and a shell ends the compiler.
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    # It may wait for a disk, and meanwhile the calling operation is not stuck.
    COMPILED.add(_ASKING)
    try:
        return _first_of((named, "c++", "g++", "clang++"))
    finally:
        COMPILED.discard(_ASKING)


def _first_of(names: Sequence[str]) -> Compiler | None:
    for name in names:
        try:
            command = tuple(shlex.split(name))
            if not command or shutil.which(command[0]) is None:
                continue
            asked = (*command, "--version")
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT, check=True)  # noqa: S603
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _logger.warning("the C++ compiler %s cannot be used: %s", name, error)
            if isinstance(error, subprocess.TimeoutExpired):
                # Another one may hang as well, and is not waited for.
                return None
            continue
        version = (done.stdout.strip().splitlines() or [""])[0]
        options = OPTIONS if "clang" in version else (*OPTIONS, *_OF_GCC)
        return Compiler(command, version, (*options, *((_WIDE,) if _has("avx512f") else ())))
    return None


@attrs.define(eq=False)
class State:
    """The compiled code of this process, and its failures.

    Attributes:
        entries: The functions, by the keys of their sources; None for a source that could not be compiled.
        failures: The number of successive failures.
        has_warned: Whether a failure was reported.
    """

    entries: dict[bytes, Entry | None] = attrs.field(factory=dict[bytes, "Entry | None"])
    failures: int = 0
    has_warned: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)


_state = State()
_numbers = itertools.count(2)


def _begin() -> None:
    # A thread of the other process may have held the lock.
    _state.lock = threading.Lock()
    COMPILED.clear()


os.register_at_fork(after_in_child=_begin)


def compile_text(text: str, options: Strs = ()) -> Entry | None:
    """Compile a source that begins with `head`, or find it in the disk cache; blocks.

    Returns:
        Its function ``run``; None if that is not possible, which is logged once.
    """
    cxx_compiler = compiler()
    if cxx_compiler is None:
        return None
    key = cxx_compiler.key(text, options)
    # One at a time: all of them ask for a whole core.
    with _state.lock:
        if key not in _state.entries and _state.failures < _MOST_FAILURES:
            _state.entries[key] = _compile_entry(cxx_compiler, key, text, options)
        return _state.entries.get(key)


def _compile_entry(cxx_compiler: Compiler, key: bytes, text: str, options: Strs) -> Entry | None:
    cache = default_code_cache()
    cached = cache.find(key)
    if cached is not None:
        # An entry that cannot be loaded as a library is a miss.
        with suppress(OSError, AttributeError):
            return load(cached.code)
    COMPILED.add(key)
    try:
        code = cxx_compiler.compile(text, options)
        entry = load(code)
    except (CompilerError, OSError, AttributeError) as error:
        _state.failures += _MOST_FAILURES if isinstance(error, CompilerHangsError) else 1
        if not _state.has_warned:
            _state.has_warned = True
            _logger.warning(
                "the C++ compiler %s made nothing of an expression, which is computed by NumPy instead; "
                "TRIO_ACCEL_CPU_COMPILED=never does without it: %s",
                cxx_compiler.title,
                error,
            )
        return None
    finally:
        COMPILED.discard(key)
    _state.failures = 0
    cache.store(key, CompiledCode(code))
    return entry


def load(code: bytes) -> Entry:
    """Load a library from memory: the folder of the cache may forbid programs.

    Raises:
        OSError: The code is not a library.
        AttributeError: The library lacks the function ``run``.
    """
    file = os.memfd_create("accel code", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as opened:
            opened.write(code)
        # The loader takes a path that it knows for the same library: the number of the file is used again.
        parts = "".join("./" if digit == "1" else "/" for digit in f"{next(_numbers):b}")
        library: Any = ctypes.CDLL(f"/proc/self/fd/{parts}{file}")
    finally:
        os.close(file)
    run: Any = library.run
    run.argtypes, run.restype = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    return cast("Entry", run)
