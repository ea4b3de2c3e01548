"""The application's end of the launcher process: its start, its talk, its end; and what it imports ahead."""

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
from ..base._statistics import Ahead
from . import _launcher_process
from ._launcher_process import PACKET, close_all, describe_exit, is_dead, receive, send

_PROGRAM = Path(_launcher_process.__file__)
_READY = 10.0
_END = 2.0
_TICK = 0.1
# So long a launcher that is asked for something may be silent, and while it imports modules.
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
        kind: ``ready``, ``started``, ``failed``, ``exited``, ``fresh``: a worker will be no fork,
            ``importing``: nothing more is said until that is done, ``tried``, or ``pong``.
        number: Number of the order that it is about.
        detail: A pid, the text of an error, a wait status, a reason, or the outcome of a trial.
        descriptors: Received with it; they belong to the receiver.
    """

    kind: str
    number: int
    detail: int | str | dict[str, Any]
    descriptors: Sequence[int]


class LauncherLink:
    """A launcher process and the socket to it. Made by `open`; orders keep their order and never block."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._process: trio.Process
        self._watched: int | None = None
        self._watching = trio.Lock()
        # The reason if it was killed.
        self._why = ""
        # Seconds of its silence, seconds that it may be silent, and whether it is asked for anything.
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
        """Number of the launcher process."""
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
            arguments: A worker's command line behind the interpreter and its options.
            descriptors: Descriptors for the worker.
            preload: Modules that the launcher imports before.
            trial: Of modules that are to be imported on trial: their names, each with whether leftovers of
                its import are no obstacle (``modules``), and files that say whether one has initialised a
                driver (``checks``; see `AccelBackend.driver_check`).

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
        """Send an order. The descriptors stay the caller's; nothing happens when the process has gone.

        Raises:
            OSError: It cannot be sent: one of the descriptors is not open, or there are too many open files.
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
        """Send what the socket had no room for, until cancelled."""
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
                # A process that dies with unread orders resets the connection once; its last reports come
                # after that.
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
        """End the process and so its workers, in order or else by force; returns how it has ended."""
        if not self._is_closed:
            self.send("end", 0)
            self._is_closed = True
            while self._outbox:
                close_all(self._outbox.popleft()[1])
            # D78: a forked child of the application may have a copy of the socket, so `close` alone would not
            # end it.
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
        """Wait for a process that has closed its end; returns how it has ended."""
        with trio.move_on_after(_END):
            return await self._bury()
        return "has closed its socket"

    def kill(self) -> None:
        """Kill the process, whatever it is doing; its workers die with it."""
        if self._watched is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def ask(self) -> None:
        """Have the process watched until it has answered; see `watch`."""
        if not self._has_asked.is_set():
            self._silence = 0.0
            self._has_asked.set()

    @enable_ki_protection
    async def watch(self, is_asked: Callable[[], bool]) -> None:
        """Watch that the process lives, and answers; otherwise it is killed (D79).

        Returns when it is dead; its last reports can still be received. While it is not asked for anything
        it may be stopped: its workers do not need it.

        Args:
            is_asked: Whether something that it was asked for is still to be said.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence, is_asked)
            await self._wait_dead()
            nursery.cancel_scope.cancel(reason="the launcher is dead")
        # Processes that it has started, or that were being forked from it, may hold its end of the socket.
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RD)

    async def _watch_silence(self, is_asked: Callable[[], bool]) -> None:
        while True:
            await self._has_asked.wait()
            while is_asked():
                self.send("ping", 0)
                # Ticks are counted, not seconds of a clock: if this process was stopped, time has passed for
                # both.
                await trio.sleep(_TICK)
                self._silence += _TICK
                if self._silence >= self._may_be_silent:
                    self._why = f"gave no answer for {self._may_be_silent:g} s and "
                    self.kill()
                    return
            self._has_asked = trio.Event()

    async def _wait_dead(self) -> None:
        """Wait until the process is dead. It is not reaped by that, so its number is not reused."""
        async with self._watching:
            if self._watched is not None and not is_dead(self._watched):
                await trio.lowlevel.wait_readable(self._watched)

    async def _bury(self) -> str:
        """Wait until the process is dead, and end what may be left of its group; returns how it has ended."""
        await self._wait_dead()
        if self._watched is not None:
            # Its workers die with it by their parent-death signal, but processes that they have started do
            # not.
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
    """Return the path of the interpreter that runs this program, and is to run others.

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


# The program imports nothing before the path is set but what the interpreter has loaded by then. The folder
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
    """Return the command line of a device's worker behind the interpreter and its options."""
    # D77: one ASCII literal for each entry, which no encoding of arguments changes, and which together may be
    # long.
    path = map(ascii, search_path())
    return ("-c", _BOOT.format(prefix=ascii(sys.pycache_prefix)), *path)


def interpreter_options() -> Strs:
    """Options of the interpreter of every worker.

    It is isolated: neither the working directory nor variables of the environment say where modules are.
    So what variables say of other things is told by options, but for those that have no option.
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


# A launcher that has died twice while modules were to be imported may have died of them.
_MOST_DEATHS = 2


@attrs.define(eq=False)
class _List:
    """Modules that are to be imported together.

    Attributes:
        modules: The modules.
        preload: Modules that are imported before them.
        number: The number of the last order.
        is_asked: Whether that is not answered.
        deaths: How many launchers in a row have died before they had it.
        reason: Why workers import the modules themselves; None if they do not.
        is_over: Set when the first launcher has it, or it is refused.
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
        """Whether the launcher is still to say what became of one."""
        return any(each.is_asked for each in self._lists.values())

    def judge(self, module: str) -> tuple[Ahead, str | None]:
        """Tell whether the next worker begins with a module, and why not."""
        over = [
            each.reason
            for each in self._lists.values()
            if each.is_over.is_set() and module in [wanted.module for wanted in each.modules]
        ]
        if not over:
            return "pending", "it is still being tried whether it can be imported ahead"
        return ("fully", None) if None in over else ("refused", over[0])

    def want(self, modules: tuple[Preload, ...], preload: Strs) -> trio.Event:
        """Have modules imported, all or none, unless they were asked for before.

        Args:
            modules: The modules, which workers find by the `sys.path` of this program.
            preload: Modules that are imported before them, as in `StartWorker`.

        Returns:
            An event that is set when the launcher has them, or a warning has said why it will not.
        """
        wanted = self._lists.get(modules)
        if wanted is None:
            wanted = self._lists[modules] = _List(modules, preload)
            self._order(wanted)
        return wanted.is_over

    def begin(self, link: LauncherLink) -> None:
        """Go on with a new process: it has imported nothing."""
        self._link = link
        for each in self._lists.values():
            self._order(each)

    def end(self, how: str) -> None:
        """End with the process."""
        self._link = None
        for each in self._lists.values():
            if each.is_asked:
                each.is_asked = False
                each.deaths += 1
                if each.deaths >= _MOST_DEATHS:
                    self._judge(each, f"the launcher of worker processes {how} meanwhile")

    def take(self, report: LauncherReport) -> None:
        """Take what the process says of one."""
        wanted = next(each for each in self._lists.values() if each.number == report.number)
        wanted.is_asked, wanted.deaths = False, 0
        assert isinstance(report.detail, dict)
        self._judge(wanted, **report.detail)

    def _order(self, wanted: _List) -> None:
        if self._link is None or wanted.reason is not None:
            return
        wanted.number = next(self._numbers)
        try:
            self._link.order(
                "import",
                wanted.number,
                ("-c", ""),
                preload=wanted.preload,
                modules=[(each.module, each.trusted) for each in wanted.modules],
                checks=driver_checks(),
            )
        except (OSError, NotSupportedError) as error:
            self._judge(wanted, str(error))
        else:
            wanted.is_asked = True
            self._link.ask()

    def _judge(self, wanted: _List, reason: str | None, seconds: float = 0.0) -> None:
        wanted.reason = reason
        wanted.is_over.set()
        if reason is not None:
            names = ", ".join(each.module for each in wanted.modules)
            subject, they = (
                (f"module {names} is", "it") if len(wanted.modules) == 1 else (f"modules {names} are", "them")
            )
            longer = f"up to {seconds:.1f} s longer" if seconds >= 0.05 else "longer"
            text = "%s not imported ahead, so each worker that needs %s takes %s to start: %s"
            warn_untold("trio_accel.devices", text, subject, they, longer, reason)
