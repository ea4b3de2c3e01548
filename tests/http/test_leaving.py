"""A connection ends soon after its client, in each way in which a client may leave."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import pytest
import trio
from attacked import Seen, connect, get, make, post, read_all, serving, status, until_files
from trio.testing import wait_all_tasks_blocked

from trio_accel.http import Limits
from trio_accel.http._connection import Connection

# Starlette leaves the generator of a cancelled stream to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"
    ),
]

HOW = pytest.mark.parametrize("how", ["close", "reset", "shut"])
SOON = Limits(stall=0.3, wait=30.0, answer=60.0)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def leave(stream: trio.SocketStream, how: str) -> None:
    """Close the stream, reset it, or end only its sending side."""
    if how == "reset":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "shut":
        await stream.send_eof()
    else:
        await stream.aclose()


async def send_until_full(stream: trio.SocketStream, data: bytes) -> None:
    """Send until the server's buffers are full."""
    with trio.move_on_after(0.05):
        await stream.send_all(data)


@pytest.fixture
def app(seen: Seen) -> Any:
    """One framework is enough, because the edge decides here."""
    return make("starlette", seen)


@HOW
@pytest.mark.parametrize("count", [300, 4000])
async def test_requests_of_a_client_after_it_left_are_not_served(how: str, count: int) -> None:
    served = 0

    async def counts(scope: Any, receive: Any, send: Any) -> None:
        nonlocal served
        assert scope["type"] == "http"
        served += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 100})

    async with serving(counts, limits=SOON) as port:
        before = files()
        stream = await connect(port)
        await send_until_full(stream, get("/") * count)
        left = served
        await leave(stream, how)
        await until_files(before + (how == "shut"), 5)
        # A client that ends only its sending side may still read answers to all that it has sent.
        assert served < left + 50 or how == "shut"
        await stream.aclose()
        # Nothing is left that computes.
        used = time.process_time()
        # clock: the processor time of this process is measured, which other processes do not change
        await trio.sleep(0.2)
        assert time.process_time() - used < 0.1


@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize("last", [b"", b"GET /pi", post("/echo", b"abc")[:-1]], ids=["", "head", "body"])
async def test_a_client_that_ends_its_sending_side_gets_pipelined_answers(last: bytes, pause: float) -> None:
    """The end arrives with the requests, or while one of them is served."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        # clock: only so that the end arrives during an answer
        await trio.sleep(0.005)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    async with serving(slow, limits=Limits(stall=10.0, wait=30.0)) as port:
        before = files()
        asked = [post("/", b"<%03d>" % number) for number in range(10)]
        stream = await connect(port, b"".join(asked) + last)
        # clock: any moment will do
        await trio.sleep(pause)
        await stream.send_eof()
        found = await read_all(stream, 5)
        await until_files(before, 5)
    assert re.findall(rb"<\d+>", found) == [b"<%03d>" % number for number in range(10)]
    assert found.count(b"HTTP/1.1 200 ") == 10


async def test_the_last_pipelined_request_of_a_client_that_ends_its_side_is_answered(
    app: Any, seen: Seen
) -> None:
    async with serving(app, limits=Limits(stall=10.0, wait=30.0)) as port:
        stream = await connect(port, get("/ping") + get("/hold"))
        await seen.until(lambda them: them.running == 1)
        await stream.send_eof()
        await wait_all_tasks_blocked(0.01)
        seen.release.set()
        found = await read_all(stream, 5)
    assert found.endswith(b"released")
    assert found.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("data", [get("/slow") + get("/ping"), get("/ping") + get("/slow")])
@pytest.mark.parametrize("how", ["close", "shut"])
async def test_pipelined_answers_to_a_client_that_left_end_after_the_stall(
    app: Any, seen: Seen, data: bytes, how: str
) -> None:
    async with serving(app, limits=SOON) as port:
        before = files()
        stream = await connect(port, data)
        await seen.until(lambda them: them.running == 1)
        await leave(stream, how)
        assert await seen.until(lambda them: them.running == 0, 5) < 2
        await until_files(before + (how == "shut"), 5)
        await stream.aclose()
        assert (seen.cancelled, seen.served) == (1, 0)


@HOW
@pytest.mark.parametrize("path", ["/slow", "/sse?n=9&s=60"])
async def test_a_full_backlog_does_not_hide_that_the_client_has_left(
    app: Any, seen: Seen, how: str, path: str
) -> None:
    async with serving(app, limits=SOON) as port:
        before = files()
        stream = await connect(port, get(path))
        await seen.until(lambda them: them.running == 1)
        await send_until_full(stream, get("/ping") * 400_000)
        await leave(stream, how)
        assert await seen.until(lambda them: them.running == 0, 5) < 2
        await stream.aclose()
        await until_files(before, 5)
        assert seen.cancelled == 1


@pytest.mark.parametrize("path", ["/slow", "/sse?n=9&s=60", "/sse?n=9000&s=0.01"])
async def test_a_request_that_arrives_with_the_end_of_its_client_ends_soon(
    app: Any, seen: Seen, path: str
) -> None:
    async with serving(app, limits=SOON) as port:
        before = files()
        stream = await connect(port)
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        await stream.send_all(get(path))
        await stream.aclose()
        # The server accepts connections in order, so it has the one before when it answers here.
        assert await status(port, get("/ping")) == 200
        await seen.until(lambda them: them.running == 0, 5)
        await until_files(before, 5)
        assert seen.running == seen.served == 0


@HOW
async def test_work_after_an_answer_holds_no_descriptor(app: Any, seen: Seen, how: str) -> None:
    async with serving(app, limits=SOON) as port:
        before = files()
        for number in range(3):
            stream = await connect(port, get("/background"))
            await seen.until(lambda them, number=number: them.running == number + 1)
            await stream.receive_some()
            await leave(stream, how)
            await until_files(before + (how == "shut"), 5)
            await stream.aclose()
        assert seen.running == 3
        seen.release.set()
        await seen.until(lambda them: them.served == 3)


@pytest.mark.parametrize("line", [(), ("Connection: close",)])
async def test_work_after_an_answer_holds_no_idle_connection(
    app: Any, seen: Seen, line: tuple[str, ...]
) -> None:
    async with serving(app, limits=Limits(wait=0.2, stall=0.2)) as port:
        before = files()
        stream = await connect(port, get("/background", *line))
        await seen.until(lambda them: them.running == 1)
        # The client reads the end, and does not close its side.
        with trio.fail_after(10):
            while await stream.receive_some():
                pass
        await until_files(before + 1, 5)
        assert seen.running == 1
        await stream.aclose()
        seen.release.set()
        await seen.until(lambda them: them.served == 1)


@HOW
async def test_a_handler_that_cannot_be_cancelled_holds_no_descriptor(how: str) -> None:
    begun, release = trio.Event(), trio.Event()

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        begun.set()
        with trio.CancelScope(shield=True):
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async with serving(stubborn, limits=SOON) as port:
        before = files()
        stream = await connect(port, get("/"))
        await begun.wait()
        await leave(stream, how)
        await until_files(before + (how == "shut"), 5)
        await stream.aclose()
        release.set()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET",
        b"\r\n",
        get("/ping")[:-2],
        get("/ping"),
        get("/ping") * 3 + b"GET /p",
        post("/echo", b"x" * 100)[:-1],
        post("/echo", b"x" * 100_000, "Expect: 100-continue")[:-1],
        get("/echo", "Transfer-Encoding: chunked") + b"5\r\nabc",
        get("/echo", "Transfer-Encoding: chunked") + b"5\r\nabcde\r\n0\r\n",
        get("/big"),
        get("/sse?n=90000&s=0.001"),
        get("/sse?n=1&s=60"),
        get("/slow"),
        get("/hold") * 3,
        get("/background"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + b"\0\0\4\x08\0\0\0\0\0\0\0\0\0" * 50,
        get("/ping", "Connection: upgrade", "Upgrade: websocket"),
        get("/ping", "X: " + "y" * 100_000),
        post("/echo", b"x" * 3_000_000),
    ],
)
async def test_descriptors_of_clients_are_released(app: Any, seen: Seen, data: bytes) -> None:
    """Each request, left in each way at once and after a moment, and also by silent clients."""
    limits = Limits(stall=0.2, wait=0.3, answer=0.4)
    async with serving(app, limits=limits) as port:
        before, kept = files(), []
        for how in ("close", "reset", "shut", "silent"):
            for pause in (0.0, 0.01):
                stream = await connect(port)
                await send_until_full(stream, data)
                # clock: any moment will do
                await trio.sleep(pause)
                if how != "silent":
                    with suppress(trio.BrokenResourceError):
                        await leave(stream, how)
                if how in {"shut", "silent"}:
                    kept.append(stream)
        is_endless = b"/sse" in data
        await until_files(before + len(kept) + 2 * is_endless, 8)
        for stream in kept:
            await trio.aclose_forcefully(stream)
        await until_files(before, 8)
        seen.release.set()
        assert await status(port, get("/ping")) == 200


@pytest.mark.parametrize(("stall", "expected"), [(10.0, (5, 3, 10_000)), (1e9, (16_384, 8192, 32_767_000))])
async def test_the_kernel_gives_up_a_vanished_machine(stall: float, expected: tuple[int, int, int]) -> None:
    """Such a machine ends no connection, so only the kernel can notice it."""

    async def no_answer(connection: Connection, head: bytes) -> None:
        return None

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()
    async with listener, await trio.open_tcp_stream(*address), await listener.accept() as stream:
        Connection(stream, stall, lambda status, text: {}, 5.0, no_answer)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        found = [stream.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert tuple(found) == expected
