"""Workers that begin with their modules imported, as forks of the launcher, which has imported them once.

`Forks` imports the modules, decides whether a worker may be a fork, and runs its program in the fork. Imports
may leave threads, open files or signal handlers (`Traces`), child processes, or changed variables that
libraries have read. After such an import, workers are fresh interpreters.

The launcher loads this module when the first such worker is ordered. Like the launcher's own program it must
import only the standard library, because the application's `sys.path` is not set yet.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

if TYPE_CHECKING:
    from trio_accel.devices.launcher import _launcher_process as program
else:
    import __main__ as program

Order: TypeAlias = Mapping[str, Any]
"""The description of a worker; see `_read_order` of the launcher's program."""

_IMPORT_TIMEOUT = 30  # seconds
# How often to look for threads that have ended but that the kernel may still list, and seconds between looks.
_LOOKS, _PAUSE = 20, 0.01
# pyarrow's allocator locks its thread before a fork, and starts a new one in the child.
_KNOWN_THREADS = {"jemalloc_bg_thd"}
_COMMAND = "-c"
# The interpreter options that a fork can have: the launcher is isolated also, and can switch bytecode off.
_OPTIONS = frozenset({"-I", "-B"})
# The dynamic linker or the C library reads these before a program begins.
_OF_THE_SYSTEM = ("GLIBC_TUNABLES", "LD_", "MALLOC_")
# A BLAS, OpenMP and NumPy read these at their import: threads, and kinds of processors.
_OF_LIBRARIES = ("BLIS_", "GOTO_", "MKL_", "NPY_", "OMP_", "OPENBLAS_")
_SELF = "/proc/self"
# The kernel's masks of blocked, ignored and caught signals.
_MASKS = (b"SigBlk", b"SigIgn", b"SigCgt")
# Debuggers import readline, which handles this signal from its import on, to notice the terminal's size.
_HARMLESS = {signal.SIGWINCH}


class Forks:
    """Imports modules in the launcher, and decides whether a worker may be a fork of it."""

    def __init__(self) -> None:
        self._has_site = False
        self._imported: set[str] = set()
        self._failed: dict[str, str] = {}
        # The application's environment at the first import.
        self._read: Mapping[str, str] = {}
        # Changes to the environment by modules, which a worker must also have. None is a removed variable.
        self._changes: dict[str, str | None] = {}
        # A trace of an import that no fork may have. It can never be removed.
        self._obstacle: str | None = None

    def lacks(self, order: Order) -> bool:
        """Return whether a worker needs modules not imported yet."""
        return not self._imported.issuperset(order["preload"])

    def prepare(self, order: Order, directory: int) -> str | None:
        """Import the missing modules.

        Args:
            order: The description of the worker.
            directory: The descriptor of the application's working directory.

        Returns:
            The reason why the worker must be a fresh interpreter; None if it may be a fork.
        """
        reason = (
            self._obstacle
            or _interpreter_difference(order["arguments"])
            or self._changed_since(order["environment"])
        )
        missing = [name for name in order["preload"] if name not in self._imported]
        if reason is None and missing and not self._failed.keys() & missing:
            traces = Traces()
            # The signal ends this process if an import hangs, even outside of Python code. The application
            # continues without it.
            signal.alarm(_IMPORT_TIMEOUT)
            self._import(missing, order, directory)
            if (leftover := traces.first_change()) is not None:
                self._obstacle = f"an imported module {leftover}"
            signal.alarm(0)
        failed = [self._failed[name] for name in missing if name in self._failed]
        return reason or next(iter(failed), self._obstacle)

    def add(self, order: Order, directory: int) -> str | None:
        """Import modules of the application, up to the first obstacle; in a child of the launcher.

        Args:
            order: The modules. Leftovers of trusted modules do not prevent a fork.
            directory: The descriptor of the application's working directory.

        Returns:
            The reason why forks of this process would be damaged; None if they would not.
        """
        checks = [program.load(path).driver_in_use for path in order["checks"]]
        for name, is_trusted in order["modules"]:
            traces, changes = Traces(), dict(self._changes)
            self._import([name], order, directory)
            if name in self._failed:
                return self._failed[name]
            # An initialised driver is more informative than the threads that it has started.
            leftover = next((text for check in checks if (text := check()) is not None), None)
            if leftover is None and not is_trusted:
                leftover = (
                    _leftover_child() or traces.first_change() or _changed_too_late(changes, self._changes)
                )
            if leftover is not None:
                return f"the import of {name} {leftover}"
        return None

    def run(self, order: Order, free: int) -> NoReturn:
        """Run a worker's program in the forked child, and end the process.

        Threads are not awaited, and `atexit` functions are not run, because both may be the launcher's.

        Args:
            order: The description of the worker.
            free: The first descriptor after the worker's own. This and all higher descriptors are closed.

        Raises:
            Exception: The child could not be prepared, so the program has not begun.
        """
        arguments, environment = order["arguments"], order["environment"]
        index = arguments.index(_COMMAND)
        code, *rest = arguments[index + 1 :]
        _replace_environment(_changed(environment, self._changes))
        sys.orig_argv[:] = arguments
        sys.argv[:] = [_COMMAND, *rest]
        sys.dont_write_bytecode = "-B" in arguments[:index]
        sys.path[:] = order["path"]
        importlib.invalidate_caches()
        _set_signals()
        if environment.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        _reseed()
        program.rename(b"accel worker")
        program.close_from(free)
        status = 1
        try:
            status = _run(code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Never return to the launcher's loop, which is lower on the stack.
            os._exit(status)

    def _import(self, modules: Sequence[str], order: Order, directory: int) -> None:
        """Import modules in the application's environment, and record failures and changed variables."""
        environment = _changed(order["environment"], self._changes)
        self._read = self._read or order["environment"]
        _replace_environment(environment)
        # Entries of `sys.path` may be relative to the application's working directory.
        os.fchdir(directory)
        self._settle(order["path"])
        for name in modules:
            try:
                importlib.import_module(name)
                self._imported.add(name)
            except BaseException as error:  # noqa: ASYNC103, BLE001  # the worker meets it again, and reports it
                self._failed[name] = f"the import of {name} failed: {error!r}"
        os.chdir("/")
        now = dict(os.environ)
        self._changes.update(
            {
                name: now.get(name)
                for name in now.keys() | environment.keys()
                if now.get(name) != environment.get(name)
            }
        )
        # A garbage collection would write to every object, and so copy memory that all workers share.
        gc.freeze()

    def _changed_since(self, environment: Mapping[str, str]) -> str | None:
        """Return which environment change only a fresh interpreter would notice."""
        return _environment_difference(
            environment, program.ENVIRONMENT, _OF_THE_SYSTEM
        ) or _environment_difference(environment, self._read or environment, _OF_LIBRARIES)

    def _settle(self, path: list[str]) -> None:
        """Set up imports, so that they find modules as in the application."""
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
        if not self._has_site:
            # This sets the prefixes of a virtual environment, and the finders from `.pth` files.
            import site

            self._has_site = True
            site.ENABLE_USER_SITE = site.getusersitepackages() in path
            site.main()
        sys.path[:] = path
        importlib.invalidate_caches()


def _interpreter_difference(arguments: Sequence[str]) -> str | None:
    """Return why a fresh interpreter with this command line would differ from a fork; None if not."""
    # Do not compare with `sys.executable`, which may be another form of the path.
    if arguments[0] != sys.orig_argv[0]:
        return f"the interpreter is another one now: {arguments[0]}"
    if _COMMAND not in arguments or set(arguments[1 : arguments.index(_COMMAND)]) - _OPTIONS:
        return "the interpreter has options"
    return None


def _environment_difference(
    environment: Mapping[str, str], previous: Mapping[str, str], prefixes: tuple[str, ...]
) -> str | None:
    """Return the first changed variable with one of these prefixes, as a reason; None if there is none."""
    for name in sorted(environment.keys() | previous.keys()):
        if name.startswith(prefixes) and environment.get(name) != previous.get(name):
            return f"{name} has changed"
    return None


class Traces:
    """Records the state of the process that an import may change."""

    def __init__(self) -> None:
        self._files = program.files()
        self._signals = _signals()
        self._tasks = set(os.listdir(f"{_SELF}/task"))

    def first_change(self) -> str | None:
        """Return the first change since the constructor that no fork may have; None if there is none."""
        if threads := self._threads():
            return f"has left threads running: {', '.join(sorted(threads))}"
        files, signals = program.files(), _signals()
        opened = sorted(
            target for descriptor, target in files.items() if self._files.get(descriptor) != target
        )
        if opened:
            return f"has left a file open: {opened[0]}"
        if files != self._files:
            return "has closed a file that is not its own"
        changed = [name for name, how in signals.items() if how != self._signals[name]]
        if changed:
            return f"changes what happens at {', '.join(changed)}"
        return None

    def _threads(self) -> set[str]:
        """Return the names of the new threads that do not end before a fork."""
        if self._new_threads():
            # D97: BLAS libraries end their threads before a fork, by `pthread_atfork`. A fork that exits at
            # once makes them do so.
            pid = program.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        for _ in range(_LOOKS):
            if not self._new_threads():
                break
            time.sleep(_PAUSE)
        return self._new_threads()

    def _new_threads(self) -> set[str]:
        threads: set[str] = set()
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        for task in set(os.listdir(f"{_SELF}/task")) - self._tasks:
            with suppress(OSError), open(f"{_SELF}/task/{task}/comm") as name:
                threads.add(names.get(task) or name.read().strip())
        return threads - _KNOWN_THREADS


def _signals() -> dict[str, tuple[object, ...]]:
    """Return how Python and the kernel handle each signal, because libraries may set handlers in C."""
    with open(f"{_SELF}/status", "rb") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(_MASKS)]
    return {
        number.name: (signal.getsignal(number), *[mask >> (number - 1) & 1 for mask in masks])
        for number in signal.Signals
        if number not in _HARMLESS
    }


def _leftover_child() -> str | None:
    """Return that an import has left a child process; None if there is none."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "has left a process running"
    return None


def _changed_too_late(previous: Mapping[str, str | None], now: Mapping[str, str | None]) -> str | None:
    """Return the first changed variable that libraries may have read before; None if there is none.

    Only a fresh interpreter would have the change in time.
    """
    for name in sorted(now):
        if name.startswith((*_OF_THE_SYSTEM, *_OF_LIBRARIES)) and previous.get(name, "") != now[name]:
            return f"changes {name}, which has been read by then"
    return None


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with changes. The value None removes a variable."""
    now = {**environment, **changes}
    return {name: value for name, value in now.items() if value is not None}


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the process's environment: change `os.environ` in place, which also informs the C library."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # The new environment may have another time zone.
    time.tzset()


def _set_signals() -> None:
    """Set signal actions as an interpreter does at its start; the launcher has the default actions."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reseed() -> None:
    """Reseed NumPy's global generator, which all forks would share. Python's `random` reseeds itself."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _run(code: str) -> int:
    """Run a program as the main module, like ``python -c``; return its exit code."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if sys.version_info >= (3, 13):
        # From this version on, tracebacks show the lines of ``-c`` programs.
        linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))  # noqa: S102  # ordered by the application
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
        return 1
    except BaseException as error:  # noqa: ASYNC103, BLE001  # the interpreter would end
        # Remove the frame of this function, which a ``python -c`` traceback does not have.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1  # noqa: ASYNC104
    return 0
