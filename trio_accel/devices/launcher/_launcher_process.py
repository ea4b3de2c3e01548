"""The program of the launcher process: it starts worker processes, and cleans up all of them.

The application runs this file by its path, in an isolated interpreter without `site`. It must start quickly,
so it imports only the standard library. Its only thread forks all workers, because the kernel sends a
parent-death signal as soon as the forking thread ends.

`LauncherServer.run` serves orders until the control socket or the application ends. Orders and reports are
JSON, one triple ``[kind, number, detail]`` per packet, with descriptors attached. If the detail of an order
is too long for a packet, it is in a file, and the last descriptor refers to that file. `report` never waits,
because the application may be busy while its end has to be noticed.

A worker is a fresh interpreter (`_execute`), unless its order names modules to import in advance: the
launcher imports them once, and forks the worker from itself. See `_launcher_fork.py`. Other orders import the
application's modules without starting a worker; see `_launcher_trial.py`.

The sequence matters in these places:

* Deaths are handled before orders, so that the next worker does not find leftovers of earlier workers.
* Processes that a worker starts die with it (D78). The worker adopts its orphaned descendants (`_become`),
  and the launcher adopts the orphans of a dead worker. `_reap` kills them before it reports the worker's end,
  because they may hold its sockets, memory, and files of the driver.
* Descriptors of an order are closed before ``started`` is reported, because the application relies on the
  absence of copies in other processes.
* A child asks for its parent-death signal first, and then checks its parent: if the launcher has died before,
  the signal would never come.

The launcher holds a descriptor of each memory chunk (``keep``, ``forget``). If the application dies without
the order ``end``, the launcher empties the chunks, because they would otherwise live as long as any process
has a descriptor (D3). After an orderly end it must not touch them: the program may still hold arrays over
them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from types import ModuleType

PACKET = 1 << 16  # longer details of orders are sent in files
_STRING = 1 << 17  # the kernel's limit for one string of an environment, with the zero at its end
_MOST_DESCRIPTORS = 253  # the kernel's limit for one packet
_FIRST = 3  # a worker's first own descriptor, after the standard ones
CODE_FOLDER = "trio-accel-code-"  # prefix of the folders in which compilers work
_UNWIND = 1.0  # seconds to wait for killed processes to end
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_SELF = "/proc/self/task"
_FORKS = Path(__file__).with_name("_launcher_fork.py")
_TRIAL = Path(__file__).with_name("_launcher_trial.py")

_libc = ctypes.CDLL(None)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_PUNCH_HOLE = 0x3  # includes FALLOC_FL_KEEP_SIZE, which is required


class LauncherServer:
    """Serves the application until its control socket or its process ends."""

    def __init__(self, control: socket.socket, application: int) -> None:
        self._control = control
        self._application = application
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(application, select.POLLIN)
        # By the descriptor of each worker's process: the number of its order, and its pid.
        self._workers: dict[int, tuple[int, int]] = {}
        self._chunks: dict[int, int] = {}
        # `Forks` and `ImportTrials` of modules that import this one.
        self._forks: Any = None
        self._trials: Any = None
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._is_wanted = True
        self._ends_in_order = False

    def run(self) -> None:
        """Serve; no worker is left when this returns."""
        self.report("ready", 0, os.getpid())
        while self._is_wanted:
            # Deaths come first, so that the next worker finds nothing left of earlier ones.
            patience = None if self._trials is None else self._trials.patience()
            ready = sorted(self._poll.poll(patience), key=lambda event: event[0] not in self._workers)
            for descriptor, events in ready:
                if descriptor == self._application:
                    self._is_wanted = False
                elif descriptor == self._control.fileno():
                    self._talk(events)
                else:
                    self._reap(descriptor)
            if self._trials is not None:
                self._trials.poll()
        self._end_workers()
        # D3: without this, chunks would live as long as any process has a descriptor of them. After an
        # orderly end they stay, because the program may still hold arrays over them.
        if not self._ends_in_order and is_dead(self._application, _UNWIND):
            # Closing the descriptors is not enough, because a forked child of the application may have
            # copies.
            for chunk in self._chunks.values():
                _empty(chunk)

    def _talk(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if not events & ~select.POLLOUT:
            return
        try:
            data, descriptors = receive(self._control)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._is_wanted = False
            return
        self._obey(*cast("tuple[str, int, object]", json.loads(data)), descriptors)

    def _obey(self, kind: str, number: int, detail: object, descriptors: list[int]) -> None:
        match kind:
            case "ping":
                self.report("pong", number, 0)
            case "start":
                self._start(number, detail, descriptors)
            case "import":
                self._import_ahead(number, detail, descriptors)
            case "kill":
                self._kill(number)
            case "keep" if descriptors:
                self._chunks[number] = descriptors[0]
            case "forget" if number in self._chunks:
                os.close(self._chunks.pop(number))
            case "end":
                self._ends_in_order = True
            case _:
                # The order ``keep`` of a chunk without a free descriptor here, and its ``forget``.
                pass

    def _start(self, number: int, detail: object, descriptors: list[int]) -> None:
        try:
            order = _read_order(detail, descriptors)
            program = self._program(number, order, descriptors)
            pid = program if isinstance(program, int) else spawn(program, descriptors, os.getpid())
            worker = self.watch(number, pid)
        except OSError as error:
            close_all(descriptors)
            self.report("failed", number, str(error))
            return
        # Close before the report, because its reader relies on the absence of copies in other processes.
        close_all(descriptors)
        self.report("started", number, pid, worker)

    def watch(self, number: int, pid: int) -> int:
        """Watch a child; return the descriptor of its process."""
        try:
            worker = os.pidfd_open(pid)
        except OSError:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        self._workers[worker] = (number, pid)
        self._poll.register(worker, select.POLLIN)
        return worker

    def _import_ahead(self, number: int, detail: object, descriptors: list[int]) -> None:
        """Have a child import modules of the application."""
        try:
            order = _read_order(detail, descriptors)
        except OSError as error:
            close_all(descriptors)
            self.report("tried", number, {"reason": str(error), "seconds": 0.0})
            return
        if self._trials is None:
            self._forks = self._forks or _load_forks()
            self._trials = load(_TRIAL).ImportTrials(self, self._forks)
        self._trials.add(number, order, descriptors[0])

    def _program(
        self, number: int, order: Mapping[str, Any], descriptors: Sequence[int]
    ) -> Callable[[int], object] | int:
        """Return the body of a worker's process, or its pid if it has already been forked.

        Modules to import in advance are imported now, which takes half a second. In that time this process
        does not notice the end of the application, or of other workers. It dies of SIGALRM if the import
        takes far too long. The pid belongs to a fork of the process with the application's imported modules.
        """
        if order["preload"]:
            forks = self._forks = self._forks or _load_forks()
            if forks.lacks(order):
                # Imports block this process, and the application must not mistake its silence for a hang
                # (D79).
                self.report("importing", number, 0)
            reason = forks.prepare(order, descriptors[0])
            if reason is None:
                pid = self._trials and self._trials.ask("start", order, descriptors)
                return pid or (lambda free: forks.run(order, free))
            self.report("fresh", number, reason)
        return lambda _: _execute(order["arguments"], order["environment"])

    def _kill(self, number: int) -> None:
        for worker, (worker_number, _) in self._workers.items():
            if worker_number == number:
                signal.pidfd_send_signal(worker, signal.SIGKILL)

    def _reap(self, worker: int) -> None:
        number, pid = self._workers.pop(worker)
        self._poll.unregister(worker)
        os.close(worker)
        _, status = os.waitpid(pid, 0)
        # The trials come first: a process left by a trial may be the template from which workers are forked
        # (D138).
        is_trial = self._trials is not None and self._trials.ended(pid, status)
        self._end_orphans()
        if not is_trial:
            self.report("exited", number, status)

    def _orphans(self) -> set[int]:
        orphans = _children().difference(pid for _, pid in self._workers.values())
        return orphans if self._trials is None else orphans - self._trials.awaited(orphans)

    def _end_orphans(self) -> None:
        """Kill the processes that dead workers left, and remove the folders of their compilers."""
        folders: set[str] = set()
        try:
            self._kill_orphans(folders)
        finally:
            for folder in folders:
                from shutil import rmtree

                rmtree(folder, ignore_errors=True)

    def _kill_orphans(self, folders: set[str]) -> None:
        # Each death may orphan further processes.
        deadline = time.monotonic() + _UNWIND
        while orphans := self._orphans():
            for pid in orphans:
                with suppress(OSError):
                    # A shell around a compiler works in this folder, and would remove it if it were not
                    # killed.
                    folder = os.readlink(f"/proc/{pid}/cwd")
                    if os.path.basename(folder).startswith(CODE_FOLDER):
                        folders.add(folder)
                # Forks in a chain may be faster than a signal to each, but none escapes a signal to its
                # group.
                group = os.getpgid(pid)
                if group != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                process = os.pidfd_open(pid)
                has_ended = is_dead(process, max(deadline - time.monotonic(), 0.0))
                os.close(process)
                if not has_ended:
                    # The kernel delays its end. The next worker's death looks for it again.
                    return
                os.waitpid(pid, 0)

    def report(
        self, kind: str, number: int, detail: int | str | dict[str, object], *descriptors: int
    ) -> None:
        # This never waits: the application may be busy, and its end has to be noticed nevertheless.
        self._outbox.append((json.dumps([kind, number, detail]).encode(), tuple(map(os.dup, descriptors))))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            if not send(self._control, *self._outbox[0]):
                self._poll.modify(self._control, select.POLLIN | select.POLLOUT)
                return
            close_all(self._outbox.popleft()[1])
        self._poll.modify(self._control, select.POLLIN)

    def _end_workers(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        deadline = time.monotonic() + _UNWIND
        for worker, (_, pid) in self._workers.items():
            # A worker that the kernel does not end must not keep the memory of the others.
            if is_dead(worker, max(deadline - time.monotonic(), 0.0)):
                os.waitpid(pid, 0)
        self._end_orphans()


def _empty(chunk: int) -> None:
    """Free the pages of shared memory; its sealed size stays.

    Descriptors without that seal are skipped: they are device memory, or not memory at all.
    """
    with suppress(OSError):
        if fcntl.fcntl(chunk, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            _fallocate(chunk, _PUNCH_HOLE, 0, os.fstat(chunk).st_size)


def send(control: socket.socket, data: bytes, descriptors: Sequence[int]) -> bool:
    """Send a packet and descriptors without waiting; return whether it was accepted."""
    # `send_fds` ignores the flags that it takes, and so does `recv_fds`.
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
    try:
        control.sendmsg([data], [rights] if descriptors else [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        # The other end is closed; reading notices that.
        return True
    return True


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors, which children do not inherit."""
    descriptors = array("i")
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, _, _ = control.recvmsg(PACKET, room, socket.MSG_CMSG_CLOEXEC)
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    return data, list(descriptors)


def _read_order(detail: object, descriptors: list[int]) -> dict[str, Any]:
    """Read the description of a worker, which may be in the file of the last descriptor.

    Returns:
        Its arguments, its environment, the modules to import in advance (``preload``), and their ``path``.
        For ``modules`` of the application also their names, each with whether it is trusted, and ``checks``:
        files that report whether a driver has been initialised; see `AccelBackend.driver_check`.

    Raises:
        OSError: Some of the descriptors are missing.
    """
    if detail is None and descriptors:
        detail = json.loads(read_all(descriptors.pop()))
    order = cast("dict[str, Any] | None", detail)
    if order is None or len(descriptors) != order["descriptors"]:
        raise OSError("there are too many open files in the launcher of worker processes")
    return {"preload": [], "path": [], **order}


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def read_all(descriptor: int) -> bytes:
    """Read a file from its beginning, and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def files() -> dict[int, str]:
    """Return this process's open descriptors, each with its path."""
    paths: dict[int, str] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            paths[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return paths


def close_from(first: int) -> None:
    """Close the descriptors of the launcher or the template, in a child."""
    close_all(descriptor for descriptor in files() if descriptor >= first)


def rename(name: bytes) -> None:
    """Give this process a name."""
    with suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name)


def _children() -> set[int]:
    """Return the children of this process, including dead, unreaped children."""
    children: set[int] = set()
    try:
        for task in os.listdir(_SELF):
            with open(f"{_SELF}/{task}/children", "rb") as file:
                children.update(map(int, file.read().split()))
    except FileNotFoundError:
        # Some kernels lack these lists.
        return {
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent(pid) == os.getpid()
        }
    return children


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        # The process has ended.
        return 0


def is_dead(process: int, within: float = 0.0) -> bool:
    """Return whether all threads of a process have ended within some seconds, by its descriptor."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(within * 1000))


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its exit code; a negative code is a signal number."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _load_forks() -> Any:
    return load(_FORKS).Forks()


def load(path: str | Path) -> ModuleType:
    """Load a module by its path, because this process does not load the package."""
    from importlib import util

    spec = util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spawn(program: Callable[[int], object], descriptors: Sequence[int], launcher: int) -> int:
    """Start a child of the launcher; return its pid after its program has begun.

    Args:
        program: Runs in the forked child, with the first free descriptor number.
        descriptors: The working directory, then the descriptors that the child gets.
        launcher: The launcher's pid. If this is another process, the launcher adopts the child.

    Raises:
        OSError: The child could not be started.
    """
    directory, *inherited = descriptors
    reader, writer = os.pipe()
    try:
        pid = _fork_for(launcher)
        if pid == 0:
            _become(program, directory, inherited, launcher, writer)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with open(reader, "rb") as pipe:
        # The pipe closes at the `execve`, or when the fork closes its descriptors: no data means success.
        failure = pipe.read()
    if failure:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        raise OSError(failure.decode())
    return pid


def fork() -> int:
    """Fork without Python's warning about threads that an imported module has started."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return os.fork()


def _fork_for(launcher: int) -> int:
    """Fork a child of the launcher, which adopts it if this is another process."""
    if launcher == os.getpid():
        return fork()
    # D138: the nearest subreaper adopts an orphan. This process must not be one, so that the launcher
    # adopts the child and reaps it.
    _prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    reader, writer = os.pipe()
    intermediate_pid = fork()
    if intermediate_pid == 0:
        intermediate_pid = os.getpid()
        if (pid := fork()) != 0:
            os.write(writer, str(pid).encode())
            os._exit(0)
        # The child waits until it is adopted, because its parent-death signal is bound to its parent at the
        # time of the request.
        while os.getppid() == intermediate_pid:
            time.sleep(0.0002)
        return 0
    os.close(writer)
    with open(reader, "rb") as pipe:
        # Read once, because the pipe stays open: the child inherited its other end.
        said = os.read(pipe.fileno(), 20)
    os.waitpid(intermediate_pid, 0)
    if not said:
        raise OSError("no process could be forked")
    return int(said)


def _execute(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become a fresh interpreter. Only the standard descriptors and the worker's own are inheritable here.

    The environment may be too long to start a program. Then the worker gets the launcher's own.
    """
    fitting = {name: value for name, value in environment.items() if _fits(name, value)}
    try:
        os.execve(arguments[0], arguments, fitting)  # noqa: S606  # as ordered
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        os.execve(arguments[0], arguments, ENVIRONMENT)  # noqa: S606  # the same


def _fits(name: str, value: str) -> bool:
    return len(os.fsencode(name)) + len(os.fsencode(value)) + 2 <= _STRING


def _become(
    program: Callable[[int], object], directory: int, descriptors: Sequence[int], launcher: int, failure: int
) -> NoReturn:
    """Turn the forked child into the worker."""
    try:
        _prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            # The launcher died before the request, so the parent-death signal will never come.
            os._exit(1)
        # D78: the worker adopts its orphaned descendants, so that they die with it.
        _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _reset_signals()
        resource.setrlimit(resource.RLIMIT_NOFILE, _FILE_LIMIT)
        os.fchdir(directory)
        # First move all descriptors aside, because one may have a number that another needs.
        free = _FIRST + len(descriptors)
        failure = fcntl.fcntl(failure, fcntl.F_DUPFD_CLOEXEC, free)
        aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in descriptors]
        for target, descriptor in enumerate(aside, _FIRST):
            os.dup2(descriptor, target)
        program(free)
    except Exception as error:  # noqa: BLE001  # it is reported to the caller
        os.write(failure, (str(error) or type(error).__name__).encode(errors="replace"))
    finally:
        os._exit(127)


def _reset_signals() -> None:
    # Ignored signals are inherited from the application. Handlers do not survive an `execve`, but in a fork
    # the handlers of imported modules are active.
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _open_control(number: int) -> socket.socket:
    """Move the control socket away from standard descriptors that the application had closed."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    os.close(number)
    while (null := os.open(os.devnull, os.O_RDWR)) < _FIRST:
        os.set_inheritable(null, True)
    os.close(null)
    return socket.socket(fileno=moved)


def _open_again() -> None:
    """Reopen standard error if it is a pipe or a terminal, so that it is not shared with the application.

    Otherwise a worker that makes it non-blocking would truncate the application's own output, without an
    error.
    """
    # Sockets, and files of another user, cannot be opened this way.
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(2).st_mode) or os.isatty(2):
            # Opening a pipe without a reader would block.
            reopened = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            os.set_blocking(reopened, True)
            os.dup2(reopened, 2)
            os.close(reopened)


def main(control: int, parent: int) -> None:
    """Run the launcher.

    Args:
        control: The descriptor of the control socket.
        parent: The pid of the application.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # An application that ignores SIGCHLD passes that on, and then the kernel would reap the workers itself.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # An ignored SIGALRM would not end imports that hang.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # The launcher may keep the chunks of several devices.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILE_LIMIT[1], _FILE_LIMIT[1]))
    _open_again()
    with _open_control(control) as connected:
        application = os.pidfd_open(os.getppid())
        # This check comes second, because the application was alive then, so the descriptor is for the right
        # process.
        if os.getppid() != parent:
            return
        # The launcher must not keep a file system busy.
        os.chdir("/")
        LauncherServer(connected, application).run()


_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
# Kept here, because imported modules may change the environment of this process.
ENVIRONMENT = dict(os.environ)

if __name__ == "__main__":
    status = 1
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
        status = 0
    except Exception as error:  # noqa: BLE001  # reported as an interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        # `sys.exit` would wait for threads that imported modules may have started.
        os._exit(status)
