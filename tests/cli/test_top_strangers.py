"""`trio-accel top` at a socket that is no program's: one sentence, and no sign of control of a stranger."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from terminal import drain
from top_snapshot import SHOP

if TYPE_CHECKING:
    import subprocess

    from command import Cli

PATIENCE = 30.0
EVIL = "\x1b]0;pwned\x07\x1b[31m\u202eabc\x9b31m\r\ntrio-accel: all is well"
HELLO = b'{"protocol":1,"name":"shop","pid":1,"system":"shop"}\n'
GOOD = SHOP.to_json().encode() + b"\n"

Serve = Callable[..., Path]


def refusal(text: str) -> bytes:
    return json.dumps({"error": text}, separators=(",", ":")).encode() + b"\n"


def changed(**members: object) -> bytes:
    return json.dumps({**json.loads(GOOD), **members}).encode() + b"\n"


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serve, None, None]:
    """Opens a socket that says the same to everybody, piece by piece, and closes the connection."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def answer(listening: socket.socket, pieces: tuple[bytes, ...], pause: float) -> None:
        with listening:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        for piece in pieces:
                            connection.sendall(piece)
                            over.wait(pause)
                    except OSError:
                        continue

    def start(*pieces: bytes, pause: float = 0.0) -> Path:
        path = tmp_path_factory.mktemp("run") / "x.sock"
        listening = socket.socket(socket.AF_UNIX)
        listening.settimeout(0.05)
        listening.bind(str(path))
        listening.listen()
        threads.append(threading.Thread(target=answer, args=(listening, pieces, pause)))
        threads[-1].start()
        return path

    yield start
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b"\x1b[2J\n",), r"no observer socket: a line must be one JSON object, got b'\x1b[2J'"),
        ((b"x" * 100,), "no observer socket: it closed the connection without a word"),
        ((), "no observer socket: it closed the connection without a word"),
        ((HELLO,), "closed the connection: has it ended?"),
        ((HELLO, GOOD[:500]), "closed the connection: has it ended?"),
        ((HELLO, b"[" * 200_000 + b"\n"), "sent what is no snapshot: the snapshot is nested too deeply"),
        ((HELLO, changed(rate=float("nan"))), "rate is a number that no program has"),
        ((HELLO, changed(dead_letters=10**400)), "dead_letters is a number that no program has"),
        ((HELLO, b"x" * (65 << 20)), "a line must have at most 67108864 bytes"),
        ((refusal(EVIL),), "the program refused: ?]0;pwned??[31m?abc?31m trio-accel: all is well"),
        ((refusal("x" * 1_000_000),), "the program refused: xxx"),
    ],
)
@pytest.mark.parametrize("form", ["--once", "--json"])
def test_one_sentence(cli: Cli, serve: Serve, pieces: tuple[bytes, ...], why: str, form: str) -> None:
    done = cli("top", serve(*pieces), form)
    assert done.code == 1
    assert why in done.err
    assert done.err.startswith("trio-accel: ObserverSocketError: ")
    assert done.err.count("\n") == 1
    assert len(done.err) < 500
    assert done.err.rstrip("\n").isprintable()
    if form == "--json":
        assert json.loads(done.out)["exit_code"] == 1


@pytest.mark.parametrize("form", ["--once", "--json"])
@pytest.mark.parametrize("what", ["silent", "hello alone", "byte by byte", "queue"])
def test_what_does_not_answer_in_time(
    cli: Cli, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, form: str
) -> None:
    """A script gets its sentence, however slowly the other end says something."""
    if what == "queue" and sys.platform != "linux":
        pytest.skip("elsewhere a full queue refuses as if no program listened")
    monkeypatch.setattr("trio_accel.cli._top._ANSWER_SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        if what == "queue":
            path = tmp_path / "full.sock"
            listening.bind(str(path))
            listening.listen(0)
            first.connect(str(path))
        elif what == "byte by byte":
            path = serve(HELLO, *[bytes([byte]) for byte in GOOD[:50]], pause=0.05)
        else:
            path = serve(HELLO if what == "hello alone" else b"", pause=2.0)
        begun = time.monotonic()
        done = cli("top", path, form)
    assert done.code == 1
    assert done.err.startswith(f"trio-accel: ObserverSocketError: the program at {path} does not answer")
    assert done.err.count("\n") == 1
    assert time.monotonic() - begun < 10.0


def test_times_beyond_all_calendars(cli: Cli, serve: Serve) -> None:
    failures = [{**json.loads(GOOD)["failures"][0], "time": -1e19}]
    done = cli("top", serve(HELLO, changed(time=1e19, failures=failures)), "--once")
    assert (done.code, done.err) == (0, "")
    assert "shop" in done.out.splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (
            (HELLO, GOOD, refusal(EVIL)),
            "the program refused: ?]0;pwned??[31m?abc?31m trio-accel: all is well",
        ),
        ((HELLO, GOOD, b"\x1b]0;pwned\x07\n"), "sent what is no snapshot: Expecting value"),
        ((HELLO, GOOD[:500]), "closed the connection: has it ended?"),
    ],
)
def test_the_terminal_is_given_back_before_the_sentence(
    start: Callable[..., subprocess.Popen[str]], serve: Serve, pieces: tuple[bytes, ...], why: str
) -> None:
    # Later than the screen is taken.
    path = serve(*pieces, pause=0.6)
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "20"}
    process = start("top", str(path), env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    output, end = b"", time.monotonic() + PATIENCE
    while process.poll() is None or select.select([controller], [], [], 0)[0]:
        assert time.monotonic() < end, output
        if select.select([controller], [], [], 0.05)[0]:
            output += os.read(controller, 1 << 16)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 1
    last = output.decode().rpartition("\x1b[?1049l")[2]
    assert why in last
    assert last.strip().isprintable()
    assert b"\x1b]0" not in output


def _deep(*parts: int) -> bytes:
    actors = json.loads(GOOD)["actors"]
    paths = ["shop/" + "/".join(["x"] * count) for count in parts]
    return changed(actors=[*actors, *({**actors[0], "path": path} for path in paths)])


ENDLESS = [HELLO, *[GOOD * 50] * 2000]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces",
    [
        ENDLESS,
        [HELLO, _deep(200_000)],
        [HELLO, _deep(*range(1, 3000))],
        [HELLO, changed(system="\u0301" * 1_000_000)],
        [HELLO, changed(failures=json.loads(GOOD)["failures"] * 2000)],
    ],
    ids=[
        "endless",
        "deep",
        "a deep tree",
        "marks",
        "failures",
    ],
)
def test_a_key_leaves_whatever_the_program_sends(
    start: Callable[..., subprocess.Popen[str]], serve: Serve, pieces: list[bytes]
) -> None:
    # But for the endless one, it keeps the connection afterwards and says no more.
    path = serve(*pieces) if pieces is ENDLESS else serve(b"".join(pieces), pause=PATIENCE / 2)
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "20"}
    process = start("top", str(path), env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    output, begun, pressed = b"", time.monotonic(), 0.0
    while process.poll() is None or select.select([controller], [], [], 0)[0]:
        assert time.monotonic() < begun + PATIENCE, output[-2000:]
        if select.select([controller], [], [], 0.05)[0]:
            output += os.read(controller, 1 << 16)
        if not pressed and b"\x1b[?1049h" in output and time.monotonic() > begun + 4.0:
            os.write(controller, b"eq")
            pressed = time.monotonic()
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 0
    assert time.monotonic() - pressed < 10.0


@pytest.mark.parametrize(
    "pieces",
    [[b""], [HELLO], [HELLO, b"{"], [HELLO, b"x" * (60 << 20)]],
    ids=["silent", "hello alone", "half a line", "a line without end"],
)
def test_before_a_snapshot_the_screen_is_not_taken(
    start: Callable[..., subprocess.Popen[str]], serve: Serve, pieces: list[bytes]
) -> None:
    path = serve(b"".join(pieces), pause=PATIENCE / 2)
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = start("top", str(path), env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    # It has connected by then, on a quiet machine; a signal before leaves as well.
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    assert drain(controller) == "trio-accel: interrupted\r\n"
    assert process.wait(PATIENCE) == 130
