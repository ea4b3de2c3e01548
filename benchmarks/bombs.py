"""What a stranger can do to the services of the examples and to the dashboard, beside busy processes.

``python -m benchmarks.bombs [--services NAME ...] [--count 100] [--loops 4] [--seed 0]``

A generator draws requests, each of a field, a form and a size (`_bombs`). Four clients send them to a
service, and another one asks for its health every 50 ms. The longest answer may take 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import trio

from ._bombs import Bomb, Place, body_bombs, head_bombs, places_of

__all__ = ["SERVICES", "Report", "Service", "main"]

LONGEST = 0.5
"""Seconds that the health of a service may take."""
_EXAMPLES = Path(__file__).parents[1] / "examples"
_CLIENTS, _EVERY, _PATIENCE = 4, 0.05, 60.0
_Bombs = Iterator[tuple[str, Callable[[], Bomb]]]


def _of_text() -> _Bombs:
    sys.path.insert(0, str(_EXAMPLES / "generate"))
    from asked import AskedChat, AskedText  # type: ignore[import-not-found, unused-ignore]

    models: dict[str, Any] = {"/v1/chat/completions": AskedChat, "/v1/completions": AskedText}
    for path, model in models.items():
        yield from body_bombs(path, places_of(model, max_tokens=2))
    yield from head_bombs("/v1/completions", fields=("host", "authorization", "content-length"))
    yield from head_bombs("/v1/chat/completions", "POST", fields=("authorization", "connection"))


def _of_agent() -> _Bombs:
    places = [Place(name, f'{{"question":"a","{name}":') for name in ("key", "question", "unknown")]
    yield from body_bombs("/ask", places)
    yield from head_bombs("/ask", "POST", fields=("host", "x-deadline", "content-length"))


def _of_one_file() -> _Bombs:
    places = [Place("both", "", ""), Place("x", "[", ",1]"), Place("y", "[1,", "]")]
    headers = {"content-type": "application/json"}
    yield from body_bombs("/predict", places, (450, 1 << 16, 1 << 20), headers)
    yield from head_bombs("/predict", "POST", fields=("host", "x-deadline", "content-length"))


_HEADERS = (
    "host",
    "origin",
    "cookie",
    "content-length",
    "connection",
    "accept",
    "range",
    "upgrade",
    "expect",
)


def _of_pages(*paths: str) -> _Bombs:
    for path in paths:
        yield from head_bombs(path, fields=(*_HEADERS, "last-event-id", "x-deadline", "x-unknown"))
        yield from body_bombs(path, [Place("body", "", ""), Place("query", '{"n":')])


@attrs.frozen
class Service:
    """A service that is attacked.

    Attributes:
        command: What starts it, in the folder of the examples.
        address: Finds its port in what it prints when it serves.
        bombs: All requests that are drawn from.
        health: The path that is asked meanwhile.
    """

    command: Sequence[str]
    address: str
    bombs: Callable[[], _Bombs]
    health: str = "/health"


_PORT = ("--port", "0")
_AGENT = ("agent/agent.py", "--random", "--pages", "guide/n*.md", "--tokens", "2")
SERVICES = {
    "generate": Service(
        ("generate/serve.py", "--random-weights", "--layers", "2", *_PORT),
        r"listening on http://127\.0\.0\.1:(\d+)",
        _of_text,
    ),
    "agent": Service((*_AGENT, *_PORT), r"serving on port (\d+)", _of_agent),
    "dashboard": Service(
        (*_AGENT, "--dashboard", *_PORT),
        r"(?s)dashboard: http://127\.0\.0\.1:(\d+).*serving on",
        lambda: chain(_of_pages("/", "/page.js"), head_bombs("/events", "HEAD", fields=_HEADERS)),
        "/page.css",
    ),
    "serve_a_model": Service(("serve_a_model.py", *_PORT), r"serving on port (\d+)", _of_one_file),
    "server_sent_events": Service(
        ("server_sent_events.py", *_PORT), r"serving on port (\d+)", lambda: _of_pages("/"), "/"
    ),
    "page": Service(
        ("simulations/video.py", "--size", "64", *_PORT),
        r"open http://127\.0\.0\.1:(\d+)",
        lambda: chain(_of_pages("/"), head_bombs("/frame.png", "POST", fields=_HEADERS)),
        "/",
    ),
}


@attrs.define
class Report:
    """What came of it.

    Attributes:
        sent: Bombs that were sent.
        answers: Their statuses; 0 for a connection that ended without an answer.
        health: Seconds of each answer to the question for health.
        refused: Those that were not answered by 200.
        slowest: The longest answer to a bomb, in seconds, and its name.
    """

    sent: int = 0
    answers: Counter[int] = attrs.field(factory=Counter[int])
    health: list[float] = attrs.field(factory=list[float])
    refused: int = 0
    slowest: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        statuses = ", ".join(
            f"{count} × {status or 'closed'}" for status, count in sorted(self.answers.items())
        )
        return (
            f"{self.sent} bombs ({statuses}), health {len(self.health)} times: longest "
            f"{max(self.health):.3f} s, {self.refused} not 200; slowest bomb {self.slowest[0]:.2f} s: "
            f"{self.slowest[1]}"
        )


async def ask(port: int, data: bytes) -> int:
    """Send a request and read its answer to the end; return its status, or 0."""
    answer: bytes | bytearray = b""
    with trio.move_on_after(_PATIENCE):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(_send, stream, data)
            with suppress(trio.BrokenResourceError):
                async for part in stream:
                    answer = answer or part
            nursery.cancel_scope.cancel()
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    return int(found[1]) if found else 0


async def _send(stream: trio.SocketStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(data)


async def attack(port: int, health: str, bombs: Sequence[Callable[[], Bomb]]) -> Report:
    """Send bombs from several clients, and ask for health meanwhile and for a second after the last."""
    report, left = Report(), iter(bombs)
    question = f"GET {health} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()

    async def watch() -> None:
        while True:
            began = trio.current_time()
            status = await ask(port, question)
            report.health.append(trio.current_time() - began)
            report.refused += status != 200
            await trio.sleep(_EVERY)

    async def send() -> None:
        for make in left:
            bomb, began = make(), trio.current_time()
            report.answers[await ask(port, bomb.data)] += 1
            report.sent += 1
            report.slowest = max(report.slowest, (trio.current_time() - began, bomb.name))

    async with trio.open_nursery() as watching:
        watching.start_soon(watch)
        async with trio.open_nursery() as nursery:
            for _ in range(_CLIENTS):
                nursery.start_soon(send)
        await trio.sleep(1.0)
        watching.cancel_scope.cancel()
    return report


@contextmanager
def serving(service: Service, folder: str) -> Generator[int, None, None]:
    """Run a service, and find its port; it is ended by SIGTERM.

    Raises:
        RuntimeError: It has not started, or not ended within 40 s.
    """
    script, *options = service.command
    files = ("--folder", f"{folder}/agent") if script == "agent/agent.py" else ()
    command = (sys.executable, str(_EXAMPLES / script), *options, *files)
    environment = {**os.environ, "TRIO_ACCEL_BACKEND": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    environment["XDG_RUNTIME_DIR"] = folder
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as process:  # noqa: S603  # an example
        try:
            assert process.stdout is not None
            said, found = "", None
            while found is None and (line := process.stdout.readline()):
                said += line
                found = re.search(service.address, said)
            if found is None:
                raise RuntimeError(f"{script} has not started: {process.wait()}")
            yield int(found[1])
            process.terminate()
            process.communicate(timeout=40)
            if process.returncode:
                raise RuntimeError(f"{script} ended with {process.returncode}")
        finally:
            process.kill()


@contextmanager
def busy_loops(count: int) -> Generator[None, None, None]:
    """Keep processors busy."""
    with ExitStack() as stack:
        for _ in range(count):
            busy = stack.enter_context(subprocess.Popen((sys.executable, "-c", "while True: pass")))
            stack.callback(busy.kill)
        yield


def draw(service: Service, count: int, seed: int) -> list[Callable[[], Bomb]]:
    """Draw bombs of a service."""
    made: list[tuple[str, Callable[[], Bomb]]] = list(service.bombs())
    numbers = random.Random(seed)  # noqa: S311  # no secret
    return [make for _, make in numbers.sample(made, min(count, len(made)))]


def main(arguments: argparse.Namespace) -> int:
    """Attack each service, and print what came of it; returns 1 if one was held up for too long."""
    is_bad = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.services:
            service = SERVICES[name]
            bombs = draw(service, arguments.count, arguments.seed)
            with serving(service, folder) as port, busy_loops(arguments.loops):
                report = trio.run(attack, port, service.health, bombs)
            is_bad |= max(report.health) > LONGEST or report.refused > 0
            sys.stdout.write(f"{name}: {report}\n")
            sys.stdout.flush()
    return int(is_bad)


def options() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bombs")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=list(SERVICES))
    parser.add_argument("--count", type=int, default=100, help="bombs for each service")
    parser.add_argument("--loops", type=int, default=4, help="busy processes beside it")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(options()))
