"""The application's modules that the launcher imports in advance, after a child has tried the whole list.

An import may do anything: start threads, open files, initialise a driver, or end its process. The launcher
could not undo that, and its forks would be useless. So a child imports the list, checks what each import has
left, and reports it. Without an obstacle, a fork of the child becomes the template: the process that forks
workers, and children that try further lists. The launcher adopts all of them, so it has not imported anything
of the application. If there is an obstacle, workers import the list themselves. Each backend provides a file
that detects whether its driver was initialised.

The launcher loads this module with the first such list. It must import only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from trio_accel.devices.launcher import _launcher_process as program
    from trio_accel.devices.launcher._launcher_fork import Forks
else:
    import __main__ as program

_IMPORT_TIMEOUT = 30.0  # seconds for the imports of a child
_CONTROL = 3  # the descriptor of the socket on which a child reports its outcome, and the template serves
_TEMPLATE = b"accel template"
_NO_ORDER = -1  # instead of a worker's order number
_FORK_TIMEOUT = 2.0  # seconds for the template to fork, in which the launcher is deaf
_MOST_DEATHS = 5  # the number of templates' deaths after which workers import their modules themselves
_LONGEST_REASON = 2000  # characters, so that a report fits into its packet


class ImportTrial(NamedTuple):
    """A list of modules to import in advance.

    Attributes:
        number: The order's number.
        order: The modules, and how a worker would start.
        directory: The descriptor of the application's working directory, which belongs to the trials.
    """

    number: int
    order: Mapping[str, Any]
    directory: int


class ImportTrials:
    """Tries and imports lists of modules, one after the other. The launcher continues to serve meanwhile.

    Args:
        launcher: The launcher, which watches children and reports to the application.
        forks: The imports of the launcher.
    """

    def __init__(self, launcher: program.LauncherServer, forks: Forks) -> None:
        self._forks = forks
        self._watch = launcher.watch
        self._report = launcher.report
        self._launcher = os.getpid()
        # The template (D138): its pid, its socket, and the lists that it has imported.
        self._template = 0
        self._control: socket.socket | None = None
        self._held: list[ImportTrial] = []
        self._deaths = 0
        self._replaced: set[int] = set()
        self._waiting: deque[ImportTrial] = deque()
        # The list on trial; its child, the child's socket, and the time when it began.
        self._tried: ImportTrial | None = None
        self._child = 0
        self._ours: socket.socket
        self._began = 0.0
        self._is_late = False

    def add(self, number: int, order: Mapping[str, Any], directory: int) -> None:
        """Try a list, after the earlier lists.

        Args:
            number: The order's number.
            order: The modules to import, and how a worker would start.
            directory: The descriptor of the application's working directory, which now belongs to this
                object.
        """
        self._waiting.append(ImportTrial(number, order, directory))
        self._go_on()

    def patience(self) -> float | None:
        """Return the milliseconds until `poll` must be called; None if nothing waits for that."""
        if self._tried is None or self._is_late:
            return None
        return max(self._began + _IMPORT_TIMEOUT - time.monotonic(), 0.0) * 1000

    def poll(self) -> None:
        """Kill a child after its time limit."""
        if self.patience() == 0:
            self._is_late = True
            os.kill(self._child, signal.SIGKILL)

    def ended(self, pid: int, status: int) -> bool:
        """Take a dead and reaped child of the launcher; return whether it belonged to this object."""
        if pid in self._replaced:
            self._replaced.remove(pid)
        elif pid == self._template:
            self._lose_template()
        elif self._tried is not None and pid == self._child:
            tried, self._tried = self._tried, None
            self._tell(tried, self._outcome(tried, status))
            self._go_on()
        else:
            return False
        return True

    def ask(self, kind: str, detail: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Let the template fork a worker (``start``) or a child that tries a list (``try``).

        Returns:
            The pid of the fork; 0 without a suitable template.
        """
        if self._control is None:
            return 0
        with open(os.memfd_create("order", os.MFD_CLOEXEC), "wb") as file:
            file.write(json.dumps([kind, detail]).encode())
            file.flush()
            try:
                socket.send_fds(self._control, [b"order"], [*descriptors, file.fileno()])
                return int(self._control.recv(20) or b"0")
            except ConnectionError:
                return 0
            except TimeoutError:
                # A hanging template would delay every later worker.
                os.kill(self._template, signal.SIGKILL)
                return 0

    def awaited(self, orphans: set[int]) -> set[int]:
        """Return the pid of a forked template that its child has not reported yet."""
        if self._tried is None:
            return set()
        templates: set[int] = set()
        for pid in orphans:
            with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as name:
                if name.read().strip() == _TEMPLATE:
                    templates.add(pid)
        return templates

    def _outcome(self, tried: ImportTrial, status: int) -> str | None:
        """Return why workers import a list themselves after its child's end; None if they need not."""
        names = ", ".join(name for name, _ in tried.order["modules"])
        try:
            said = self._ours.recv(program.PACKET, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            said = b""
        if self._is_late:
            reason = f"the import of {names} did not end within {_IMPORT_TIMEOUT:g} s"
        elif not said:
            how = program.describe_exit(os.waitstatus_to_exitcode(status))
            reason = f"the process that imported {names} {how}"
        else:
            reason, template = json.loads(said)
            if reason is None and self._adopt(template):
                return None
        self._ours.close()
        return reason or f"the process that had imported {names} has ended"

    def _adopt(self, template: int) -> bool:
        """Adopt the process with one more imported list; return whether it is alive."""
        try:
            self._watch(_NO_ORDER, template)
        except OSError:
            return False
        if self._control is not None:
            self._control.close()
            self._replaced.add(self._template)
        self._template, self._control = template, self._ours
        self._control.settimeout(_FORK_TIMEOUT)
        return True

    def _lose_template(self) -> None:
        """Import a dead template's lists again, unless that happens too often."""
        assert self._control is not None
        self._control.close()
        self._control, self._template = None, 0
        self._deaths += 1
        if self._deaths <= _MOST_DEATHS:
            self._waiting.extendleft(reversed(self._held))
        self._held.clear()
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._tried is None:
            trial = self._waiting.popleft()
            if self._forks.lacks(trial.order):
                self._report("importing", trial.number, 0)
            reason = self._forks.prepare(trial.order, trial.directory) or self._try(trial)
            if reason is not None:
                self._tell(trial, reason)

    def _try(self, trial: ImportTrial) -> str | None:
        """Start a child; return the reason if that fails."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptors = [trial.directory, theirs.fileno()]
                self._child = self.ask("try", trial._asdict(), descriptors) or program.spawn(
                    partial(self._be, trial), descriptors, self._launcher
                )
            self._watch(_NO_ORDER, self._child)
        except OSError as error:
            return f"it could not be tried: {error}"
        self._tried, self._ours, self._is_late = trial, ours, False
        self._began = time.monotonic()
        return None

    def _tell(self, trial: ImportTrial, reason: str | None) -> None:
        if reason is None:
            self._held.append(trial)
        else:
            os.close(trial.directory)
        self._report("tried", trial.number, {"reason": reason, "seconds": time.monotonic() - self._began})

    def _be(self, trial: ImportTrial, free: int) -> NoReturn:
        """Import the modules, report what is left, and end; in the child."""
        try:
            program.close_from(free)
            program.rename(b"accel trial")
            directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
            reason, template = self._forks.add(trial.order, directory), 0
            if reason is None:
                # The name is set before the fork, so that it marks the template from its first moment; see
                # `awaited`.
                program.rename(_TEMPLATE)
                template = program.spawn(self._serve, [directory, _CONTROL], self._launcher)
            else:
                reason = reason[:_LONGEST_REASON]
            os.write(_CONTROL, json.dumps([reason, template]).encode())
        finally:
            os._exit(0)

    def _serve(self, free: int) -> NoReturn:
        """Fork for the launcher, until it has ended or has another template; in the template."""
        # A template is a fork within the frames of the previous one, so calls need more room.
        sys.setrecursionlimit(sys.getrecursionlimit() + 8)
        try:
            program.close_from(free)
            control = socket.socket(fileno=_CONTROL)
            while descriptors := program.receive(control)[1]:
                kind, detail = json.loads(program.read_all(descriptors.pop()))
                try:
                    pid = self._fork(kind, detail, descriptors)
                except OSError:
                    pid = 0
                program.close_all(descriptors)
                control.send(str(pid).encode())
        finally:
            os._exit(0)

    def _fork(self, kind: str, detail: dict[str, Any], descriptors: list[int]) -> int:
        if kind == "try":
            return program.spawn(partial(self._be, ImportTrial(**detail)), descriptors, self._launcher)
        if self._forks.prepare(detail, descriptors[0]) is not None:
            return 0
        return program.spawn(partial(self._forks.run, detail), descriptors, self._launcher)
