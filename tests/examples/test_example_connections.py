"""HTTP connections: strangers, slow clients, duplicate lengths, and the streams of an example."""

from __future__ import annotations

import importlib
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from kept_connections import Asked, check_kept_connections
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from benchmarks.bombs import SERVICES, serving
from trio_accel.http import Limits, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CLOSE = GET[:-2] + b"Connection: close\r\n\r\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the examples are for Linux")


@asynccontextmanager
async def served(application: Starlette, **limits: Any) -> AsyncGenerator[int, None]:
    async with trio.open_nursery() as nursery:
        serving = partial(serve, application, port=0, signals=(), limits=Limits(**limits))
        yield await nursery.start(serving)
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


class Application(Starlette):
    """Answers with its input, and notes it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.left = trio.Event()
        super().__init__(
            routes=[
                Route("/", self.echo, methods=["GET", "POST"]),
                Route("/slow", self.slow),
                Route("/events", self.events),
                Route("/bug", self.bug),
            ]
        )

    async def echo(self, request: Request) -> PlainTextResponse:
        self.asked.append((request.method, await request.body()))
        return PlainTextResponse(b"said: " + self.asked[-1][1])

    async def slow(self, request: Request) -> PlainTextResponse:
        try:
            await trio.sleep_forever()
        finally:
            self.left.set()

    async def events(self, request: Request) -> StreamingResponse:
        async def make() -> AsyncGenerator[bytes, None]:
            for number in range(int(request.query_params["count"])):
                yield b"data: %d\n\n" % number
                await trio.lowlevel.checkpoint()

        return StreamingResponse(make(), media_type="text/event-stream")

    async def bug(self, request: Request) -> PlainTextResponse:
        raise ZeroDivisionError("a bug")


async def all_of(stream: trio.SocketStream) -> bytes:
    return b"".join([part async for part in stream])


async def told(port: int, data: bytes, *, is_open: bool = True) -> bytes:
    """The answers to a client until the server ends the connection."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(data)
        if not is_open:
            await stream.send_eof()
        return await all_of(stream)


def is_answered(response: bytes, body: bytes = b"said: ") -> bool:
    return response.startswith(b"HTTP/1.1 200 ") and response.endswith(b"\r\n\r\n" + body)


async def test_clients_that_send_headers_slowly_take_no_place(mock_clock: MockClock) -> None:
    application = Application()
    async with served(application) as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(300)]
        for stream in slow:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost")
        await wait_all_tasks_blocked(0.001)
        close = CLOSE
        assert is_answered(await told(port, close))
        # Another byte now and then gives them no more time.
        mock_clock.jump(4.0)
        with_more = slow[-10:]
        for stream in with_more:
            await stream.send_all(b":")
        await wait_all_tasks_blocked(0.001)
        mock_clock.jump(1.5)
        for stream in slow:
            with suppress(trio.BrokenResourceError):
                assert (await all_of(stream))[:13] in {b"", b"HTTP/1.1 408 "}
            await stream.aclose()
        assert application.asked == [("GET", b"")]


@pytest.mark.parametrize("chunked", [b"chunked", b"Chunked"])
async def test_a_request_with_two_lengths_ends_the_connection(chunked: bytes) -> None:
    application = Application()
    hidden = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
    request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: " + chunked
    async with served(application) as port:
        response = await told(port, request + b"\r\n\r\n0\r\n\r\n" + hidden)
    assert response == b"" or response.startswith(b"HTTP/1.1 400 ")
    assert response.count(b"HTTP/1.1") <= 1
    assert application.asked == []


BODIES = [
    b"Content-Length: 9\r\n\r\n",
    b"Content-Length: 99999\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
]


async def test_clients_that_send_bodies_slowly_are_closed_and_the_next_is_served(
    mock_clock: MockClock,
) -> None:
    application = Application()
    async with served(application) as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(200)]
        for number, stream in enumerate(slow):
            await stream.send_all(b"POST / HTTP/1.1\r\nHost: a\r\n" + BODIES[number % len(BODIES)])
        await wait_all_tasks_blocked(0.001)
        mock_clock.jump(4.0)
        for number, stream in enumerate(slow):
            await stream.send_all(b"1\r\nx\r\n" if b"chunked" in BODIES[number % len(BODIES)] else b"x")
        await wait_all_tasks_blocked(0.001)
        assert is_answered(await told(port, CLOSE))
        mock_clock.jump(1.5)
        for stream in slow:
            response = re.sub(rb"^HTTP/1\.1 100 .*?\r\n\r\n", b"", await all_of(stream), flags=re.DOTALL)
            assert response.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close\r\n" in response.lower()
            await stream.aclose()
        assert application.asked == [("GET", b"")]


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_client_that_reads_slowly_is_given_up(
    trickles: bool, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def large(request: Request) -> PlainTextResponse:
        return PlainTextResponse("x" * 20_000_000)

    caplog.set_level(logging.INFO)
    async with served(Starlette(routes=[Route("/", large)])) as port:
        caplog.clear()
        await wait_all_tasks_blocked(0.001)
        before = trio.lowlevel.current_statistics().tasks_living
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(GET)
            await wait_all_tasks_blocked(0.01)
            assert trio.lowlevel.current_statistics().tasks_living > before
            for _ in range(3):
                mock_clock.jump(4.0)
                await wait_all_tasks_blocked(0.01)
                if trickles:
                    await stream.receive_some(1000)
            await wait_all_tasks_blocked(0.01)
            assert trio.lowlevel.current_statistics().tasks_living == before
    assert caplog.records == []


POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
# A stranger's bytes, and the possible statuses of the answer, if there is one.
STRANGE = [
    (b"", b"408 503"),
    (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
    (POST + b"Content-Length: -1\r\n\r\n", b"400"),
    (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"400"),
    (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", b"501"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nz\r\n", b"400"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 70_000, b"400 413 431"),
    (POST + b"Content-Length: 9\r\n\r\nx", b"400"),
    (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n", b"400"),
    (b"GET /\r\n\r\n", b"400"),
    (b"GET http://127.0.0.1/nothing HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
    (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"200"),
    (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
    (bytes.fromhex("16030100c8010000c40303") + b"\xaa\r\n" * 60, b"400"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 65_536 + b"\r\n\r\n", b"400 431"),
    (b"\r\n" * 5000, b"400"),
]


@pytest.mark.parametrize(("data", "statuses"), STRANGE)
async def test_strange_requests_are_answered_or_closed_and_fill_no_log(
    data: bytes, statuses: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trio_accel.http")
    async with served(Application()) as port:
        caplog.clear()
        response = b""
        with trio.fail_after(60):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(data)
                    await stream.send_eof()
                    response = await all_of(stream)
        assert response == b"" or response.split()[1] in statuses.split()
        own = [record for record in caplog.records if record.name == "trio_accel.http"]
        assert len(own) <= 1
        assert all(record.levelno == logging.DEBUG and not record.exc_info for record in own)
        assert b" 200 " in await told(port, CLOSE)


async def test_an_upgrade_is_not_offered() -> None:
    upgrade = (
        b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    )
    async with served(Application()) as port:
        assert is_answered(await told(port, GET[:-2] + upgrade))
        # The client has shut its side down, which the service takes for its end.
        websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n\r\n"
        assert b" 101 " not in await told(port, GET[:-2] + websocket, is_open=False)
        http_2 = await told(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert http_2 == b"" or http_2.startswith((b"HTTP/1.1 505 ", b"HTTP/1.1 404 "))


async def test_strangers_write_no_tracebacks_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served(Application()) as port:
        caplog.clear()
        for data in (
            b"",
            b"\0" * 100,
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET /" + b"x" * 100_000,
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
            GET,
        ):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                # Ends by a reset, whatever is under way.
                linger = b"\1\0\0\0\0\0\0\0"
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(data)
                await wait_all_tasks_blocked(0.001)
        await wait_all_tasks_blocked(0.001)
        assert [record.message for record in caplog.records] == []
        # A bug of the application is one.
        await told(port, b"GET /bug HTTP/1.1\r\nHost: a\r\n\r\n")
    (record,) = caplog.records
    assert record.message == "GET /bug failed"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"])
async def test_a_stream_ends_its_connection(headers: bytes) -> None:
    data = b"GET /events?count=3 HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n"
    async with served(Application()) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(data)
        response = b""
        while not response.endswith(b"0\r\n\r\n"):
            response += await stream.receive_some()
        if headers:
            assert await all_of(stream) == b""
        else:
            # It is kept for the next request.
            await stream.send_all(GET)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
    assert b"data: 2" in response


async def test_a_client_that_leaves_ends_its_stream() -> None:
    async with served(Application()) as port:
        await wait_all_tasks_blocked(0.001)
        before = trio.lowlevel.current_statistics().tasks_living
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /events?count=1000000000 HTTP/1.1\r\nHost: a\r\n\r\n")
            await stream.receive_some(100)
            assert trio.lowlevel.current_statistics().tasks_living > before
        await wait_all_tasks_blocked(0.01)
        assert trio.lowlevel.current_statistics().tasks_living == before


async def test_a_leaving_client_cancels_its_begun_work() -> None:
    application = Application()
    async with served(application) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
            await wait_all_tasks_blocked(0.001)
        await application.left.wait()


async def test_a_connection_serves_requests_one_after_another() -> None:
    application = Application()
    chunks = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks += b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with (
        served(application) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        # Two at once, and a body that arrives in parts, after a while.
        await stream.send_all(GET + chunks[:70])
        await wait_all_tasks_blocked(0.001)
        await stream.send_all(chunks[70:])
        await wait_all_tasks_blocked(0.001)
        expected = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        await stream.send_all(expected)
        response = b""
        while b" 100 " not in response:
            response += await stream.receive_some()
        head = b"HEAD / HTTP/1.0\r\n\r\n"
        await stream.send_all(b"ok" + head)
        response += await all_of(stream)
    assert response.count(b"HTTP/1.1 200 ") == 4
    assert application.asked == [("GET", b""), ("POST", b"abcde"), ("POST", b"ok"), ("HEAD", b"")]
    assert response.endswith(b"\r\n\r\n")


async def test_the_end_waits_for_requests_and_not_for_idle_connections() -> None:
    go_on = trio.Event()

    async def wait(request: Request) -> PlainTextResponse:
        await go_on.wait()
        return PlainTextResponse("done")

    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(serve, Starlette(routes=[Route("/", wait)]), port=0))
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as idle,
            await trio.open_tcp_stream("127.0.0.1", port) as busy,
        ):
            await busy.send_all(GET)
            await wait_all_tasks_blocked(0.001)
            signal.raise_signal(signal.SIGTERM)
            assert await all_of(idle) == b""
            go_on.set()
            response = await all_of(busy)
    assert is_answered(response, b"done")
    assert b"connection: close" in response.lower()


KEPT = {
    "serve_a_model": [
        Asked(200, "POST", "/predict", "[3, 4]"),
        Asked(422, "POST", "/predict", "[3]"),
        Asked(404, "POST", "/nothing", "x" * 400),  # which is not read
        Asked(405, "GET", "/predict"),
        Asked(413, "POST", "/predict", "1" * 501),
        Asked(200, "GET", "/health"),
        Asked(200, "GET", "/ready"),
    ],
    "server_sent_events": [
        Asked(404, "GET", "/nothing"),
        Asked(405, "POST", "/", "x"),
        Asked(404, "PUT", "/nothing", "x" * 3000),
        Asked(200, "GET", "/"),
        Asked(404, "GET", "/health"),
    ],
}


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_kept_connections_of_the_smaller_examples(name: str, tmp_path: Path) -> None:
    with serving(SERVICES[name], str(tmp_path)) as port:
        check_kept_connections(port, KEPT[name], {"content-type": "application/json"})


@pytest.fixture
def events() -> Any:
    return importlib.import_module("server_sent_events")


async def test_events_match_the_computation(system: ta.System, events: Any) -> None:
    matrix = np.array([[2.0, 1.0], [1.0, 3.0]])
    async with system.open_device("cpu") as device:
        held = await device.put(matrix)

        async def answer(request: Request) -> Any:
            return events.Events(partial(events.eigenvalue, held))

        async with served(Starlette(routes=[Route("/", answer)])) as port:
            response = await told(port, CLOSE)
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    assert b"connection: close" in head.lower()
    assert b"content-length" not in head.lower()
    found = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    assert found[-1]["estimate"] == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-11)
    assert body.endswith(b"0\r\n\r\n")


async def test_a_source_waits_for_its_client_and_ends_with_it(events: Any) -> None:
    made, has_ended = 0, trio.Event()

    async def source(into: trio.MemorySendChannel[object]) -> None:
        nonlocal made
        try:
            while True:
                await into.send("x" * 10_000)
                made += 1
        finally:
            has_ended.set()

    async def answer(request: Request) -> Any:
        return events.Events(source)

    async with served(Starlette(routes=[Route("/", answer)])) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(CLOSE)
            # It fills the buffers of the kernel, which are some MiB, and then waits.
            await wait_all_tasks_blocked(0.01)
            before = made
            await wait_all_tasks_blocked(0.01)
            assert 0 < made == before
            for _ in range(100):
                await stream.receive_some(1 << 20)
            await wait_all_tasks_blocked(0.01)
            assert made > before
        await has_ended.wait()


async def test_a_quiet_stream_is_kept_alive(events: Any, mock_clock: MockClock) -> None:
    async def source(into: trio.MemorySendChannel[object]) -> None:
        async with into:
            await trio.sleep(40.0)
            await into.send(1)

    async def answer(request: Request) -> Any:
        return events.Events(source)

    async with (
        served(Starlette(routes=[Route("/", answer)])) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(CLOSE)
        for seconds in (15.0, 15.0, 10.0):
            await wait_all_tasks_blocked(0.001)
            mock_clock.jump(seconds)
        response = await all_of(stream)
    assert response.count(b": still here\n\n") == 2
    assert response.endswith(b"data: 1\n\n\r\n0\r\n\r\n")
