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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

if TYPE_CHECKING:
    from trio_accel.devices.launcher import _launcher_process as program
else:
    import __main__ as program

Order: TypeAlias = Mapping[str, Any]
"""Description of a worker; see `_read_order` of the launcher's program."""

_LONGEST = 30  # seconds for imports
_PATIENCE = 3.0  # seconds for a fork that tries what was imported
# Their library ends or locks them before a fork, and sees to the child afterwards.
_KNOWN_THREADS = {"jemalloc_bg_thd"}
_COMMAND = "-c"
# This interpreter is isolated, too, and whether it writes bytecode can be changed.
_OPTIONS = frozenset({"-I", "-B"})
# Read by the dynamic linker or by the C library before a program begins.
_OF_THE_SYSTEM = ("GLIBC_TUNABLES", "LD_", "MALLOC_")
# Read by a BLAS, by OpenMP and by NumPy while they are imported: threads, and kinds of processors.
_OF_LIBRARIES = ("BLIS_", "GOTO_", "MKL_", "NPY_", "OMP_", "OPENBLAS_")
_SELF = "/proc/self"


class Forks:
    """Imports of the launcher, and whether a worker may be a fork of it."""

    def __init__(self) -> None:
        self._has_site = False
        self._imported: set[str] = set()
        self._failed: dict[str, str] = {}
        # The application's environment at the first import.
        self._read: Mapping[str, str] = {}
        # Changes of the modules to the environment, which a worker has to find.
        self._changes: dict[str, str | None] = {}
        self._is_open: str | None = None
        # The reason why forks would not do for the threads that there are.
        self._thread: str | None = None
        # Threads of trusted modules that run Python, and are no obstacle.
        self._trusted: set[int] = set()

    def lacks(self, order: Order) -> bool:
        """Tell whether some of the modules are not imported yet that a worker is to have."""
        return not self._imported.issuperset(order["preload"])

    def prepare(self, order: Order, directory: int) -> str | None:
        """Import what is not imported yet.

        Args:
            order: Description of the worker.
            directory: Descriptor of the application's working directory.

        Returns:
            Why the worker must be a fresh interpreter; None if it may be a fork.
        """
        why = self._is_open or _unlike(order["arguments"]) or self._changed_since(order["environment"])
        missing = [name for name in order["preload"] if name not in self._imported]
        if why is None and missing and not self._failed.keys() & missing:
            self._import(missing, order, directory)
        for name in missing:
            why = why or self._failed.get(name)
        if why is None and self._thread is not None:
            why = f"an imported module {self._thread}"
        return why or self._is_open

    def add(self, order: Order, directory: int, pieces: Sequence[str] | None) -> str | None:
        """Import a module of the application, and rehearse its classes.

        Args:
            order: The module; if it is trusted, leftovers of its import are no obstacle.
            directory: Descriptor of the application's working directory.
            pieces: Modules among its imports, which are imported instead of it.

        Returns:
            Why forks of this process would be damaged; None if they would not.
        """
        before, was_open = dict(self._changes), self._is_open
        if pieces is None:
            self._import([order["module"]], order, directory, _rehearsals)
            if order["module"] in self._failed:
                return self._failed[order["module"]]
        else:
            self._import(pieces, order, directory)
        if order["trusted"]:
            self._thread, self._is_open = None, was_open
            self._trusted.update(sys._current_frames())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            return None
        if self._thread is not None:
            return f"its import {self._thread}"
        changed = [name for name, value in self._changes.items() if before.get(name, "") != value]
        for name in sorted(changed):
            # D97: libraries read these once, so a worker with another value needs a fresh interpreter.
            if name.startswith((*_OF_THE_SYSTEM, *_OF_LIBRARIES)):
                return f"its import changes {name}, which has been read by then"
        return None

    def run(self, order: Order, free: int) -> NoReturn:
        """Be the program until the end, in the forked child.

        Threads are not waited for, and `atexit` functions are not run: both may be the launcher's.

        Args:
            order: Description of the worker.
            free: The first descriptor that is not the worker's; all from there on are closed.

        Raises:
            Exception: The program has not begun.
        """
        arguments, environment = order["arguments"], order["environment"]
        place = arguments.index(_COMMAND)
        code, *rest = arguments[place + 1 :]
        _replace_environment(_changed(environment, self._changes))
        sys.orig_argv[:] = arguments
        sys.argv[:] = [_COMMAND, *rest]
        sys.dont_write_bytecode = "-B" in arguments[:place]
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
            # Never back into the launcher's loop, which is below on the stack.
            os._exit(status)

    def _import(
        self,
        modules: Sequence[str],
        order: Order,
        directory: int,
        rehearsals_of: Callable[[ModuleType], list[Callable[[], object]]] | None = None,
    ) -> None:
        before = program.files().keys()
        given = _changed(order["environment"], self._changes)
        self._read = self._read or order["environment"]
        _replace_environment(given)
        # Entries of `sys.path` may be relative to the application's working directory.
        os.fchdir(directory)
        # An import that hangs ends this process, even where no Python runs; the application goes on without.
        signal.alarm(_LONGEST)
        self._settle(order["path"])
        rehearsals: list[Callable[[], object]] = []
        for name in modules:
            try:
                module = importlib.import_module(name)
                if rehearsals_of is not None:
                    rehearsals += rehearsals_of(module)
                self._imported.add(name)
            except BaseException as error:  # noqa: ASYNC103, BLE001  # the worker meets it again, and tells
                self._failed[name] = f"an import failed: {error!r}"
        try:
            for rehearse in rehearsals:
                rehearse()
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the same
            self._failed[modules[0]] = f"its rehearsal failed: {error!r}"
        self._thread = _judge_threads(rehearsals, self._trusted)
        signal.alarm(0)
        os.chdir("/")
        now = dict(os.environ)
        self._changes.update(
            {name: now.get(name) for name in now.keys() | given.keys() if now.get(name) != given.get(name)}
        )
        if program.files().keys() - before:
            # A worker would share the file with the others, or find it closed.
            self._is_open = "an imported module has left a file open"
        # Collecting garbage would write to every object, and so copy the memory that all workers share.
        gc.freeze()

    def _changed_since(self, environment: Mapping[str, str]) -> str | None:
        """Say what only a fresh interpreter would read of the environment."""
        return _difference(environment, program.ENVIRONMENT, _OF_THE_SYSTEM) or _difference(
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
    if not _is_same(arguments[0], sys.executable):
        return f"the interpreter is another one now: {arguments[0]}"
    if _COMMAND not in arguments or set(arguments[1 : arguments.index(_COMMAND)]) - _OPTIONS:
        return "the interpreter has options"
    return None


def _is_same(one: str, other: str) -> bool:
    """Whether two paths are those of one interpreter: the same file in the same environment.

    An interpreter removes ``..`` from the path that it is started by. Those of all virtual environments may
    be links to one file: the folder above theirs says which environment it is (``pyvenv.cfg``).
    """
    for _ in range(3):
        if one == other:
            return True
        try:
            if not os.path.samefile(one, other):
                return False
        except OSError:
            return False
        one, other = os.path.dirname(one), os.path.dirname(other)
    return True


def _difference(
    environment: Mapping[str, str], before: Mapping[str, str], prefixes: tuple[str, ...]
) -> str | None:
    for name in sorted(environment.keys() | before.keys()):
        if name.startswith(prefixes) and environment.get(name) != before.get(name):
            return f"{name} has changed"
    return None


def _rehearsals(module: ModuleType) -> list[Callable[[], object]]:
    """Find the class methods `rehearse` of a module's own classes."""
    return [
        getattr(each, "rehearse")  # noqa: B009  # of any class
        for each in vars(module).values()
        if isinstance(each, type)
        and each.__module__ == module.__name__
        and isinstance(vars(each).get("rehearse"), classmethod)
    ]


def _judge_threads(rehearsals: Sequence[Callable[[], object]], trusted: set[int]) -> str | None:
    """Say of the threads that imports have left what keeps a fork from doing without them; None if nothing.

    Libraries may end theirs before each fork, as OpenBLAS does: in the forked process it starts as many when
    it first needs them. Threads that run Python may hold any lock. Others are judged by a fork, which is used
    as a worker would be.
    """
    if not _threads():
        return None
    # D97: BLAS libraries end their threads before a fork, by `pthread_atfork`: an empty fork makes them do
    # so.
    why = _try_fork(None)
    names = _threads()
    if running := sys._current_frames().keys() - {threading.get_ident()} - trusted:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        known = [thread.name for thread in threading.enumerate() if thread.ident in running]
        return f"has started a thread that runs Python: {', '.join(known) or 'without a name'}"
    if not names <= _KNOWN_THREADS:
        why = why or _try_fork(rehearsals)
    return f"has started a thread, {min(names, default='which has ended')}, and {why}" if why else None


def _threads() -> set[str]:
    """Return the names of the threads beside this one, as the kernel has them."""
    names: set[str] = set()
    for task in set(os.listdir(f"{_SELF}/task")) - {str(os.getpid())}:
        with suppress(OSError), open(f"{_SELF}/task/{task}/comm") as name:
            names.add(name.read().strip())
    return names


def _try_fork(rehearsals: Sequence[Callable[[], object]] | None) -> str | None:
    """Have a fork do what workers do, or nothing, and say how it failed; None if it did not."""
    pid = program.fork()
    if pid == 0:
        if rehearsals is None:
            os._exit(0)
        _be_used(rehearsals)
    child = os.pidfd_open(pid)
    is_over = program.is_dead(child, _PATIENCE)
    os.close(child)
    if not is_over:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not is_over:
        return f"a fork without it did not end within {_PATIENCE:g} s"
    return f"a fork without it ended with {os.waitstatus_to_exitcode(status)}" if status else None


def _be_used(rehearsals: Sequence[Callable[[], object]]) -> NoReturn:
    """Import, allocate, compute, start a thread, and end; in the forked child."""
    status = 1
    try:
        for rehearse in rehearsals:
            rehearse()
        importlib.import_module("wave")
        del [bytearray(1 << size) for size in range(4, 24)][:]
        for name in ("numpy", "torch"):
            # Products take the threads of a library, where there are any.
            if ones := getattr(sys.modules.get(name), "ones", None):
                float((ones((256, 256)) @ ones((256, 256))).sum())
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        status = 0
    finally:
        os._exit(status)


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Change an environment; None stands for a variable that is gone."""
    now = {**environment, **changes}
    return {name: value for name, value in now.items() if value is not None}


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Change what differs, in place: `os.environ` tells the C library too."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # The new environment may have another time zone.
    time.tzset()


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
    # The frame of this module is cut off.
    error.__traceback__ = trace and trace.tb_next
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: ASYNC103, BLE001  # a broken hook must not hide what happened
        sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        # The kernel does the same with an interpreter's exit status.
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201  # what the interpreter does with it
    return 1
