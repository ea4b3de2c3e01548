"""Modules of the application that the launcher imports ahead, each on trial in a child first.

A module may do anything when it is imported: start threads, open files, initialise a driver, or end its
process. The launcher could not take that back, and its forks would be of no use. So a child imports the
module, looks at what that has left behind, and says so. Then the launcher imports it. Each backend brings a
file that knows whether its driver was initialised.

Loaded by the launcher with the first such module. It must import nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

if TYPE_CHECKING:
    from types import ModuleType

    from trio_accel.devices.worker.launcher._launcher_fork import Forks

# Seconds for the import of a child: an alarm ends it after 30, unless the module has seen to that.
_LONGEST = 32.0
_VERDICT = 3  # the child's descriptor for what it says
_MOST_TRIALS = 4  # of a module and of what is left of it
_BLAME = Path(__file__).with_name("_launcher_blame.py")
_SELF = "/proc/self"
_MASKS = (b"SigBlk", b"SigIgn", b"SigCgt")
# Handled by readline from its import on, which debuggers import: it tells of the size of a terminal.
_HARMLESS = {signal.SIGWINCH}


class Candidate(NamedTuple):
    """A module that is to be imported ahead.

    Attributes:
        number: Of the order.
        module: Its name.
        preload: What is to be imported before it, and needs no trial.
        checks: Files that say whether it has initialised a driver; see `AccelBackend.driver_check`.
        path: The application's `sys.path`.
        arguments: The command line of a worker.
        environment: The application's environment now.
        directory: Descriptor of its working directory; it belongs to the trials.
        is_trusted: Whether what the import leaves behind is no obstacle.
        pieces: What it imports and is to be tried instead, as it is refused itself; None for the module.
        refusals: How often it was refused.
        culprit: The package that the first refusal was for, and why.
        reason: The same.
        began: When the first trial began.
    """

    number: int
    module: str
    preload: list[str]
    checks: list[str]
    path: list[str]
    arguments: list[str]
    environment: Mapping[str, str]
    directory: int
    is_trusted: bool
    pieces: Sequence[str] | None = None
    refusals: int = 0
    culprit: str | None = None
    reason: str | None = None
    began: float = 0.0


class Verdict(NamedTuple):
    """What a child says of a module, or what is known of its end.

    Attributes:
        reason: Why no launcher is to import it; None if one may.
        culprit: The package that is to blame, where one was found.
        pieces: What it imports and may be imported all the same.
    """

    reason: str | None
    culprit: str | None = None
    pieces: Sequence[str] = ()


class Trials:
    """Tries and imports modules, one after the other; the launcher serves while a child does.

    Args:
        forks: What the launcher has imported.
        start: Starts a child: given a number, what it runs, and descriptors of its directory and of its pipe.
            Returns its descriptor and its pid.
        report: Tells the application.
        load: Loads a module by its path.
    """

    def __init__(
        self,
        forks: Forks,
        start: Callable[[int, Callable[[int], object], list[int]], tuple[int, int]],
        report: Callable[[str, int, int | str | dict[str, object]], None],
        load: Callable[[str], ModuleType],
    ) -> None:
        self._load = load
        self._forks = forks
        self._start = start
        self._report = report
        self._waiting: deque[Candidate] = deque()
        # The one whose child runs; the child, the file of what it says, and when it has run for too long.
        self._tried: Candidate | None = None
        self._child = 0
        self._said = 0
        self._deadline = 0.0
        self._is_late = False

    def add(
        self, number: int, order: Mapping[str, object], environment: Mapping[str, str], directory: int
    ) -> None:
        """Try a module, behind those that came before.

        Args:
            number: Of the order.
            order: What is to be imported, and how a worker would start.
            environment: The application's environment now.
            directory: Descriptor of its working directory, which belongs to this from here on.
        """
        preload, checks, path, arguments = (
            cast("list[str]", order[name]) for name in ("preload", "checks", "path", "arguments")
        )
        module, is_trusted = cast("str", order["module"]), cast("bool", order["trusted"])
        self._waiting.append(
            Candidate(number, module, preload, checks, path, arguments, environment, directory, is_trusted)
        )
        self._go_on()

    def patience(self) -> float | None:
        """Milliseconds until `look` is to be called; None if nothing waits for that."""
        if self._tried is None or self._is_late:
            return None
        return max(self._deadline - time.monotonic(), 0.0) * 1000

    def look(self) -> None:
        """End a child that has run for too long."""
        if self._tried is not None and not self._is_late and time.monotonic() >= self._deadline:
            self._is_late = True
            os.kill(self._child, signal.SIGKILL)

    def ended(self, pid: int, status: int) -> bool:
        """A child of the launcher is dead and reaped; returns whether it was one of these."""
        if self._tried is None or self._child != pid:
            return False
        tried, self._tried = self._tried, None
        with open(self._said, "rb") as file:
            file.seek(0)
            said = file.read()
        if self._is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM):
            verdict = Verdict("its import did not end within 30 s")
        elif not said:
            verdict = Verdict(f"its import ended the process: {_describe(status)}")
        else:
            verdict = Verdict(*json.loads(said))
        if verdict.reason is None:
            # For so long no answer is to be expected.
            self._report("importing", tried.number, tried.module)
            self._tell(tried, self._import(self._forks, tried, tried.directory))
        else:
            self._refuse(tried, verdict)
        self._go_on()
        return True

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
            if self._forks.lacks(candidate.preload):
                self._report("importing", candidate.number, 0)
            why = self._forks.prepare(
                candidate.preload,
                candidate.path,
                candidate.arguments,
                candidate.environment,
                candidate.directory,
            )
            if why is None and self._forks.lacks([candidate.module]):
                why = self._try(candidate)
            if self._tried is None:
                self._tell(candidate, why)

    def _try(self, candidate: Candidate) -> str | None:
        """Start a child; returns why there is none."""
        try:
            self._said = os.memfd_create("verdict", os.MFD_CLOEXEC)
        except OSError as error:
            return f"it could not be tried: {error}"
        try:
            descriptors = [candidate.directory, self._said]
            _, self._child = self._start(candidate.number, partial(self._be, candidate), descriptors)
        except OSError as error:
            os.close(self._said)
            return f"it could not be tried: {error}"
        self._tried, self._is_late = candidate, False
        self._deadline = time.monotonic() + _LONGEST
        return None

    def _tell(self, candidate: Candidate, why: str | None) -> None:
        os.close(candidate.directory)
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

    @staticmethod
    def _import(forks: Forks, candidate: Candidate, directory: int) -> str | None:
        return forks.add(
            candidate.module,
            candidate.path,
            candidate.environment,
            directory,
            pieces=candidate.pieces,
            is_trusted=candidate.is_trusted,
        )

    def _be(self, candidate: Candidate, free: int) -> NoReturn:
        """In the child: import the module, say what that has left behind, and end."""
        try:
            for place in _files():
                # Nothing of the launcher is here, for the import to close.
                if place >= free:
                    os.close(place)
            null, directory = os.open(os.devnull, os.O_WRONLY), os.open(".", os.O_PATH | os.O_DIRECTORY)
            # What the import prints, the next one prints again.
            os.dup2(null, 2)
            checks = [self._load(path).driver_in_use for path in candidate.checks]
            before, watch = Traces(), self._load(str(_BLAME)).Watch()
            with watch:
                why = self._import(self._forks, candidate, directory)
            # That it initialises a driver says more than the threads that the driver has started.
            in_use = next((text for check in checks if (text := check()) is not None), None)
            said = Verdict(in_use or why or (None if candidate.is_trusted else before.left()))
            if said.reason is not None:
                culprit = watch.culprit(candidate.module, said.reason)
                said = Verdict(said.reason, culprit, watch.pieces(candidate.module, culprit))
            os.write(_VERDICT, json.dumps(said).encode())
        finally:
            os._exit(0)


class Traces:
    """What an import may leave behind in a process, as it is now."""

    def __init__(self) -> None:
        self._files = _files()
        self._signals = _signals()

    def left(self) -> str | None:
        """Say what has been left behind since then that no fork may have; None if there is nothing."""
        with suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "its import has left a process running"
        files, signals = _files(), _signals()
        opened = sorted(target for place, target in files.items() if self._files.get(place) != target)
        if opened:
            return f"its import has left a file open: {opened[0]}"
        if files != self._files:
            return "its import has closed a file that is not its own"
        changed = [name for name, how in signals.items() if how != self._signals[name]]
        if changed:
            return f"its import changes what happens at {', '.join(changed)}"
        return None


def _files() -> dict[int, str]:
    """What lies behind each descriptor."""
    found: dict[int, str] = {}
    for place in os.listdir(f"{_SELF}/fd"):
        try:
            found[int(place)] = os.readlink(f"{_SELF}/fd/{place}")
        except FileNotFoundError:
            # That of the listing.
            continue
    return found


def _signals() -> dict[str, tuple[object, ...]]:
    """How each signal is handled, as Python knows it and as the kernel does: libraries handle some."""
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
