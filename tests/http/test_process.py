"""A whole process that serves beside a worker: its end, its files and memory, and its health under attack."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from attacked import connect, get, post, read_all, status

TESTS = Path(__file__).parents[1]
CHUNKED = "Transfer-Encoding: chunked"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
]


@contextmanager
def process(kind: str = "starlette", grace: float = 10.0) -> Generator[tuple[subprocess.Popen[str], int]]:
    """Run the application in a process, and yield it and its port."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OPENBLAS_NUM_THREADS": "1"}
    command = (sys.executable, str(TESTS / "served.py"), kind, str(grace))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as served:
        try:
            assert served.stdout is not None
            yield served, int(served.stdout.readline())
        finally:
            served.kill()


async def exited(served: subprocess.Popen[str]) -> float:
    """Wait for the end of a process, and return the time."""
    with trio.fail_after(60):
        while served.poll() is None:  # noqa: ASYNC110  # another process has no event
            await trio.sleep(0.01)
    return time.monotonic()


BUSY = {
    "nothing": ([], 0.0, 1.5),
    "streams": (["/sse?n=40&s=0.1", "/sse?n=1000&s=60"], 4.0, 6.0),
    "no reader": (["/big"] * 20, 4.0, 6.0),
    "places": (["/hold"] * 300, 4.0, 6.0),
    "idle": (["/ping"] * 5, 0.0, 2.5),
}


@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
@pytest.mark.parametrize("busy", BUSY)
async def test_the_process_ends_within_the_grace(kind: str, busy: str, record_property: Any) -> None:
    paths, least, most = BUSY[busy]
    with process(kind, 6.0) as (served, port):
        streams = [await connect(port, get(path)) for path in paths]
        await trio.sleep(0.5)
        served.send_signal(signal.SIGTERM)
        began = time.monotonic()
        seconds = 0.0
        if busy == "streams":
            short, long = [await read_all(stream, 20) for stream in streams]
            assert short.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # whole
            assert not long.endswith(b"0\r\n\r\n")  # told
        seconds = await exited(served) - began
        assert served.returncode == 0
        record_property("seconds", seconds)
        print(f"{kind}, {busy}: exit after {seconds:.2f} s")
        assert least <= seconds <= most
        for stream in streams:
            await stream.aclose()
