"""``trio-accel top``: a running program's actors, live in a terminal, and the keys that are typed there."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import attrs
import trio
from rich.console import Console
from rich.live import Live

from trio_accel.cli._board import make_console
from trio_accel.cli._run import InputError, at_a_second_signal, printable, run_async, run_for_json
from trio_accel.cli._top_draw import Status, draw_all, draw_screen
from trio_accel.cli._top_view import View
from trio_accel.telemetry import (
    ObservedProgram,
    ObserverSocketError,
    SystemSnapshot,
    list_programs,
    open_observation,
)

# Seconds for which a program may hold its loop before it is called silent; and given up, for a single
# snapshot.
_SILENT_SECONDS, _ANSWER_SECONDS = 2.0, 10.0
# Seconds from one snapshot to the next, until it is seen: those of a large tree come less often than was
# asked for.
_FIRST_PACE = 3.0
_CONNECT_SECONDS, _REDRAW_SECONDS, _AGAIN_SECONDS = 0.5, 1.0, 0.1
_SOON_SECONDS, _MOST_LOOKS = 0.1, 10
# Columns of a table in a pipe: all of them.
_PIPE_WIDTH = 180
# Bytes that follow the escape sign sooner than this belong to it; a person's next key comes later.
_ESCAPE_SECONDS = 0.05
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O[@-~]|[^\[O])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*|O)?\Z")
_KEYS = {
    "up": ("\x1b[A", "\x1bOA"),
    "down": ("\x1b[B", "\x1bOB"),
    "right": ("\x1b[C", "\x1bOC"),
    "left": ("\x1b[D", "\x1bOD"),
    "home": ("\x1b[H", "\x1bOH", "\x1b[1~"),
    "end": ("\x1b[F", "\x1bOF", "\x1b[4~"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~",),
    "escape": ("\x1b",),
    "enter": ("\r", "\n"),
    "backspace": ("\x7f", "\x08"),
    "erase": ("\x15",),  # Ctrl-U
    "redraw": ("\x0c",),  # Ctrl-L
}
_NAMES = {sequence: name for name, sequences in _KEYS.items() for sequence in sequences}
_HOW_TO_OPEN = "a program opens one by: async with ta.telemetry.open_socket(system)"


def show_top(
    wanted: str | None, *, interval: float, sort: str, text: str, is_once: bool, is_json: bool
) -> int:
    """Show a program until the user leaves, or once.

    Returns:
        The exit code: 0, or 1 where the program ended.

    Raises:
        InputError: There is no such program, or more than one.
    """
    path = find_program(wanted, list_programs())
    if is_json:
        return _print_json(path)
    view = View(sort=sort, filter=text)
    console = make_console()
    if is_once or not console.is_terminal or console.is_dumb_terminal:
        return run_async(partial(_print_once, console, path, view))
    return run_async(_Top(console=console, path=path, view=view, interval=interval).run)


def find_program(wanted: str | None, programs: Sequence[ObservedProgram]) -> Path:
    """Find the socket of the program: by name, by process, by path, or the only one there is.

    Raises:
        InputError: There is none, or more than one.
    """
    if wanted is not None and "/" in wanted:
        return Path(wanted)
    found = [one for one in programs if wanted in {None, one.name, str(one.pid)}]
    if not found and wanted:
        found = [one for one in programs if one.name.startswith(wanted)]
    if len(found) == 1:
        return found[0].path
    if found:
        raise InputError(f"{len(found)} programs are meant, name one of them: {_listed(found)}")
    if not programs:
        raise InputError(f"no program of this user has an observer socket open; {_HOW_TO_OPEN}")
    raise InputError(f"there is no program {wanted!r}; there are: {_listed(programs)}")


def _listed(programs: Sequence[ObservedProgram]) -> str:
    return ", ".join(one.name if one.pid is None else f"{one.name} (process {one.pid})" for one in programs)


async def _look_once(path: Path) -> tuple[Status, SystemSnapshot]:
    try:
        with trio.fail_after(_ANSWER_SECONDS):
            async with open_observation(path, interval=_SOON_SECONDS) as observation:
                program = observation.program
                snapshot = await anext(observation)
                for _ in range(_MOST_LOOKS):
                    # A device's own counts come a moment later, if it answers.
                    if all(device.age is not None for device in snapshot.devices):
                        break
                    snapshot = await anext(observation)
                return Status(name=program.name, pid=program.pid), snapshot
    except trio.TooSlowError:
        raise ObserverSocketError(
            f"the program at {path} does not answer: its loop is held for more than {_ANSWER_SECONDS:g} s"
        ) from None
    except StopAsyncIteration:
        raise ObserverSocketError(f"the program at {path} closed the connection: has it ended?") from None


async def _print_once(console: Console, path: Path, view: View) -> int:
    status, snapshot = await _look_once(path)
    width = console.width if console.is_terminal else _PIPE_WIDTH
    for line in draw_all(snapshot, view, status, width=width):
        console.print(line.plain.rstrip() if not console.is_terminal else line, markup=False, soft_wrap=True)
    return 0


def _print_json(path: Path) -> int:
    document: dict[str, object] = {"command": "top", "path": str(path), "exit_code": 0, "error": None}

    async def look() -> int:
        status, snapshot = await _look_once(path)
        document.update(name=status.name, snapshot=json.loads(snapshot.to_json()))
        return 0

    def render(code: int, error: str | None) -> str:
        return json.dumps({**document, "exit_code": code, "error": error}, allow_nan=False, indent=2)

    return run_for_json(look, render)


@attrs.define(kw_only=True, eq=False)
class _Top:
    """The program as it is shown in a terminal."""

    console: Console
    path: Path
    view: View
    interval: float
    _status: Status = attrs.field(init=False)
    _newest: SystemSnapshot | None = attrs.field(default=None, init=False)
    _shown: SystemSnapshot | None = attrs.field(default=None, init=False)
    _came: float = attrs.field(default=0.0, init=False)
    _pace: float = attrs.field(init=False)
    _end: str | None = attrs.field(default=None, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ends: ExitStack = attrs.field(factory=ExitStack, init=False)
    _live: Live = attrs.field(init=False)

    async def run(self) -> int:
        """Show it until the user leaves, or the program ends."""
        self._status = Status(name=printable(self.path.stem), pid=None, interval=self.interval)
        self._came, self._pace = trio.current_time(), self.interval
        with trio.open_signal_receiver(signal.SIGWINCH, signal.SIGTSTP) as signals, self._ends:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                # Errors of the socket are printed before the screen is taken.
                with trio.move_on_after(_CONNECT_SECONDS):
                    await self._changed.wait()
                self._enter()
                nursery.start_soon(self._heed, signals)
                if sys.stdin.isatty():
                    nursery.start_soon(read_keys, sys.stdin.fileno(), self._press)
                await self._draw_always()
                nursery.cancel_scope.cancel()
        if self._end is None:
            return 0
        print(f"trio-accel: {printable(self._end)}", file=sys.stderr)
        return 1

    def _enter(self) -> None:
        """Take the screen and the keyboard; what gives them back is called at the end, whatever ends it."""
        put_back = self._ends.enter_context(keys_at_once(sys.stdin.fileno())) if sys.stdin.isatty() else None
        self._live = Live(console=self.console, auto_refresh=False, screen=True)
        self._ends.callback(self._live.stop)
        self._live.start()
        at_end = [self._live.stop] if put_back is None else [self._live.stop, put_back]
        self._ends.enter_context(at_a_second_signal(*at_end))

    async def _watch(self) -> None:
        """Take snapshots; connect again where the program let go of a terminal that was stopped."""
        try:
            while await self._connect():
                pass
            error = ObserverSocketError(f"{self.path} closed the connection without a snapshot")
        except ObserverSocketError as found:
            error = found
        if self._newest is None:
            raise error
        self._end = str(error) if self.path.exists() else f"{self._status.name} has ended"
        self._changed.set()

    async def _connect(self) -> bool:
        """Take snapshots to the end of a connection; whether there were any."""
        before = self._newest
        async with open_observation(self.path, interval=self.interval) as observation:
            program = observation.program
            self._status = attrs.evolve(self._status, name=program.name, pid=program.pid)
            self._changed.set()
            async for snapshot in observation:
                self._take(snapshot)
        # There is a pause where connections are closed again and again.
        await trio.sleep(_AGAIN_SECONDS)
        return self._newest is not before

    def _take(self, snapshot: SystemSnapshot) -> None:
        now = trio.current_time()
        self._pace = max(self.interval, _FIRST_PACE if self._newest is None else now - self._came)
        self._newest, self._came = snapshot, now
        self._changed.set()

    async def _heed(self, signals: AsyncIterator[int]) -> None:
        """Draw when the size has changed; leave the terminal to the shell while stopped."""
        async for number in signals:
            if number == signal.SIGTSTP:
                self._ends.close()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._enter()
            self._changed.set()

    def _press(self, key: str) -> None:
        self.view.press(key)
        self._changed.set()

    async def _draw_always(self) -> None:
        while not self.view.is_over and self._end is None:
            self._changed = trio.Event()
            if self._shown is None or not self.view.is_paused:
                self._shown = self._newest
            since = trio.current_time() - self._came
            is_silent = since > self._pace + max(self._pace, _SILENT_SECONDS)
            status = attrs.evolve(self._status, silent=since if is_silent else 0.0)
            width, height = self.console.size
            drawn = draw_screen(self._shown, self.view, status, width=width, height=height)
            self._live.update(drawn, refresh=True)
            with trio.move_on_after(_REDRAW_SECONDS):
                await self._changed.wait()


@attrs.define(eq=False)
class KeyParser:
    """Bytes of a terminal as keys: the character that was typed, or a name such as ``"page up"``."""

    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore"), init=False
    )
    _rest: str = attrs.field(default="", init=False)

    @property
    def is_in_sequence(self) -> bool:
        """Whether more may belong to what has come last."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that ``data`` completes. Sequences without a meaning here are left out."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        keys: list[str] = []
        while text:
            if _UNFINISHED.match(text):
                self._rest = text
                break
            found = _SEQUENCE.match(text)
            key = found[0] if found else text[0]
            text = text[len(key) :]
            name = _NAMES.get(key, key if key.isprintable() else "")
            if name:
                keys.append(name)
        return keys

    def flush(self) -> list[str]:
        """No more bytes come: the last ones are the escape key, or a sequence that was cut off."""
        is_escape, self._rest = self._rest == "\x1b", ""
        return ["escape"] if is_escape else []


@contextmanager
def keys_at_once(descriptor: int) -> Generator[Callable[[], None]]:
    """Have the terminal hand over each key at once, and show none; as before at the end.

    Yields:
        A function that puts the terminal back at any moment, as often as it is called.
    """
    before = cast("list[int | list[bytes | int]]", termios.tcgetattr(descriptor))

    def put_back() -> None:
        # The restore does not wait for the output: a terminal that is stopped takes none.
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

    try:
        # Ctrl-C, Ctrl-Z and Ctrl-\ stay signals.
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield put_back
    finally:
        put_back()


async def read_keys(descriptor: int, press: Callable[[str], None]) -> None:
    """Call ``press`` with each key that is typed, until the terminal is gone."""
    parser = KeyParser()
    while True:
        with trio.move_on_after(_ESCAPE_SECONDS if parser.is_in_sequence else float("inf")) as wait:
            await trio.lowlevel.wait_readable(descriptor)
        if wait.cancelled_caught:
            keys = parser.flush()
        else:
            try:
                data = os.read(descriptor, 1024)
            except OSError:
                return
            if not data:
                return
            keys = parser.feed(data)
        for key in keys:
            press(key)
