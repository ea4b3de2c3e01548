"""Modules of the application that the launcher imports ahead, each on trial in a child first.

A module may do anything when it is imported: start threads, open files, initialise a driver, or end its
process. The launcher could not take that back, and its forks would be of no use. So a child imports the
module, looks at what that has left behind, and says so. If that is no obstacle, a fork of the child is the
template from then on: the process that forks workers, and children that try more modules. The launcher adopts
them all, so it has imported nothing of the application. Each backend brings a file that knows whether its
driver was initialised.

Loaded by the launcher with the first such module. It must import nothing but the standard library.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

if TYPE_CHECKING:
    from trio_accel.devices.launcher import _launcher_process as program
    from trio_accel.devices.launcher._launcher_fork import Forks
else:
    import __main__ as program

# Seconds for the import of a child: an alarm ends it after 30, unless the module has seen to that.
_LONGEST = 32.0
_VERDICT, _CONTROL = 3, 4  # the child's descriptors for what it says, and of the socket that the template has
_TEMPLATE = b"accel template"
_NO_ORDER = -1  # instead of the number of an order for a worker
_PATIENCE = 2.0  # seconds for the template to fork; the launcher is deaf for so long
_MOST_DEATHS = 5  # of templates, until what they had is left to the workers
_MOST_TRIALS = 4  # of a module and of what is left of it
_SELF = "/proc/self"
_MASKS = (b"SigBlk", b"SigIgn", b"SigCgt")
# Handled by readline from its import on, which debuggers import: it tells of the size of a terminal.
_HARMLESS = {signal.SIGWINCH}


class Candidate(NamedTuple):
    """A module that is to be imported ahead.

    Attributes:
        number: The order's number.
        order: Which module, and how a worker would start.
        directory: Descriptor of the application's working directory; it belongs to the trials.
        pieces: Modules among its imports to be tried instead, as it is refused itself; None for the module.
        refusals: How often it was refused.
        culprit: The package that the first refusal was for, and why.
        reason: The same.
        began: When the first trial began.
        is_told: Whether the application knows the outcome.
    """

    number: int
    order: Mapping[str, Any]
    directory: int
    pieces: Sequence[str] | None = None
    refusals: int = 0
    culprit: str | None = None
    reason: str | None = None
    began: float = 0.0
    is_told: bool = False


class Verdict(NamedTuple):
    """Report of a child on a module, or on the child's own end.

    Attributes:
        reason: The obstacle; None if there is none.
        culprit: The package that is to blame, where one was found.
        pieces: Modules among its imports that may be imported all the same.
        template: Pid of the process that has it imported.
    """

    reason: str | None
    culprit: str | None = None
    pieces: Sequence[str] = ()
    template: int = 0


class Trials:
    """Tries and imports modules, one after the other; the launcher serves while a child does.

    Args:
        launcher: The launcher, which looks after children and tells the application.
        forks: Imports of the launcher.
    """

    def __init__(self, launcher: program.Launcher, forks: Forks) -> None:
        self._forks = forks
        self._watch = launcher.watch
        self._report = launcher.report
        self._launcher = os.getpid()
        # The template (D138): its pid, the socket to it, and the modules that it has imported.
        self._template = 0
        self._control: socket.socket | None = None
        self._held: dict[str, Candidate] = {}
        self._deaths = 0
        self._replaced: set[int] = set()
        self._waiting: deque[Candidate] = deque()
        # The candidate on trial; its child, the file of the child's report, and the child's deadline.
        self._tried: Candidate | None = None
        self._child = 0
        self._said = 0
        self._ours: socket.socket | None = None
        self._deadline = 0.0
        self._is_late = False

    def add(self, number: int, order: Mapping[str, Any], directory: int) -> None:
        """Try a module, behind those that came before.

        Args:
            number: The order's number.
            order: The module to import, and how a worker would start.
            directory: Descriptor of the application's working directory, which belongs to this from here on.
        """
        self._waiting.append(Candidate(number, order, directory))
        self._go_on()

    def patience(self) -> float | None:
        """Tell the milliseconds until `look` is to be called; None if nothing waits for that."""
        if self._tried is None or self._is_late:
            return None
        return max(self._deadline - time.monotonic(), 0.0) * 1000

    def look(self) -> None:
        """End a child that has run for too long."""
        if self._tried is not None and not self._is_late and time.monotonic() >= self._deadline:
            self._is_late = True
            os.kill(self._child, signal.SIGKILL)

    def ended(self, pid: int, status: int) -> bool:
        """Take a child of the launcher that is dead and reaped; returns whether it was one of these."""
        if pid in self._replaced:
            self._replaced.remove(pid)
            return True
        if pid == self._template:
            self._lose_template()
            return True
        if self._tried is None or self._child != pid:
            return False
        tried, self._tried = self._tried, None
        said = program.read_all(self._said)
        if not said and self._ours is not None:
            self._ours.close()
        if self._is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM):
            verdict = Verdict("its import did not end within 30 s")
        elif not said:
            verdict = Verdict(f"its import ended the process: {_describe(status)}")
        else:
            verdict = Verdict(*json.loads(said))
        if verdict.reason is None and not self._adopt(verdict.template):
            verdict = Verdict("the process that had imported it has ended")
        if verdict.reason is None:
            self._held[tried.order["module"]] = self._tell(tried, None)
        else:
            self._refuse(tried, verdict)
        self._go_on()
        return True

    def ask(self, kind: str, detail: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have the template fork a worker (``start``) or a child that tries a module (``try``).

        Returns:
            The pid of that; 0 if there is no template that may.
        """
        if self._control is None:
            return 0
        with open(os.memfd_create("order", os.MFD_CLOEXEC), "wb") as file:
            file.write(json.dumps([kind, detail]).encode())
            file.flush()
            try:
                socket.send_fds(self._control, [b"order"], [*descriptors, file.fileno()])
                if program.is_readable(self._control.fileno(), _PATIENCE):
                    return int(self._control.recv(20) or b"0")
            except ConnectionError:
                return 0
        # No answer in time: a template that hangs would hold up every later worker.
        os.kill(self._template, signal.SIGKILL)
        return 0

    def awaited(self, orphans: set[int]) -> set[int]:
        """Find a template that has been forked, and of which the child is still to tell."""
        if self._tried is None:
            return set()
        found: set[int] = set()
        for pid in orphans:
            with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as name:
                if name.read().strip() == _TEMPLATE:
                    found.add(pid)
        return found

    def _adopt(self, template: int) -> bool:
        """Go on with a process that has one module more; returns whether it lives."""
        try:
            self._watch(_NO_ORDER, template)
        except OSError:
            return False
        if self._control is not None:
            self._control.close()
            self._replaced.add(self._template)
        self._template, self._control, self._ours = template, self._ours, None
        return True

    def _lose_template(self) -> None:
        """Import again what a template had that is dead, unless that happens all the time."""
        assert self._control is not None
        self._control.close()
        self._control, self._template = None, 0
        self._deaths += 1
        if self._deaths <= _MOST_DEATHS:
            self._waiting.extendleft(reversed(self._held.values()))
        self._held.clear()
        self._go_on()

    def _refuse(self, tried: Candidate, verdict: Verdict) -> None:
        """Go on with what is left of a module, or with nothing."""
        tried = tried._replace(
            refusals=tried.refusals + 1,
            culprit=tried.culprit or verdict.culprit,
            reason=tried.reason or verdict.reason,
            pieces=verdict.pieces,
        )
        if verdict.pieces and tried.refusals < _MOST_TRIALS:
            self._waiting.appendleft(tried)
        else:
            self._tell(tried, tried.reason)

    def _go_on(self) -> None:
        while self._waiting and self._tried is None:
            candidate = self._waiting.popleft()
            if not candidate.began:
                candidate = candidate._replace(began=time.monotonic())
            if (held := self._held.get(candidate.order["module"])) is not None:
                self._tell(held._replace(number=candidate.number, is_told=False), None)
                os.close(candidate.directory)
                continue
            if self._forks.lacks(candidate.order):
                self._report("importing", candidate.number, 0)
            why = self._forks.prepare(candidate.order, candidate.directory)
            if why is None:
                why = self._try(candidate)
            if self._tried is None:
                self._tell(candidate, why)

    def _try(self, candidate: Candidate) -> str | None:
        """Start a child; returns the reason if that fails."""
        try:
            self._said = os.memfd_create("verdict", os.MFD_CLOEXEC)
        except OSError as error:
            return f"it could not be tried: {error}"
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                descriptors = [candidate.directory, self._said, theirs.fileno()]
                self._child = self.ask("try", candidate._asdict(), descriptors) or program.spawn(
                    partial(self._be, candidate), descriptors, self._launcher
                )
                self._watch(_NO_ORDER, self._child)
            except OSError as error:
                os.close(self._said)
                self._ours.close()
                return f"it could not be tried: {error}"
        self._tried, self._is_late = candidate, False
        self._deadline = time.monotonic() + _LONGEST
        return None

    def _tell(self, candidate: Candidate, why: str | None) -> Candidate:
        if why is not None:
            os.close(candidate.directory)
        if candidate.is_told:
            return candidate
        is_partly = why is None and candidate.pieces is not None
        self._report(
            "imported" if why is None else "unimported",
            candidate.number,
            {
                "ahead": "partly" if is_partly else "fully" if why is None else "refused",
                "culprit": candidate.culprit,
                "reason": candidate.reason or why,
                "seconds": time.monotonic() - candidate.began,
            },
        )

        return candidate._replace(is_told=True)

    def _be(self, candidate: Candidate, free: int) -> NoReturn:
        """Import the module, say what that has left behind, and end; in the child."""
        try:
            program.close_from(free)
            program.rename(b"accel trial")
            directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
            order = candidate.order
            checks = [program.load(path).driver_in_use for path in order["checks"]]
            before, watch = Traces(), Watch()
            with watch:
                why = self._forks.add(order, directory, candidate.pieces)
            # A driver that was initialised says more than the threads that it has started.
            in_use = next((text for check in checks if (text := check()) is not None), None)
            said = Verdict(in_use or why or (None if order["trusted"] else before.left()))
            if said.reason is None:
                # The name is set before the fork: it marks the template from its first moment on, see
                # `awaited`.
                program.rename(_TEMPLATE)
                given = [directory, _CONTROL]
                said = said._replace(template=program.spawn(self._serve, given, self._launcher))
            else:
                culprit = watch.culprit(order["module"], said.reason)
                said = Verdict(said.reason, culprit, watch.pieces(order["module"], culprit))
            os.write(_VERDICT, json.dumps(said).encode())
        finally:
            os._exit(0)

    def _serve(self, free: int) -> NoReturn:
        """Fork what the launcher wants, until that has gone or has another; in the template."""
        try:
            program.close_from(free)
            control = socket.socket(fileno=_VERDICT)
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
            return program.spawn(partial(self._be, Candidate(**detail)), descriptors, self._launcher)
        if self._forks.prepare(detail, descriptors[0]) is not None:
            return 0
        return program.spawn(partial(self._forks.run, detail), descriptors, self._launcher)


class Watch:
    """Watches imports while it is entered: who imports whom, and after which import something is new."""

    def __init__(self) -> None:
        self._import = builtins.__import__
        self._import_module = importlib.import_module
        self._before = set(sys.modules)
        self._first = _things()
        # The package whose code had run when a leftover was first seen.
        self._blamed: dict[str, str] = {}
        # The packages that each package imports.
        self._needs: dict[str, set[str]] = {}

    def __enter__(self) -> Self:
        builtins.__import__ = self._watched
        importlib.import_module = self._watched_module
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self._import
        importlib.import_module = self._import_module

    def culprit(self, module: str, reason: str) -> str:
        """Name the package that is to blame for what is new; the module itself, if no other is."""
        kind = "task" if "thread" in reason else "fd"
        left = sorted(_things() - self._first)
        blamed = [self._blamed[thing] for thing in left if thing.startswith(kind) and thing in self._blamed]
        return blamed[0] if blamed else module

    def pieces(self, module: str, culprit: str) -> list[str]:
        """List what was imported, in order, without the module, the culprit and all that import it."""
        spoiled = {_top(culprit), _top(module)}
        while more := {name for name, needs in self._needs.items() if needs & spoiled} - spoiled:
            spoiled |= more
        left_out = spoiled | sys.stdlib_module_names
        return [
            name
            for name, found in tuple(sys.modules.items())
            if name not in self._before
            and _top(name) not in left_out
            and getattr(found, "__spec__", None) is not None
        ]

    def _watched(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  # as it is called
        locals: Mapping[str, Any] | None = None,  # noqa: A002  # the same
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = _top((globals or {}).get("__name__") or "")
        imported = _top(name) if level == 0 else importer
        with self._noted(importer, imported, name):
            return self._import(name, globals, locals, fromlist, level)

    def _watched_module(self, name: str, package: str | None = None) -> ModuleType:
        importer = _top(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        with self._noted(importer, _top(name) or _top(package or ""), name):
            return self._import_module(name, package)

    @contextmanager
    def _noted(self, importer: str, imported: str, name: str) -> Generator[None, None, None]:
        if importer != imported:
            self._needs.setdefault(importer, set()).add(imported)
        known = len(sys.modules)
        if name not in sys.modules:
            self._look(importer)
        try:
            yield
        finally:
            if len(sys.modules) != known:
                self._look(imported)

    def _look(self, package: str) -> None:
        for thing in _things() - self._first:
            self._blamed.setdefault(thing, package)


def _things() -> set[str]:
    """List threads and descriptors of this process, by number."""
    return {f"{kind} {name}" for kind in ("task", "fd") for name in os.listdir(f"{_SELF}/{kind}")}


def _top(name: str) -> str:
    return name.partition(".")[0]


class Traces:
    """Record the state of the process that an import may change."""

    def __init__(self) -> None:
        self._files = program.files()
        self._signals = _signals()

    def left(self) -> str | None:
        """Say what has been left behind since then that no fork may have; None if there is nothing."""
        with suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "its import has left a process running"
        files, signals = program.files(), _signals()
        opened = sorted(target for place, target in files.items() if self._files.get(place) != target)
        if opened:
            return f"its import has left a file open: {opened[0]}"
        if files != self._files:
            return "its import has closed a file that is not its own"
        changed = [name for name, how in signals.items() if how != self._signals[name]]
        if changed:
            return f"its import changes what happens at {', '.join(changed)}"
        return None


def _signals() -> dict[str, tuple[object, ...]]:
    """Tell how each signal is handled, as Python knows it and as the kernel does: libraries handle some."""
    with open(f"{_SELF}/status", "rb") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(_MASKS)]
    return {
        number.name: (signal.getsignal(number), *[mask >> (number - 1) & 1 for mask in masks])
        for number in signal.Signals
        if number not in _HARMLESS
    }


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
