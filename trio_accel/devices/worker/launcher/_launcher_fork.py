"""Workers that begin with their modules imported: forks of the launcher, which has imported them once.

Loaded by the launcher when the first such worker is ordered. Like the launcher's own program it must import
nothing but the standard library: the application's `sys.path` is not in force yet.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import linecache
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

_LONGEST = 30  # seconds for imports
_COMMAND = "-c"
# This interpreter is isolated, too, and whether it writes bytecode can be changed.
_OPTIONS = frozenset({"-I", "-B"})
# Read by the dynamic linker or by the C library before a program begins.
_OF_THE_SYSTEM = ("GLIBC_TUNABLES", "LD_", "MALLOC_")
# Read by a BLAS, by OpenMP and by NumPy while they are imported: threads, and kinds of processors.
_OF_LIBRARIES = ("BLIS_", "GOTO_", "MKL_", "NPY_", "OMP_", "OPENBLAS_")
_SELF = "/proc/self"


class Forks:
    """What the launcher has imported, and whether a worker may be a fork of it.

    Args:
        inherited: The environment that this process was started with.
    """

    def __init__(self, inherited: Mapping[str, str]) -> None:
        self._inherited = inherited
        self._has_site = False
        self._imported: set[str] = set()
        self._failed: dict[str, str] = {}
        # The application's environment at the first import.
        self._read: Mapping[str, str] = {}
        # What the modules have done to the environment, and a worker is to find.
        self._changes: dict[str, str | None] = {}
        self._is_open: str | None = None

    def lacks(self, modules: Sequence[str]) -> bool:
        """Whether some of the modules are not imported yet."""
        return not self._imported.issuperset(modules)

    def prepare(
        self,
        modules: Sequence[str],
        path: list[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: int,
    ) -> str | None:
        """Import what is not imported yet.

        Args:
            modules: What the worker is to have imported.
            path: The application's `sys.path`.
            arguments: The worker's command line.
            environment: The application's environment now.
            directory: Descriptor of its working directory.

        Returns:
            Why the worker must be a fresh interpreter; None if it may be a fork.
        """
        why = self._is_open or _unlike(arguments) or self._changed_since(environment)
        missing = [name for name in modules if name not in self._imported]
        if why is None and missing and not self._failed.keys() & missing:
            self._import(missing, path, environment, directory)
        for name in missing:
            why = why or self._failed.get(name)
        if why is None and _threads() > 1:
            why = "an imported module has started a thread"
        return why or self._is_open

    def add(self, module: str, path: list[str], environment: Mapping[str, str], directory: int) -> str | None:
        """Import a module of the application; the arguments are those of `prepare`.

        Returns:
            Why forks of this process are not what they should be; None if they are.
        """
        before = dict(self._changes)
        self._import([module], path, environment, directory)
        if module in self._failed:
            return self._failed[module]
        if _threads() > 1:
            return "its import has started a thread"
        changed = [name for name, value in self._changes.items() if before.get(name, "") != value]
        for name in sorted(changed):
            if name.startswith((*_OF_THE_SYSTEM, *_OF_LIBRARIES)):
                return f"its import changes {name}, which has been read by then"
        return None

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], path: list[str], free: int
    ) -> NoReturn:
        """In the forked child: be the program, until the end.

        Threads are not waited for, and what is registered with `atexit` is not run: both would be the
        launcher's as much as the worker's.

        Args:
            arguments: The worker's command line.
            environment: The application's environment now.
            path: The application's `sys.path`.
            free: The first descriptor that is not the worker's; all from there on are closed.

        Raises:
            Exception: The program has not begun.
        """
        place = arguments.index(_COMMAND)
        code, *rest = arguments[place + 1 :]
        _replace_environment(_changed(environment, self._changes))
        sys.orig_argv[:] = arguments
        sys.argv[:] = [_COMMAND, *rest]
        sys.dont_write_bytecode = "-B" in arguments[:place]
        sys.path[:] = path
        importlib.invalidate_caches()
        _set_signals()
        if environment.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        _reseed()
        with suppress(OSError), open(f"{_SELF}/comm", "wb") as name:
            name.write(b"accel worker")
        for descriptor in map(int, _descriptors()):
            if descriptor >= free:
                os.close(descriptor)
        status = 1
        try:
            status = _run(code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Never back into the launcher's loop, which is below on the stack.
            os._exit(status)

    def _import(
        self, modules: Sequence[str], path: list[str], environment: Mapping[str, str], directory: int
    ) -> None:
        before = _descriptors()
        given = _changed(environment, self._changes)
        self._read = self._read or environment
        _replace_environment(given)
        # Modules may be found relative to it.
        os.fchdir(directory)
        # One that hangs ends this process, even where no Python runs; the application does without then.
        signal.alarm(_LONGEST)
        name = modules[0]
        try:
            self._settle(path)
            for name in modules:
                importlib.import_module(name)
                self._imported.add(name)
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the worker meets it again, and tells
            self._failed[name] = f"an import failed: {error!r}"
        _end_threads()
        signal.alarm(0)
        os.chdir("/")
        now = dict(os.environ)
        self._changes.update(
            {name: now.get(name) for name in now.keys() | given.keys() if now.get(name) != given.get(name)}
        )
        if _descriptors() - before:
            # A worker would share it with the others, or find it closed.
            self._is_open = "an imported module has left a file open"
        # Collecting garbage would write to every object, and so copy the memory that all workers share.
        gc.freeze()

    def _changed_since(self, environment: Mapping[str, str]) -> str | None:
        """Say what only a fresh interpreter would read of the environment."""
        return _difference(environment, self._inherited, _OF_THE_SYSTEM) or _difference(
            environment, self._read or environment, _OF_LIBRARIES
        )

    def _settle(self, path: list[str]) -> None:
        """Look for modules as the application does."""
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
        if not self._has_site:
            # Sets the prefixes of a virtual environment, and the finders that `.pth` files bring.
            import site

            self._has_site = True
            site.ENABLE_USER_SITE = site.getusersitepackages() in path
            site.main()
        sys.path[:] = path
        importlib.invalidate_caches()


def _unlike(arguments: Sequence[str]) -> str | None:
    """Say in what a fresh interpreter would differ from this one, by its command line."""
    if arguments[0] != sys.executable:
        return f"the interpreter is another one now: {arguments[0]}"
    if _COMMAND not in arguments or set(arguments[1 : arguments.index(_COMMAND)]) - _OPTIONS:
        return "the interpreter has options"
    return None


def _difference(
    environment: Mapping[str, str], before: Mapping[str, str], prefixes: tuple[str, ...]
) -> str | None:
    for name in sorted(environment.keys() | before.keys()):
        if name.startswith(prefixes) and environment.get(name) != before.get(name):
            return f"{name} has changed"
    return None


def _threads() -> int:
    return len(os.listdir(f"{_SELF}/task"))


def _end_threads() -> None:
    """Have libraries end the threads that they started when they were imported.

    OpenBLAS does so before each fork. In the forked process it starts as many when it first needs them.
    """
    if _threads() == 1:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    changed = {**environment, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Change what differs, in place: `os.environ` tells the C library too."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # It may have another opinion of local time.
    time.tzset()


def _descriptors() -> set[str]:
    listed = os.listdir(f"{_SELF}/fd")
    # The listing's own is closed by now.
    return {name for name in listed if os.path.lexists(f"{_SELF}/fd/{name}")}


def _set_signals() -> None:
    """Ignore and handle what an interpreter does from its start; here everything has its default action."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reseed() -> None:
    """Give a worker random numbers of its own. Python's `random` does that by itself."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _run(code: str) -> int:
    """Run a program as the main module, as ``python -c`` does; returns its exit code."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if sys.version_info >= (3, 13):
        # Its lines are shown in tracebacks since then.
        linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))  # noqa: S102  # what the application asked for
    except SystemExit as error:
        return _exit_code(error.code)
    except KeyboardInterrupt as error:
        _show(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: ASYNC103, BLE001  # the interpreter would end by it
        _show(error)
        return 1  # noqa: ASYNC104
    return 0


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    # Without the frame of this module.
    error.__traceback__ = trace and trace.tb_next
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: ASYNC103, BLE001  # a broken hook must not hide what happened
        sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        # As the kernel does with what an interpreter gives it.
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201  # what the interpreter does with it
    return 1
