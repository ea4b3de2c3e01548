"""The application's end of the launcher process: its start, messages and end; and preloaded modules."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import warn_untold
from ...backends import driver_checks
from ...backends.base import AccelError, Ints, NotSupportedError, Strs
from ...backends.base.kit.modules import search_path
from ..base._options import Preload
from ..base._statistics import PreloadState
from . import _launcher_process
from ._launcher_process import PACKET, close_all, describe_exit, is_dead, receive, send

_PROGRAM = Path(_launcher_process.__file__)
_READY = 10.0
_END = 2.0
_TICK = 0.1
# Seconds for which a launcher may be silent while it owes an answer; below, while it imports modules.
_SILENCE = 3.0
_IMPORTING = 35.0
_MAY_BE = ("ready", "started", "failed", "exited", "fresh", "importing", "tried", "pong")


class LauncherError(AccelError):
    """The launcher of worker processes could not be started, has died, or could not start a worker."""


class EndOfLink(Exception):  # noqa: N818  # like EOFError it says what was met, and nothing went wrong here
    """The launcher process has closed its end: it is dead or dying."""


@attrs.frozen
class LauncherReport:
    """A message of the launcher process.

    Attributes:
        kind: ``ready``, ``started``, ``failed``, ``exited``, ``fresh``: a worker will not be a fork,
            ``importing``: there will be no message until that is done, ``tried``, or ``pong``.
        number: The number of its order.
        detail: A pid, the text of an error, a wait status, a reason, or the outcome of a trial.
        descriptors: The attached descriptors, which belong to the receiver.
    """

    kind: str
    number: int
    detail: int | str | dict[str, Any]
    descriptors: Sequence[int]


class LauncherLink:
    """A launcher process and the socket to it. Made by `open`. Orders are sent in order and never block."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._process: trio.Process
        self._watched: int | None = None
        self._watching = trio.Lock()
        # The reason why it was killed, if it was.
        self._why = ""
        # The seconds of its silence, the permitted seconds, and whether it owes an answer.
        self._silence = 0.0
        self._may_be_silent = _SILENCE
        self._has_asked = trio.Event()
        self._outbox: deque[tuple[bytes, Ints]] = deque()
        self._has_more = trio.Event()
        self._is_closed = False

    @classmethod
    @enable_ki_protection
    async def open(cls) -> Self:
        """Start a launcher process; returns when it is ready.

        Raises:
            NotSupportedError: The platform lacks process descriptors.
            LauncherError: It did not start.
        """
        _check_platform()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        link = cls(ours)
        try:
            with theirs:
                link._process = await _start(theirs.fileno())
            link._watched = os.pidfd_open(link._process.pid)
        except BaseException:
            ours.close()
            raise
        try:
            with trio.fail_after(_READY):
                await link.receive()
        except (EndOfLink, trio.TooSlowError) as error:
            how = await link.close()  # noqa: ASYNC120  # it shields itself, and is bounded
            raise LauncherError(
                f"the launcher of worker processes did not start: the process {how}"
            ) from error
        except BaseException:
            with trio.move_on_after(3 * _END, shield=True):
                await link.close()
            raise
        return link

    @property
    def pid(self) -> int:
        """The pid of the launcher process."""
        return self._process.pid

    def order(
        self,
        kind: str,
        number: int,
        arguments: Sequence[str],
        descriptors: Sequence[int] = (),
        *,
        preload: Sequence[str] = (),
        **trial: object,
    ) -> None:
        """Send an order for a process like this one; see `send`.

        Args:
            kind: ``start`` or ``import``.
            number: Its number.
            arguments: A worker's command line after the interpreter and its options.
            descriptors: Descriptors for the worker.
            preload: Modules that the launcher imports first.
            trial: For modules on trial: their names, each with whether its leftovers are permitted
                (``modules``), and files that report whether a driver has been initialised (``checks``; see
                `AccelBackend.driver_check`).

        Raises:
            NotSupportedError: The interpreter is not known.
        """
        detail: dict[str, object] = {
            "arguments": [_check_interpreter(), *interpreter_options(), *arguments],
            "environment": dict(os.environ),
            "descriptors": 1 + len(descriptors),
            "preload": preload,
            "path": search_path() if preload or trial else (),
            **trial,
        }
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            self.send(kind, number, detail, (directory, *descriptors))
        finally:
            os.close(directory)

    def send(self, kind: str, number: int, detail: object = None, descriptors: Sequence[int] = ()) -> None:
        """Send an order. The descriptors stay the caller's. Does nothing if the process has ended.

        Raises:
            OSError: It cannot be sent: a descriptor is not open, or there are too many open files.
        """
        if self._is_closed:
            return
        data = json.dumps([kind, number, detail]).encode()
        if len(data) > PACKET:
            with open(os.memfd_create("trio_accel order", os.MFD_CLOEXEC), "w+b") as file:
                file.write(json.dumps(detail).encode())
                file.flush()
                self._send(json.dumps([kind, number, None]).encode(), (*descriptors, file.fileno()))
        else:
            self._send(data, descriptors)

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        if self._outbox or not send(self._control, data, descriptors):
            self._outbox.append((data, tuple(map(os.dup, descriptors))))
            self._has_more.set()

    @enable_ki_protection
    async def write(self) -> None:
        """Send data that did not fit into the socket, until cancelled."""
        while True:
            await self._has_more.wait()
            await trio.lowlevel.wait_writable(self._control)
            while self._outbox and send(self._control, *self._outbox[0]):
                close_all(self._outbox.popleft()[1])
            if not self._outbox:
                self._has_more = trio.Event()

    @enable_ki_protection
    async def receive(self) -> LauncherReport:
        """Wait for the next report.

        Raises:
            EndOfLink: There will be none.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                data, descriptors = receive(self._control)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._control)
                continue
            except ConnectionError:
                # A process that dies with unread orders resets the connection once, before its last reports
                # arrive.
                continue
            await trio.lowlevel.cancel_shielded_checkpoint()
            if not data:
                raise EndOfLink
            kind, number, detail = cast("tuple[str, int, int | str | dict[str, Any]]", json.loads(data))
            assert kind in _MAY_BE
            self._silence = 0.0
            self._may_be_silent = _IMPORTING if kind == "importing" else _SILENCE
            return LauncherReport(kind, number, detail, descriptors)

    @enable_ki_protection
    async def close(self) -> str:
        """End the process and its workers, in order or else by force; return how it has ended."""
        if not self._is_closed:
            self.send("end", 0)
            self._is_closed = True
            while self._outbox:
                close_all(self._outbox.popleft()[1])
            # D78: a forked child of the application may have a copy of the socket, so `close` would not end
            # it.
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(_END):
                return await self._bury()
            self.kill()
            with trio.move_on_after(_END):
                return await self._bury()
        return "does not end although it was killed"

    async def wait_end(self) -> str:
        """Wait for a process after it has closed its end; return how it has ended."""
        with trio.move_on_after(_END):
            return await self._bury()
        return "has closed its socket"

    def kill(self) -> None:
        """Kill the process, whatever it is doing. Its workers die with it."""
        if self._watched is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def ask(self) -> None:
        """Watch the process until it has answered; see `watch`."""
        if not self._has_asked.is_set():
            self._silence = 0.0
            self._has_asked.set()

    @enable_ki_protection
    async def watch(self, is_asked: Callable[[], bool]) -> None:
        """Check that the process is alive and answers; otherwise kill it (D79).

        Returns when it is dead; its last reports can still be received. While it owes no answer it may be
        stopped, because its workers do not need it.

        Args:
            is_asked: Returns whether it still owes an answer.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence, is_asked)
            await self._wait_dead()
            nursery.cancel_scope.cancel(reason="the launcher is dead")
        # Its child processes, even unfinished forks, may hold its end of the socket.
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RD)

    async def _watch_silence(self, is_asked: Callable[[], bool]) -> None:
        while True:
            await self._has_asked.wait()
            while is_asked():
                self.send("ping", 0)
                # Ticks are counted instead of seconds: if this process was stopped, time has passed for both.
                await trio.sleep(_TICK)
                self._silence += _TICK
                if self._silence >= self._may_be_silent:
                    self._why = f"gave no answer for {self._may_be_silent:g} s and "
                    self.kill()
                    return
            self._has_asked = trio.Event()

    async def _wait_dead(self) -> None:
        """Wait until the process is dead. It is not reaped by that, so its pid is not reused."""
        async with self._watching:
            if self._watched is not None and not is_dead(self._watched):
                await trio.lowlevel.wait_readable(self._watched)

    async def _bury(self) -> str:
        """Wait until the process is dead, and kill the rest of its group; return how it has ended."""
        await self._wait_dead()
        if self._watched is not None:
            # Its workers die by their parent-death signal, but the processes that they have started do not.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._watched)
            self._watched = None
        return self._why + describe_exit(await self._process.wait())


def _check_platform() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise NotSupportedError(
            "worker processes need Linux 5.4 or later (process descriptors); "
            "open the device with isolation='inline'"
        ) from error


def _check_interpreter() -> str:
    """Return the path of this program's interpreter, which also runs workers.

    Raises:
        NotSupportedError: It is not known, as in a program that embeds Python.
    """
    if not sys.executable:
        raise NotSupportedError(
            f"worker processes need to know the path of the Python interpreter, and sys.executable is "
            f"{sys.executable!r}; set it, or open the device with isolation='inline'"
        )
    return sys.executable


async def _start(control: int) -> trio.Process:
    command = [_check_interpreter(), "-I", "-S", str(_PROGRAM), str(control), str(os.getpid())]
    try:
        return await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(control,),
            start_new_session=True,
        )
    except OSError as error:
        raise LauncherError(
            f"the launcher of worker processes could not be started by {sys.executable!r}: {error}"
        ) from error


# Before the path is set, the program imports only modules that the interpreter has already loaded. The folder
# of the user's own packages is part of the path, but an isolated interpreter has not run its `.pth` files.
_BOOT = """\
import site, sys
path = [*map(eval, sys.argv[1:])]
del sys.argv[1:]
sys.pycache_prefix = {prefix}
if not site.ENABLE_USER_SITE and site.getusersitepackages() in path:
    site.addsitedir(site.getusersitepackages())
sys.path[:] = path
from trio_accel.devices.worker._process import main
main()
"""


def program_arguments() -> Strs:
    """Return the command line of a device's worker after the interpreter and its options."""
    # D77: one ASCII literal for each entry, which no encoding of arguments changes. Together they may be
    # long.
    path = map(ascii, search_path())
    return ("-c", _BOOT.format(prefix=ascii(sys.pycache_prefix)), *path)


def interpreter_options() -> Strs:
    """Return the options of every worker's interpreter.

    It is isolated: neither the working directory nor environment variables determine where modules are. So
    the other environment variables are passed as options, except variables without an option.
    """
    options = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    if not sys.flags.ignore_environment:
        environment = os.environ
        if environment.get("PYTHONDEVMODE"):
            options += ["-X", "dev"]
        if environment.get("PYTHONOPTIMIZE"):
            level = environment["PYTHONOPTIMIZE"]
            options += ["-OO" if level.isdecimal() and int(level) > 1 else "-O"]
        if environment.get("PYTHONTRACEMALLOC", "").isdecimal():
            options += ["-X", f"tracemalloc={environment['PYTHONTRACEMALLOC']}"]
        if environment.get("PYTHONUTF8") in ("0", "1"):
            options += ["-X", f"utf8={environment['PYTHONUTF8']}"]
        for warning in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
            options += ["-W", warning]
    return tuple(options)


# After this number of deaths during imports, the imports are assumed to be the reason.
_MOST_DEATHS = 2


@attrs.define(eq=False)
class _List:
    """Modules imported together.

    Attributes:
        modules: The modules.
        preload: The modules to import before them.
        number: The number of the last order.
        is_asked: Whether that is unanswered.
        deaths: The number of successive launchers that died before the import.
        reason: The reason why workers import the modules themselves; None if they do not.
        is_over: Set when the first launcher has imported them, or they are refused.
    """

    modules: tuple[Preload, ...]
    preload: Strs
    number: int = 0
    is_asked: bool = False
    deaths: int = 0
    reason: str | None = None
    is_over: trio.Event = attrs.field(factory=trio.Event)


class ImportsAhead:
    """Lists of modules that every launcher process imports, after the first workers that wait for it."""

    def __init__(self) -> None:
        self._link: LauncherLink | None = None
        self._numbers = itertools.count(1)
        self._lists: dict[tuple[Preload, ...], _List] = {}

    @property
    def is_pending(self) -> bool:
        """Whether the launcher still owes the outcome of a list."""
        return any(module_list.is_asked for module_list in self._lists.values())

    def judge(self, module: str) -> tuple[PreloadState, str | None]:
        """Return whether the next worker begins with a module, and why not."""
        over = [
            module_list.reason
            for module_list in self._lists.values()
            if module_list.is_over.is_set() and module in [preload.module for preload in module_list.modules]
        ]
        if not over:
            return "pending", "it is still being tried whether it can be imported ahead"
        return ("fully", None) if None in over else ("refused", over[0])

    def request(self, modules: tuple[Preload, ...], preload: Strs) -> trio.Event:
        """Import modules in advance, all or none, unless they were already requested.

        Args:
            modules: The modules, which workers find by the `sys.path` of this program.
            preload: Modules to import before them, as in `StartWorker`.

        Returns:
            An event, set when the launcher has imported them, or a warning has explained why it will not.
        """
        module_list = self._lists.get(modules)
        if module_list is None:
            module_list = self._lists[modules] = _List(modules, preload)
            self._order(module_list)
        return module_list.is_over

    def begin(self, link: LauncherLink) -> None:
        """Continue with a new process, which has imported nothing."""
        self._link = link
        for module_list in self._lists.values():
            self._order(module_list)

    def end(self, how: str) -> None:
        """End with the process."""
        self._link = None
        for module_list in self._lists.values():
            if module_list.is_asked:
                module_list.is_asked = False
                module_list.deaths += 1
                if module_list.deaths >= _MOST_DEATHS:
                    self._judge(module_list, f"the launcher of worker processes {how} meanwhile")

    def take(self, report: LauncherReport) -> None:
        """Take the process's report on a list."""
        module_list = next((entry for entry in self._lists.values() if entry.number == report.number), None)
        if module_list is None:
            # The list was ordered again meanwhile, and gets a report of its own.
            return
        module_list.is_asked, module_list.deaths = False, 0
        assert isinstance(report.detail, dict)
        self._judge(module_list, **report.detail)

    def _order(self, module_list: _List) -> None:
        if self._link is None or module_list.reason is not None:
            return
        module_list.number = next(self._numbers)
        try:
            self._link.order(
                "import",
                module_list.number,
                ("-c", ""),
                preload=module_list.preload,
                modules=[(entry.module, entry.trusted) for entry in module_list.modules],
                checks=driver_checks(),
            )
        except (OSError, NotSupportedError) as error:
            self._judge(module_list, str(error))
        else:
            module_list.is_asked = True
            self._link.ask()

    def _judge(self, module_list: _List, reason: str | None, seconds: float = 0.0) -> None:
        module_list.reason = reason
        module_list.is_over.set()
        if reason is not None:
            names = ", ".join(entry.module for entry in module_list.modules)
            subject, they = (
                (f"module {names} is", "it")
                if len(module_list.modules) == 1
                else (f"modules {names} are", "them")
            )
            longer = f"up to {seconds:.1f} s longer" if seconds >= 0.05 else "longer"
            text = "%s not imported ahead, so each worker that needs %s takes %s to start: %s"
            warn_untold("trio_accel.devices", text, subject, they, longer, reason)
