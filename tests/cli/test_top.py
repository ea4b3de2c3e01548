"""`trio-accel top` beside a running program: once, as JSON, and in a terminal with its key and signals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chosen import SEARCHED

from trio_accel.cli._run import InputError
from trio_accel.cli._top import find_program
from trio_accel.telemetry import ObservedProgram, SystemSnapshot

if TYPE_CHECKING:
    from command import Cli

Start = Callable[..., "subprocess.Popen[str]"]

# Far more than is needed: other programs use the machine, too.
PATIENCE = 30.0

PROGRAM = """
import attrs, sys, trio, trio_accel as ta

@attrs.frozen
class Sell(ta.Request["Till", int]):
    pass

class Till(ta.Actor):
    @ta.handles(Sell)
    async def sell(self, message):
        return 1

async def main():
    async with ta.open_system("shop") as system, ta.telemetry.open_socket(system, *sys.argv[1:]):
        till = await system.spawn(Till, name="till")
        await system.spawn(Till, name="other")
        for _ in range(5):
            await till.ask(Sell())
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@contextmanager
def running(runtime: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    """A program with two actors and an open socket."""
    environment = {**os.environ, "PYTHONPATH": SEARCHED, "XDG_RUNTIME_DIR": str(runtime)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *names], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def shop(folder: Path) -> Generator[int, None, None]:
    """The process of a program that runs for all tests of this module."""
    with running(folder) as process:
        yield process.pid


@pytest.fixture(autouse=True)
def runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs look for sockets here, and in no other place."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def alone(runtime: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without the program of the module."""
    folder = tmp_path_factory.mktemp("alone")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


class TestWhich:
    PROGRAMS = (
        ObservedProgram(name="shop-11", pid=11, path=Path("/r/shop-11.sock")),
        ObservedProgram(name="shop-12", pid=12, path=Path("/r/shop-12.sock")),
        ObservedProgram(name="bank", pid=None, path=Path("/r/bank.sock")),
    )

    @pytest.mark.parametrize(
        ("wanted", "path"),
        [
            *(("shop-11", "/r/shop-11.sock"), ("12", "/r/shop-12.sock"), ("ba", "/r/bank.sock")),
            *(("/elsewhere/x.sock", "/elsewhere/x.sock"), ("./x.sock", "x.sock")),
        ],
    )
    def test_by_name_process_or_path(self, wanted: str, path: str) -> None:
        assert find_program(wanted, self.PROGRAMS) == Path(path)

    def test_the_only_one_needs_no_name(self) -> None:
        assert find_program(None, self.PROGRAMS[2:]) == Path("/r/bank.sock")

    @pytest.mark.parametrize(
        ("wanted", "programs", "why"),
        [
            (
                None,
                PROGRAMS,
                "3 programs are meant, name one of them: shop-11 (process 11), shop-12 (process 12), bank",
            ),
            (
                "shop",
                PROGRAMS,
                "2 programs are meant, name one of them: shop-11 (process 11), shop-12 (process 12)",
            ),
            ("13", PROGRAMS, "there is no program '13'; there are: shop-11 (process 11)"),
            (
                None,
                (),
                "no program of this user has an observer socket open; a program opens one by: async with",
            ),
            ("shop", (), "no program of this user has an observer socket open"),
        ],
    )
    def test_none_or_several(self, wanted: str, programs: tuple[ObservedProgram, ...], why: str) -> None:
        with pytest.raises(InputError, match=re.escape(why)):
            find_program(wanted, programs)


class TestOnce:
    def test_a_plain_table(self, cli: Cli, shop: int) -> None:
        done = cli("top")
        assert (done.code, done.err) == (0, "")
        assert "\x1b" not in done.out
        title, totals, header, *rows = done.out.splitlines()
        assert title.startswith(f"shop-{shop}, process {shop}, up 0:")
        assert totals.startswith("4 actors, ")
        assert header.split()[:4] == ["actor", "state", "msg/s", "queue"]
        assert [row.split()[-1] for row in rows] == ["System", "ObserverActor", "Till", "Till"]
        assert rows[2].split()[1:3] == ["till", "running"]
        assert rows[2].split()[-2] == "5"

    def test_json_is_the_snapshot(self, cli: Cli, shop: int) -> None:
        done = cli("top", "shop", "--json")
        assert (done.code, done.err) == (0, "")
        document = json.loads(done.out)
        assert (document["command"], document["name"], document["error"]) == ("top", f"shop-{shop}", None)
        snapshot = SystemSnapshot.from_json(json.dumps(document["snapshot"]))
        assert [actor.path for actor in snapshot.actors] == [
            "shop",
            "shop/observer",
            "shop/till",
            "shop/other",
        ]
        assert snapshot.actors[2].handled == 5

    def test_no_program(self, cli: Cli, alone: Path) -> None:
        done = cli("top")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("trio-accel: no program of this user has an observer socket open")
        done = cli("top", str(alone / "gone.sock"), "--once")
        assert done.code == 1
        assert f"no program listens at {alone / 'gone.sock'}" in done.err
        done = cli("top", str(alone / "gone.sock"), "--json")
        assert json.loads(done.out)["exit_code"] == done.code == 1

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (["--interval", "0.01"], "Must be >= 0.1"),
            (["--interval", "61"], "Must be <= 60"),
            (["--sort", "rate"], "Unknown option"),
        ],
    )
    def test_wrong_options(self, refused: Callable[..., str], options: list[str], why: str) -> None:
        assert why in refused("top", *options)


class Terminal:
    """A terminal with the command in it."""

    def __init__(
        self, start: Start, *arguments: str, columns: int = 80, rows: int = 24, **variables: str
    ) -> None:
        self.controller, self.terminal = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.terminal)
        self.output = ""
        # A terminal of its own has a size of its own.
        inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        environment = {**inherited, "PYTHONPATH": SEARCHED, "TERM": "xterm-256color", **variables}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self.terminal)
        self.process = start("top", *arguments, env=environment, start_new_session=True, **ends)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self, seconds: float) -> None:
        if select.select([self.controller], [], [], seconds)[0]:
            self.output += os.read(self.controller, 1 << 16).decode(errors="replace")

    def screen(self) -> list[str]:
        """What was drawn last, without colours."""
        last = self.output.rpartition("\x1b[H")[2]
        return [
            line.rstrip()
            for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last).replace("\r", "").split("\n")
        ]

    def wait_for(self, text: str) -> list[str]:
        """Read until the screen has it, and goes on having it: a frame may come in parts."""
        end = time.monotonic() + PATIENCE
        while True:
            while not self._has(text):
                assert time.monotonic() < end, f"{text!r} is not on the screen:\n" + "\n".join(self.screen())
                assert self.process.poll() is None, self.output
                self.read(1.0)
            # The rest of the frame.
            self.read(0.05)
            if self._has(text):
                return self.screen()

    def _has(self, text: str) -> bool:
        return any(text in line for line in self.screen())

    def press(self, keys: str) -> None:
        os.write(self.controller, keys.encode())

    def end(self) -> int:
        """Wait for the end; the terminal has to be as it was."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < end
            self.read(0.05)
        self.read(0)
        assert termios.tcgetattr(self.terminal) == self.before
        # The other screen was left, and the cursor is shown.
        assert self.output.count("\x1b[?1049h") == self.output.count("\x1b[?1049l") >= 1
        assert self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        code = self.process.returncode
        assert isinstance(code, int)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.controller)
        os.close(self.terminal)


@pytest.fixture
def terminal(start: Start) -> Generator[Callable[..., Terminal], None, None]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, **options: object) -> Terminal:
        opened.append(Terminal(start, *arguments, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


Open = Callable[..., Terminal]


class TestTerminal:
    def test_only_q_leaves(self, terminal: Open, shop: int) -> None:
        top = terminal("--interval", "0.1")
        lines = top.wait_for("└─ other")
        assert lines[0].startswith(f"shop-{shop}, process {shop}")
        assert len(lines) == 24
        assert lines[-1] == "q leaves"
        assert not termios.tcgetattr(top.terminal)[3] & (termios.ICANON | termios.ECHO)
        # Arrows, letters, and the key that stops a program elsewhere.
        top.press("\x1b[A\x1bx\x1a/S p\r")
        top.output = ""
        top.wait_for("└─ other")
        top.press("q")
        assert top.end() == 0

    @pytest.mark.slow
    def test_the_size_may_change(self, terminal: Open, shop: int) -> None:
        top = terminal(columns=160, rows=12)
        assert "class" in "".join(top.wait_for("└─ other"))
        top.resize(40, 8)
        top.process.send_signal(signal.SIGWINCH)
        end = time.monotonic() + PATIENCE
        while not (len(top.screen()) == 8 and max(map(len, top.screen())) <= 40):
            assert time.monotonic() < end, top.screen()
            top.read(0.5)
        top.press("q")
        assert top.end() == 0

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signals_leave_the_terminal_as_it_was(
        self, terminal: Open, shop: int, number: int, code: int
    ) -> None:
        top = terminal()
        top.wait_for("└─ other")
        top.process.send_signal(number)
        assert top.end() == code
        assert top.output.endswith("trio-accel: interrupted\r\n")

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_the_program_ends(self, terminal: Open, alone: Path, number: int) -> None:
        with running(alone, "brief") as program:
            top = terminal("brief")
            top.wait_for("└─ other")
            program.send_signal(number)
            program.wait()
            assert top.end() == 1
        assert top.output.endswith(
            "trio-accel: ObserverSocketError: brief closed the connection: has it ended?\r\n"
        )

    @pytest.mark.slow
    def test_the_program_is_held_and_goes_on(self, terminal: Open, alone: Path) -> None:
        with running(alone, "held") as program:
            top = terminal("held", "--interval", "0.1")
            top.wait_for("└─ other")
            program.send_signal(signal.SIGSTOP)
            assert top.wait_for("its loop is held")[0].startswith("held, no answer for ")
            program.send_signal(signal.SIGCONT)
            end = time.monotonic() + PATIENCE
            while "no answer" in top.screen()[0]:
                assert time.monotonic() < end
                top.read(0.5)
            top.press("q")
            assert top.end() == 0

    def test_without_colours(self, terminal: Open, shop: int) -> None:
        top = terminal(NO_COLOR="1")
        top.wait_for("└─ other")
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", top.output)
        top.press("q")
        assert top.end() == 0

    def test_a_terminal_that_can_do_nothing_gets_one_snapshot(self, terminal: Open, shop: int) -> None:
        top = terminal(TERM="dumb")
        end = time.monotonic() + PATIENCE
        while top.process.poll() is None:
            assert time.monotonic() < end
            top.read(0.1)
        top.read(0)
        assert top.process.returncode == 0
        assert "└─ other" in top.output
        assert "\x1b" not in top.output
