"""A running program in the terminal: what is shown, in any terminal, and what ends the view."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from chosen import SEARCHED
from terminal import drain

from trio_accel.actors import LoopHolds, Reading
from trio_accel.telemetry import ActorRow, ProcessRow, SystemSnapshot

if TYPE_CHECKING:
    from command import Cli, Refused, Start

Screen = Callable[..., AbstractContextManager["Seen"]]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CROWD = SystemSnapshot(
    time=0.0,
    system="crowd",
    pid=1,
    uptime=3.0,
    recorded=2.0,
    actors=tuple(
        ActorRow(path=f"crowd/{number}", actor_class="One", state="running") for number in range(30)
    ),
)


def event(snapshot: SystemSnapshot) -> bytes:
    return b"data: " + snapshot.to_json().encode() + b"\n\n"


@attrs.frozen
class Watched:
    """A program in a process of its own."""

    process: subprocess.Popen[str]

    def fail(self) -> str:
        """Let its worker fail and be restarted; returns the address of the dashboard."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def watched(*arguments: str) -> Generator[Watched, None, None]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("watched.py")), *arguments],
        env={**os.environ, "PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield Watched(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def program() -> Generator[Watched, None, None]:
    with watched() as found:
        yield found


@contextmanager
def serve(
    *parts: bytes, ends: bool = False, asked: threading.Event | None = None
) -> Generator[str, None, None]:
    """Answer one connection with this; then close it, or keep it to the end of the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                if asked is not None:
                    asked.set()
                for part in parts:
                    connection.sendall(part)
                if not ends:
                    # The other side leaves.
                    connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@attrs.define
class Seen:
    """A command on a terminal, and what it has written there."""

    process: subprocess.Popen[str]
    controller: int
    text: str = ""
    place: int = 0

    def wait(self, pattern: str) -> re.Match[str]:
        """Wait until it has been written, behind what was waited for before."""
        while (found := re.compile(pattern).search(self.text, self.place)) is None:
            self.text += os.read(self.controller, 65536).decode()
        self.place = found.end()
        return found


@pytest.fixture
def screen(start: Start, environment: dict[str, str]) -> Screen:
    """Starts the command on a terminal of so many rows."""

    @contextmanager
    def opened(url: str, rows: int = 24) -> Generator[Seen, None, None]:
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        env = {
            key: value for key, value in environment.items() if key not in {"LINES", "COLUMNS", "NO_COLOR"}
        }
        env |= {"TERM": "xterm-256color"}
        process = start("top", url, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        seen = Seen(process, controller)
        try:
            yield seen
        except BaseException:
            process.kill()
            raise
        finally:
            seen.text += drain(controller)
            process.wait(10)

    return opened


def test_once(cli: Cli, program: Watched) -> None:
    done = cli("top", program.fail(), "--once")
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert re.fullmatch(rf"shop, process {program.process.pid}, up for \d+ s", first)
    assert re.search(r"^running +1\.00 +\d+\.\d\d  shop/cpu:0$", done.out, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d +\d+\.\d\d +\d+\.\d\d  Fail shop/worker$", done.out, re.MULTILINE)
    tree = [line for line in lines[lines.index("STATE        RESTARTS  ACTOR") :] if "[" not in line]
    assert tree[1:5] == [
        f"running             0  {name}" for name in ("shop", "  cpu:0", "    context", "      memory")
    ]
    assert re.fullmatch("running             [1-9]    worker  LookupError", tree[5])
    # Texts of errors are the page's.
    assert "secret" not in done.out


def test_names_are_text(cli: Cli, program: Watched) -> None:
    done = cli("top", program.fail(), "--once")
    assert "    [bold red]not red[not bold] :smile:  Odd[red]?[31m\n" in done.out
    assert "    ?[2J?]0;title????new ?line  Odd[red]?[31m\n" in done.out
    assert all(char.isprintable() for line in done.out.split("\n") for char in line)


def test_each_event_is_drawn_until_ctrl_c(program: Watched, screen: Screen) -> None:
    with screen(program.fail(), rows=40) as seen:
        seen.wait(r"\x1b\[\?1049h")
        before = int(seen.wait(r"running +(\d+)    worker  LookupError")[1])
        seen.wait(r"running +\d+    \[bold red\]not red\[not bold\] :smile:  Odd\[red\]\?\[31m")
        for restarts in (before + 1, before + 2):
            program.fail()
            seen.wait(rf"running +{restarts}    worker  LookupError")
        seen.process.send_signal(signal.SIGINT)
    assert seen.process.returncode == 0
    assert "\x1b]0;" not in seen.text
    assert "\x1b[2J" not in seen.text
    # The terminal is as it was, and nothing is said.
    assert seen.text.endswith(("\x1b[?25h\x1b[?1049l", "\x1b[?1049l\x1b[?25h"))


def test_it_fits_a_terminal_of_ten_rows(screen: Screen) -> None:
    with serve(HEAD, event(CROWD)) as url, screen(url, rows=10) as seen:
        seen.wait("ACTOR \\(24 more\\)")
        seen.wait("  5 *")
        seen.process.send_signal(signal.SIGINT)
    assert seen.process.returncode == 0
    *_, last = seen.text.split("\x1b[H")
    assert [line.strip() for line in last.partition("\x1b")[0].splitlines()] == [
        *("crowd, process 1, up for 3 s", "STATE            MIB      OF MIB  DEVICE"),
        *("PER S  P50 MS  P99 MS  MESSAGE", "STATE        RESTARTS  ACTOR (24 more)"),
        *(f"running             0    {name}" for name in range(6)),
    ]


def test_figures_that_actors_show(cli: Cli) -> None:
    waits = Reading(
        name="waits", kind="histogram", help="", value=3.0, bounds=(1.0,), counts=(1, 3), path="crowd/1"
    )
    parts = Reading(
        name="parts", kind="gauge", help="", value=1.5, labels=(("state", "new"),), path="crowd/1"
    )
    loss = Reading(name="loss", kind="gauge", help="", value=math.nan, path="crowd/1")
    with serve(HEAD, event(attrs.evolve(CROWD, readings=(waits, parts, loss)))) as url:
        lines = cli("top", url, "--once").out.splitlines()
    place = lines.index("      VALUE         MEAN  FIGURE")
    assert lines[place + 1 : place + 5] == [
        "          4         0.75  waits crowd/1",
        "        1.5            -  parts state=new crowd/1",
        "        nan            -  loss crowd/1",
        "STATE        RESTARTS  ACTOR",
    ]


def test_processes_and_a_held_loop(cli: Cli) -> None:
    loop = LoopHolds(count=2, seconds=3.5, longest=3.0, longest_at="model.py:14, in encode")
    process = ProcessRow(path="crowd", pid=77, memory=3 << 19, processor_seconds=12.25, load=0.5)
    with serve(HEAD, event(attrs.evolve(CROWD, loop=loop, processes=(process,)))) as url:
        lines = cli("top", url, "--once").out.splitlines()
    held = "2 holds of the loop, 3.5 s in all, the longest 3.0 s by model.py:14, in encode"
    assert lines[1] == held
    place = lines.index("    MIB    CPU S  CPU %  PROCESS")
    assert lines[place + 1] == "   1.50     12.2   50.0  77       crowd"


def test_the_program_ends(screen: Screen) -> None:
    with watched() as program, screen(program.fail()) as seen:
        seen.wait("worker  LookupError")
        program.process.kill()
    assert seen.process.returncode == 1
    assert re.search(r"\x1b\[\?1049ltrio-accel: 127\.0\.0\.1:\d+: the program has ended\r\n$", seen.text)


def test_a_cluster_has_its_nodes(cli: Cli) -> None:
    with watched("cluster") as program:
        done = cli("top", program.fail(), "--once")
        assert done.code == 0
        assert re.search("^running +0    nodes\n(.*\n)*running +0      left$", done.out, re.MULTILINE)
        assert re.search("^running +0      right$", done.out, re.MULTILINE)


def test_once_leaves_nothing_out(cli: Cli) -> None:
    with serve(HEAD, event(CROWD)) as url:
        done = cli("top", f"http://{url}/", "--once")
    assert done.code == 0
    assert done.out.startswith("crowd, process 1, up for 3 s\n")
    assert done.out.endswith("".join(f"running             0    {number}\n" for number in range(30)))


def test_an_event_in_parts(cli: Cli) -> None:
    told = HEAD + b": a comment\n\n" + event(CROWD)
    with serve(told[:20], told[20:200], told[200:]) as url:
        done = cli("top", url.replace("127.0.0.1", "localhost"), "--once")
    assert (done.code, done.out.count("\n")) == (0, 34)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"\x00\xff\x1b[31m" * 100,),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone",),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n16 pages are open already\n",),
        *((HEAD, b"data: %s\n\n" % data) for data in (b"{", b"{}", b"[]", b"null", b"1", b"\xff")),
        (HEAD, event(CROWD).replace(b'"crowd/7"', b"7")),
        (HEAD, event(CROWD).replace(b'"restarts":0', b'"restarts":[]')),
        (HEAD, event(CROWD).rstrip()),
        (HEAD, b"data: %s\n" % (b"[" * 100_000)),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_what_is_no_dashboard(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], ends: bool
) -> None:
    monkeypatch.setattr("trio_accel.cli._top._FIRST", 0.1)
    with serve(*parts, ends=ends) as url:
        done = cli("top", url)
    told = f"trio-accel: {url}: no dashboard answers there, or it has its 16 readers already\n"
    assert (done.code, done.out, done.err) == (1, "", told)


def test_a_line_without_an_end(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.cli._top._MAX_EVENT_BYTES", 1000)
    with serve(HEAD, b"data: " + b"x" * 1000) as url:
        assert cli("top", url).code == 1


def test_nothing_listens(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = cli("top", port)
    told = f"trio-accel: 127.0.0.1:{port}: nothing listens there\n"
    assert (done.code, done.out, done.err) == (1, "", told)


@pytest.mark.parametrize(
    "url",
    [
        *("", "shop", "0", "65536", "127.0.0.1", "127.0.0.1:", "localhost:x", "127.0.0.2:80", "[::1]:80"),
        *(
            "https://127.0.0.1:80/",
            "http://elsewhere.example:80/",
            "http://127.0.0.1:80/events",
            "80\x1b[31m",
        ),
        "http://user@127.0.0.1:80/",
    ],
)
def test_no_address_of_a_dashboard(refused: Refused, url: str) -> None:
    shown = url.replace("\x1b", "?")
    assert (
        refused("top", url)
        == f"{shown} is not an address of a dashboard, such as http://127.0.0.1:8080/".strip()
    )


def test_ctrl_c_before_there_is_a_snapshot(start: Start) -> None:
    asked = threading.Event()
    with serve(asked=asked) as url:
        process = start("top", url, "--once")
        assert asked.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "trio-accel: interrupted\n")


def test_output_that_cannot_be_written(start: Start) -> None:
    with serve(HEAD, event(CROWD)) as url, Path("/dev/full").open("w", encoding="ascii") as full:
        process = start("top", url, stdout=full)
        err = process.communicate(timeout=40)[1]
    assert (process.returncode, err) == (1, "trio-accel: cannot write the output: no space left on device\n")
