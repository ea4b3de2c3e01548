"""Programs with a blocking device: scripts that end badly, a terminal, a notebook, servers."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import attrs
import pytest
from chosen import NAME, SEARCHED

# `test_a_notebook` is a part of every run.
slow = pytest.mark.slow
pytestmark = [
    pytest.mark.machine,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux"),
]

SETUP = f"""\
import os, signal, sys, threading
import numpy as np, trio, trio_accel as ta
b = ta.blocking({NAME!r}, options=ta.DeviceOptions(isolation="process", retry=1))
x = b.wait(b.device.put(np.ones((2, 2))))
"""
KILL = "os.kill(b.wait(b.device.statistics).pid, signal.SIGKILL)"
SECONDS = 60.0


class Processes:
    """The processes that a test starts, and their children, by a variable of their environment."""

    def __init__(self, name: str) -> None:
        self._mark = f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        self.environment = {**os.environ, "PYTHONPATH": SEARCHED, "TERM": "dumb", "BLOCKING_TEST": self._mark}

    def alive(self) -> set[int]:
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes():
                    found.add(int(path.parent.name))
            except OSError:
                pass
        return found

    def check_none(self) -> None:
        """Workers end when their program has: they may need a moment."""
        deadline = time.monotonic() + 10
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.alive() == set()


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Generator[Processes, None, None]:
    started = Processes(request.node.originalname)
    yield started
    started.check_none()


@attrs.frozen
class Script:
    """A script after `SETUP`, and its end."""

    text: str
    prints: str
    code: int = 0
    error: str = ""


SCRIPTS = {
    "no close": Script("print(b.get(x @ x).sum())", "8.0"),
    "with": Script("with b: print(b.get(x @ x).sum())", "8.0"),
    "an exception": Script("1 / 0", "", 1, "ZeroDivisionError"),
    "sys.exit": Script("sys.exit(3)", "", 3),
    "work in flight": Script("f = b.submit(trio.sleep_forever); print('left')", "left"),
    "an operation in flight": Script(
        "f = b.submit((b.xp.asarray(np.ones((700, 700))).ref @ np.ones((700, 700))).to_host); print('left')",
        "left",
    ),
    "a fork": Script(
        "pid = os.fork()\n"
        "if not pid:\n"
        "    for ask in (lambda: b.get(x), lambda: b.submit(x @ x), lambda: b.xp.asarray([1.0])):\n"
        "        try: ask()\n"
        "        except RuntimeError as e: print('belongs to the process' in str(e), flush=True)\n"
        "    b.close()\n"
        "    del x\n"
        "    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), b.get(x @ x).sum())",
        "True\nTrue\nTrue\n5 8.0",
    ),
    "in Trio": Script(
        "async def main():\n"
        "    try: b.get(x @ x)\n"
        "    except RuntimeError as e: print('would block the Trio loop' in str(e))\n"
        "trio.run(main)",
        "True",
    ),
    "what cannot be opened": Script("ta.blocking('nothing')", "", 1, "ValueError"),
    "two of them": Script(
        f"c = ta.blocking({NAME!r}); print(c.get(c.wait(c.device.put(np.ones(2))) * 2), b.get(x @ x).sum())\n"
        "try: c.get(x)\n"
        "except RuntimeError as e: print('belongs to another' in str(e))",
        "[2. 2.] 8.0\nTrue",
    ),
    "Ctrl-C": Script(
        "ended = []\n"
        "async def long():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await trio.sleep_forever()\n"
        "    finally:\n"
        "        ended.append(1)\n"
        "try: b.wait(long)\n"
        "except KeyboardInterrupt: print(ended, b.get(x @ x).sum())",
        "[1] 8.0",
    ),
    "Ctrl-C in the middle of a large array": Script(
        "host = np.ones(1 << 24)\n"
        "seen = []\n"
        "def interrupt(event):\n"
        "    seen.append(event)\n"
        "    if len(seen) == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n"
        "    with ta.watch_progress(interrupt): b.wait(b.device.put(host))\n"
        "except KeyboardInterrupt: print(b.get(x @ x).sum(), b.device.losses)",
        "8.0 0",
    ),
    "Ctrl-C that nobody catches": Script(
        "async def long():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await trio.sleep_forever()\n"
        "b.wait(long)",
        "",
        -2,
        "KeyboardInterrupt",
    ),
    "a thread that asks for ever": Script(
        "def ask():\n"
        "    try:\n"
        "        while True: b.get(x @ x)\n"
        "    except RuntimeError as e: print('is closed' in str(e), flush=True)\n"
        "thread = threading.Thread(target=ask); thread.start()\n"
        "b.get(x); b.close(); thread.join()",
        "True",
    ),
    "a task that never ends": Script(
        "import trio_accel.interop._blocking_device as module\n"
        "module._EXIT_SECONDS = 0.2\n"
        "async def stay():\n"
        "    with trio.CancelScope(shield=True): await trio.sleep_forever()\n"
        "f = b.submit(stay); b.get(x)",
        "",
        0,
        "did not close within 0.2 seconds",
    ),
    "a worker that is killed": Script(
        f"{KILL}\nprint(b.get(x @ x).sum(), b.device.losses)",
        "8.0 1",
    ),
    "os._exit": Script("os._exit(4)", "", 4),
}


@slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, processes: Processes) -> None:
    script = SCRIPTS[name]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", SETUP + script.text],
        env=processes.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == (script.prints, script.code), done.stderr
    assert script.error in done.stderr
    if not script.error:
        assert done.stderr == ""


class Terminal:
    """The interactive interpreter in a terminal, for a ``with``."""

    def __init__(self, processes: Processes, *arguments: str, first: str = ">>> ") -> None:
        self._code: int | None = None
        self._first = first
        self._pid, self._end = pty.fork()
        if not self._pid:
            os.execve(sys.executable, [sys.executable, *arguments], processes.environment)

    def __enter__(self) -> Self:
        self.expect(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        # Without its terminal, an interpreter ends that a failed test has left.
        if self._code is None:
            self._reap()

    def expect(self, wanted: str) -> str:
        """Read up to a text; if it never appears, the test's time limit closes the terminal."""
        seen = ""
        while wanted not in seen:
            seen += os.read(self._end, 4096).decode()
        return seen

    def ask(self, line: str) -> str:
        os.write(self._end, f"{line}\n".encode())
        return self.expect(">>> ").partition("\n")[2]

    def interrupt(self) -> str:
        os.write(self._end, b"\x03")
        return self.expect(">>> ")

    def write(self, line: str) -> None:
        os.write(self._end, f"{line}\n".encode())

    def end(self) -> int:
        """Leave the interpreter; returns its exit code."""
        self.write("exit()")
        try:
            while os.read(self._end, 4096):
                pass
        except OSError:  # Linux: the other side is closed
            pass
        return self._reap()

    def _reap(self) -> int:
        os.close(self._end)
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


@slow
def test_the_interpreter_in_a_terminal(processes: Processes) -> None:
    with Terminal(processes, "-q") as terminal:
        for line in SETUP.splitlines():
            terminal.ask(line)
        assert "array([[2., 2.]," in terminal.ask("b.get(x @ x)")
        assert "<Call linalg.matmul, not run" in terminal.ask("x @ x")
        assert "Array([0., 2., 4.]" in terminal.ask("b.xp.asarray(np.arange(3.0)) * 2")
        terminal.write("def begun(): print('be' + 'gun', flush=True)")
        terminal.ask("")
        terminal.write("b.wait(trio.to_thread.run_sync, begun), b.wait(trio.sleep_forever)")
        terminal.expect("begun")
        assert "KeyboardInterrupt" in terminal.interrupt()
        assert "[3., 3.]" in terminal.ask("b.get(x @ x + 1)")
        terminal.ask(KILL)
        assert "[5., 5.]" in terminal.ask("b.get(x @ x + 3)")
        assert "1" in terminal.ask("b.device.losses")
        assert terminal.end() == 0


@slow
def test_the_interpreter_of_asyncio(processes: Processes) -> None:
    # Its greeting also has a prompt.
    with Terminal(processes, "-m", "asyncio", first="import asyncio\r\n>>> ") as terminal:
        for line in (*SETUP.splitlines(), "import asyncio"):
            terminal.ask(line)
        assert "[2., 2.]" in terminal.ask("b.get(x @ x)")
        assert "[4., 4.]" in terminal.ask("await asyncio.wrap_future(b.submit((x @ x * 2).to_host))")
        terminal.ask(KILL)
        assert "[5., 5.]" in terminal.ask("await asyncio.wrap_future(b.submit((x @ x + 3).to_host))")
        assert terminal.end() == 0


THREE = """\
async def three():
    async with trio.open_nursery() as nursery:
        for _ in range(3): nursery.start_soon(trio.sleep, 0.01)
    return "all three"
b.wait(three)
"""
LONG = """\
ended = []
async def long():
    try:
        print("begun", flush=True)
        await trio.sleep_forever()
    finally:
        ended.append("at once")
b.wait(long)
"""
POOL = """\
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(lambda n: float(b.get(x @ x * float(n)).sum()), range(100)))))
"""
# For each cell its text, and a part of its output.
CELLS = [
    (SETUP + "b", "ready"),
    ("x", "<AccelRef float64 (2, 2)"),
    ("x @ x", "<Call linalg.matmul, not run"),
    ("b.get(x @ x)", "[2., 2.]"),
    ("b.get(ta.nn.relu(x @ x - 3)).sum()", "0.0"),
    ("xp = b.xp; a = xp.asarray(np.arange(4.0)); xp.sqrt(a * a) + 1", "Array([1., 2., 3., 4.]"),
    ("np.asarray(a + 1)", "array([1., 2., 3., 4.])"),
    ("float(xp.sum(a))", "6.0"),
    ("b.get(ta.linalg.qr(x))[0].shape", "(2, 2)"),
    ("b.device", "<table"),
    (f"{KILL}\nb.get(x @ x)", "[2., 2.]"),
    ("b.device.losses", "1"),
    (THREE, "all three"),
    (LONG, "KeyboardInterrupt"),
    ("ended, b.get(x @ x).sum()", "(['at once'], "),
    ("import asyncio\nawait asyncio.wrap_future(b.submit(three))", "all three"),
    (POOL, "100"),
    ("b.wait(b.device)", "wait: pass a call"),
    ("b.close(); b", "closed"),
    ("b.get(x @ x)", "get: this blocking device is closed"),
]


def test_a_notebook(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setattr(os, "environ", processes.environment)
    notebook = new_notebook(cells=[new_code_cell(text) for text, _ in CELLS])

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            if message["msg_type"] == "stream" and "begun" in message["content"]["text"]:
                self.interruption = asyncio.ensure_future(self.km.interrupt_kernel())
            return super().process_message(message, cell, index)

    client = Client(notebook, timeout=SECONDS, kernel_name="python3", allow_errors=True)
    # `execute` would leave an event loop open.
    asyncio.run(client.async_execute())
    for cell, (text, shown) in zip(notebook.cells, CELLS, strict=True):
        seen = "\n".join(map(str, cell.outputs))
        assert shown in seen, f"{text}\n{seen}"
    assert len(CELLS) == 20


def check_server(port: int, *paths: str) -> None:
    """Ask a server by eight clients, before and after its worker is killed."""

    def ask(path: str, rows: object = None) -> Any:
        data = None if rows is None else json.dumps(rows).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)

    for path in paths:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n, path=path: ask(path, [[n, 1.0]]), range(100)))
        assert answers == [[[n * 2.0, 2.0]] for n in range(100)]
        os.kill(ask("/pid"), signal.SIGKILL)
        assert ask(path, [[7.0, 1.0]]) == [[14.0, 2.0]]


SERVER = """
import asyncio, sys
import numpy as np, trio_accel as ta
from typing import Any, Self

b = ta.blocking(NAME, options=ta.DeviceOptions(isolation="process", retry=1))
w = b.wait(b.device.put(np.eye(2) * 2))
"""
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "notebook.md"
# The program of the page, with a port that the system chooses.
FASTAPI = """
import uvicorn

@app.get("/pid")
def pid() -> int:
    return b.wait(b.device.statistics).pid

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

Server(uvicorn.Config(app, port=0, log_level="error")).run()
"""
FLASK = """
import flask, logging
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
app = flask.Flask("app")

@app.post("/thread")
def thread():
    return b.get(np.array(flask.request.json) @ w).tolist()

@app.get("/pid")
def pid():
    return str(b.wait(b.device.statistics).pid)

server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    pass
"""


@slow
@pytest.mark.parametrize(
    ("library", "text", "paths"),
    [("uvicorn", FASTAPI, ("/thread", "/future")), ("flask", FLASK, ("/thread",))],
)
def test_servers(library: str, text: str, paths: tuple[str, ...], processes: Processes) -> None:
    pytest.importorskip(library)
    begin = SERVER.replace("NAME", repr(NAME))
    if library == "uvicorn":
        pytest.importorskip("fastapi")
        *_, begin = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        begin = begin.replace('"cpu"', repr(NAME))
    program = subprocess.Popen(
        [sys.executable, "-c", begin + text],
        env=processes.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        with program.stdout:
            check_server(int(program.stdout.readline()), *paths)
    finally:
        program.send_signal(2)
        code = program.wait(SECONDS)
    assert code in (0, -2)
