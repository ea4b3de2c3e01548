"""Attacks of rude clients on `trio_accel.http`, which others do not notice."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import trio
from attacked import Seen, ask, connect, get, post, read_all, serving, status, until_files
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_accel.http import Limits

# Starlette leaves the generator of a cancelled stream to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"
    ),
]

CHUNKED = "Transfer-Encoding: chunked"
REMEDIES = {
    431: "the headers must have at most 16384 bytes",
    505: "speak HTTP/1.1: HTTP/2 and WebSockets are not served",
}


async def test_kept_connections_serve_any_number_of_requests(app: Any) -> None:
    async with serving(app) as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for number in range(120):
            for path, body, expected in (
                ("/ping", None, 200),
                ("/nothing", None, 404),
                ("/echo", b"x" * 100, 200),
                ("/ping", b"x" * 100, 200),  # which is not read
                ("/nothing", b"y" * 3000, 404),
            ):
                answer = await client.request("GET" if body is None else "POST", path, content=body)
                assert (answer.status_code, number) == (expected, number)
                assert "connection" not in answer.headers
                if path == "/echo":
                    assert answer.content == body


async def test_pipelined_requests_are_all_answered_in_their_order(app: Any) -> None:
    async with serving(app) as port:
        asked = [post("/echo", b"%03d" % number) for number in range(50)]
        found = await ask(port, b"".join(asked) + get("/ping", "Connection: close"))
    assert found.count(b"HTTP/1.1 200 ") == 51
    places = [found.index(b"\r\n\r\n%03d" % number) for number in range(50)]
    assert places == sorted(places)


async def test_probes_are_answered_in_order_without_much_work(app: Any, seen: Seen, system: Any) -> None:
    """Between other requests, by each method, until the connection ends."""
    last = get("/ready", "Connection: close", "User-Agent: x/1 (y)")
    asked = [
        get("/health") * 100,
        post("/echo", b"abc"),
        get("/health").replace(b"GET", b"HEAD"),
        get("/health?verbose=1"),
        get("/nothing"),
        get("/health", "Content-Length: 0"),
        post("/health", b""),
        last,
        get("/ping"),
    ]
    async with serving(app, system=system) as port:
        found = await ask(port, b"".join(asked))
    answers = found.split(b"HTTP/1.1 ")[1:]
    assert [int(answer.split()[0]) for answer in answers] == [200] * 103 + [404, 200, 404, 200]
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    assert {json.loads(body)["status"] for body in bodies[:100]} == {"alive"}
    assert bodies[100] == b"abc"
    assert bodies[101] == b""
    assert f"content-length: {len(bodies[0])}".encode() in answers[101]
    assert json.loads(bodies[102])["status"] == json.loads(bodies[104])["status"] == "alive"
    assert json.loads(bodies[-1]) == {"status": "ready"}
    assert [b"connection: close" in answer for answer in answers] == [False] * 106 + [True]


@pytest.mark.parametrize("data", [get("/health") * 100, get("/echo", CHUNKED) + b"1\r\nx\r\n" * 1000])
async def test_a_small_request_makes_few_steps_of_the_loop(app: Any, system: Any, data: bytes) -> None:
    """A client cannot take the loop from others by a few kilobytes."""

    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    async with serving(app, system=system) as port:
        last = b"0\r\n\r\n" if b"echo" in data else b""
        await ask(port, data[:200] + get("/ping", "Connection: close"))
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        await ask(port, data + last + get("/ping", "Connection: close"))
        trio.lowlevel.remove_instrument(steps)
    assert steps.count < 500


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (post("/echo", b"", CHUNKED) + b"0\r\n\r\n" + get("/ping"), 400),
        (post("/echo", b"abcd", "Content-Length: 5"), 400),
        (get("/ping", "X: " + "y" * 200_000), 431),
        (get("/ping", "X: a", " b"), 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", 505),
        (
            get(
                "/ping",
                "Connection: upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
                "Sec-WebSocket-Version: 13",
            ),
            505,
        ),
        (get("/ping", version="9.9"), 505),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3\r\n\r\n", 400),
        (b"\r\n" * 5000, 400),
        (get("/echo", CHUNKED) + b"zz\r\n" + get("/ping"), 400),
        (get("/echo", CHUNKED) + b"1\r\nx\r\n" * 10_000, 413),
        (get("/echo", CHUNKED) + b"5\r\nabcdeXX0\r\n\r\n", 400),
        (post("/echo", b"")[:-2] + b"Expect: 100-continue\r\n\r\n" + get("/ping", version="2.0"), 505),
    ],
)
async def test_a_request_is_refused_and_ends_its_connection(app: Any, data: bytes, expected: int) -> None:
    async with serving(app) as port:
        found = await ask(port, data)
        answers = [int(part.split()[0]) for part in found.split(b"HTTP/1.1 ")[1:] if part[:3] != b"100"]
        assert answers[-1] == expected
        # No second request is seen where the first one is not what it seems.
        assert answers[:-1] == ([200] if b"Expect" in data else [])
        head, _, body = found.rpartition(b"\r\n\r\n")
        assert b"connection: close" in head
        if expected in REMEDIES:
            assert json.loads(body) == {"error": REMEDIES[expected]}
        assert await status(port, get("/ping")) == 200


async def test_an_offer_of_http_2_is_ignored(app: Any) -> None:
    """As Java's HTTP client and `curl --http2` make it with each request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    async with serving(app) as port:
        last = get("/ping", *offer).replace(b"Connection: ", b"Connection: close, ")
        found = await ask(port, get("/ping", *offer) + post("/echo", b"abc", *offer) + last)
    assert found.count(b"HTTP/1.1 200 ") == found.count(b"HTTP/1.1 ") == 3
    assert b"upgrade" not in found.lower()
    assert b"\r\n\r\nabc" in found


async def test_a_path_of_http_2_ends_nothing(app: Any) -> None:
    """Which ends `hypercorn.trio.serve`."""
    config = pytest.importorskip("h2.config").H2Configuration(
        header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
    )
    made = pytest.importorskip("h2.connection").H2Connection(config)
    made.initiate_connection()
    head = [(b":method", b"GET"), (b":path", b"/\xff\xfe"), (b":scheme", b"http"), (b":authority", b"a")]
    made.send_headers(1, head, end_stream=True)
    async with serving(app) as port:
        assert b" 505 " in await ask(port, made.data_to_send())
        assert await status(port, get("/ping")) == 200


async def test_slow_headers_end_and_hold_up_nobody(app: Any) -> None:
    async with serving(app, limits=Limits(wait=3.0)) as port:
        slow = [await connect(port, b"GET /ping HTTP/1.1\r\nHost: a\r\nX") for _ in range(300)]
        for stream in slow[:10]:
            await stream.send_all(b"y")
        with trio.fail_after(60):
            assert await status(port, get("/ping")) == 200
        for stream in slow:
            assert await read_all(stream) == b""


async def test_slow_bodies_are_refused(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(wait=0.3)) as port:
        begun = post("/echo", b"x" * 100)[:-50]
        slow = [await connect(port, begun) for _ in range(100)]
        assert await status(port, get("/ping")) == 200
        for stream in slow:
            assert b"HTTP/1.1 408 " in (answer := await read_all(stream))
            assert answer.endswith(b'{"error": "the body must arrive within 0.3 s"}')
        assert seen.most == 0


async def test_large_bodies_are_refused_and_leave_nothing(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(body=1000, bodies=5000)) as port:
        before = len(os.listdir("/proc/self/fd"))
        for data in (
            post("/ping", b"x" * 3_000_000),
            post("/echo", b"x" * 1001),
            get("/echo", CHUNKED) + b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n",
        ):
            assert b"HTTP/1.1 413 " in (answer := await ask(port, data))
            assert answer.endswith(b'{"error": "the body must have at most 1000 bytes"}')
        assert (await ask(port, post("/echo", b"x" * 1000, "Connection: close"))).endswith(
            b"\r\n\r\n" + b"x" * 1000
        )
        assert seen.most == 1
        await until_files(before)


async def test_bodies_together_have_a_limit(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(body=1000, bodies=2500)) as port:
        held = [await connect(port, post("/slow", b"x" * 1000)) for _ in range(2)]
        await seen.until(lambda them: them.running == 2)
        refused = await ask(port, post("/echo", b"x" * 1000))
        assert b"HTTP/1.1 503 " in refused
        assert b"retry-after: 1" in refused
        for stream in held:
            await stream.aclose()
        await seen.until(lambda them: them.running == 0)
        assert await status(port, post("/echo", b"x" * 1000)) == 200


@pytest.mark.parametrize("size", [100, 9000])
async def test_unfinished_bodies_do_not_keep_others_out(app: Any, seen: Seen, size: int) -> None:
    """The largest unfinished body is dropped first, and bodies of running requests stay."""
    limits = Limits(body=10_000, bodies=640_000, wait=60.0)
    async with serving(app, limits=limits) as port:
        running = await connect(port, post("/slow", b"x" * 9500))
        await seen.until(lambda them: them.running == 1)
        unfinished = [await connect(port, post("/echo", b"x" * 10_000)[:-1]) for _ in range(66)]
        for _ in range(20):
            answer = await ask(port, post("/echo", b"y" * size, "Connection: close"))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"\r\n\r\n" + b"y" * size)
        assert seen.running == 1
        found = [await read_all(stream) for stream in unfinished[:3]]
        for part in found:
            assert part.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in part
        # Others are not refused without need.
        await unfinished[-1].send_all(b"x")
        assert b" 200 " in await unfinished[-1].receive_some()
        for stream in (*unfinished[3:], running):
            await stream.aclose()


async def test_clients_that_do_not_read_are_disconnected(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(stall=0.2)) as port:
        deaf = [await connect(port, get("/big")) for _ in range(20)]
        assert await status(port, get("/ping")) == 200
        # On a busy machine the first ones are disconnected before the last ones are served.
        await seen.until(lambda them: them.cancelled == 20)
        assert (seen.running, seen.served) == (0, 0)
        for stream in deaf:
            await stream.aclose()


@pytest.mark.parametrize(
    "data",
    [
        get("/sse?n=1000&s=60"),
        get("/slow"),
        post("/slow", b"abc"),
        get("/slow", CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n",
        get("/slow") + b"GET /pi",
    ],
    ids=["stream", "get", "post", "chunks", "begun"],
)
@pytest.mark.parametrize("how", ["close", "reset", "shut"])
async def test_a_client_that_leaves_cancels_its_request(app: Any, seen: Seen, data: bytes, how: str) -> None:
    async with serving(app) as port:
        stream = await connect(port, data)
        await seen.until(lambda them: them.running == 1)
        if how == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "shut":
            await stream.send_eof()
        else:
            await stream.aclose()
        assert await seen.until(lambda them: them.running == 0) < 0.2
        assert (seen.cancelled, seen.served) == (1, 0)
        await stream.aclose()


async def test_requests_after_an_answer_continue_when_the_client_leaves(app: Any, seen: Seen) -> None:
    async with serving(app) as port:
        assert await status(port, get("/background")) == 200
        await seen.until(lambda them: them.running == 1)
        # The next request of a connection does not wait for it.
        async with await connect(port, get("/background") + get("/ping")) as stream:
            found = b""
            while found.count(b"HTTP/1.1 200 ") < 2:
                found += await stream.receive_some()
        await seen.until(lambda them: them.running == 2)
        seen.release.set()
        await seen.until(lambda them: them.served == 2)
        assert seen.cancelled == 0


async def test_work_after_an_answer_ends_next_to_the_next_request(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(stall=0.1)) as port:
        stream = await connect(port, get("/background") + get("/slow"))
        await seen.until(lambda them: them.running == 2)
        seen.release.set()
        await seen.until(lambda them: them.served == 1)
        # A third request does not hide that the client leaves the second one.
        await stream.send_all(get("/ping"))
        await stream.aclose()
        await seen.until(lambda them: them.running == 0, 5)
        assert (seen.served, seen.cancelled) == (1, 1)


async def test_a_client_that_reads_a_large_answer_slowly_gets_all_of_it(mock_clock: MockClock) -> None:
    size, done = 20_000_000, trio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})
        done.set()

    async with serving(large, limits=Limits(stall=10)) as port:
        stream, taken = await connect(port, get("/", "Connection: close")), 0
        # In one part, it takes many times the limit.
        for _ in range(6):
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(6)
            until = taken + 2_000_000
            while taken < until:
                part = await stream.receive_some(until - taken)
                assert part, "the answer was cut"
                taken += len(part)
        assert not done.is_set()
        while part := await stream.receive_some():
            taken += len(part)
        assert taken > size
        await stream.aclose()


async def test_all_errors_have_the_form_that_the_service_gives(
    app: Any, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    async def raises(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/raise":
            raise ZeroDivisionError
        await app(scope, receive, send)

    def error_body(status: int, text: str) -> dict[str, object]:
        return {"told": [status, text]}

    limits = Limits(body=1000, bodies=2500, requests=2, wait=0.3, answer=0.3)
    async with serving(raises, limits=limits, error_body=error_body) as port:

        async def told(data: bytes) -> list[Any]:
            answer = await ask(port, data)
            found: list[Any] = json.loads(answer.rpartition(b"\r\n\r\n")[2])["told"]
            assert int(answer.split()[1]) == found[0]
            assert (b"retry-after: 1" in answer) == (found[0] == 503)
            return found

        last = "Connection: close"
        assert await told(post("/echo", b"x" * 9)[:-1]) == [408, "the body must arrive within 0.3 s"]
        assert await told(post("/echo", b"x" * 1001)) == [413, "the body must have at most 1000 bytes"]
        assert await told(get("/slow", last)) == [504, "the deadline has passed"]
        assert await told(get("/slow", last, "X-Deadline: soon")) == [
            400,
            "x-deadline must be seconds, such as 1.5, got 'soon'",
        ]
        assert await told(get("/raise", last)) == [500, "internal server error"]
        assert await told(get("/ping", "X: " + "y" * 20_000)) == [431, REMEDIES[431]]
        assert await told(get("/ping", version="9.9")) == [505, REMEDIES[505]]
        held = [await connect(port, get("/hold")) for _ in range(2)]
        await seen.until(lambda them: them.running == 2)
        assert await told(get("/ping", last)) == [503, "too many requests"]
        late = [await connect(port, post("/echo", b"x" * 1000)[:-1]) for _ in range(2)]
        assert await told(post("/echo", b"x" * 1000)) == [
            503,
            "the bodies of all requests are too large: try again",
        ]
        for stream in (*held, *late):
            await stream.aclose()
    assert [record.message for record in caplog.records] == ["GET /raise failed"]
    caplog.clear()


async def test_requests_beyond_the_places_are_refused(app: Any, seen: Seen, system: Any) -> None:
    async with serving(app, system=system) as port:
        streams = [await connect(port, get("/hold", "Connection: close")) for _ in range(400)]
        await seen.until(lambda them: them.running == 256)
        assert await status(port, get("/health")) == 200
        assert await status(port, get("/ping")) == 503
        seen.release.set()
        answers = [await read_all(stream) for stream in streams]
    statuses = [int(answer.split()[1]) for answer in answers]
    assert {each: statuses.count(each) for each in set(statuses)} == {200: 256, 503: 144}
    assert all(b"retry-after: 1" in answer for answer in answers if b" 503 " in answer)
    assert seen.most == 256


@pytest.mark.parametrize("path", ["/sse?n=1000&s=60", "/slow", "/hold"])
async def test_places_come_back_when_their_clients_leave(app: Any, seen: Seen, path: str) -> None:
    async with serving(app, limits=Limits(requests=4)) as port:
        for number in (1, 2):
            streams = [await connect(port, get(path)) for _ in range(4)]
            await seen.until(lambda them: them.running == 4)
            assert await status(port, get("/ping")) == 503
            for stream in streams:
                await stream.aclose()
            assert await seen.until(lambda them: them.running == 0) < 0.2
            assert (seen.cancelled, seen.served) == (4 * number, 0)
            assert await status(port, get("/ping")) == 200


async def test_an_answer_has_a_deadline(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(answer=0.2)) as port:
        assert await status(port, get("/slow")) == 504
        assert seen.cancelled == 1
        # A begun stream continues, unless its client asks for its end.
        assert (await ask(port, get("/sse?n=6&s=0.05", "Connection: close"))).count(b"data:") == 7
        cut = await ask(port, get("/sse?n=1000&s=0.05", "X-Deadline: 0.1"))
        assert cut.startswith(b"HTTP/1.1 200 ")
        assert not cut.endswith(b"0\r\n\r\n")
    async with serving(app) as port:
        for given in ("0.05", "0"):
            assert await status(port, get("/slow", f"X-Deadline: {given}")) == 504
        for given in ("soon", "-1", "nan", "1e3", "\xff"):
            assert (
                await status(
                    port,
                    get("/slow", "X-Deadline: ").replace(b": \r", b": " + given.encode("latin1") + b"\r"),
                )
                == 400
            )


@pytest.mark.parametrize(("path", "expected"), [("/boom", 500), ("/boom_late", 200), ("/bad_length", 200)])
async def test_an_error_affects_only_its_client(
    app: Any, path: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(app) as port:
        found = await ask(port, get(path, "Connection: close"))
        assert int(found.split()[1]) == expected
        # A begun answer without a possible end is visibly cut: by its length, or without the last chunk.
        assert not found.endswith(b"0\r\n\r\n")
        assert await status(port, get("/ping")) == 200
    assert [record.message for record in caplog.records] == [f"GET {path} failed"]
    caplog.clear()


async def test_text_that_cannot_be_sent_is_a_500(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(app) as port:
        assert await status(port, post("/text", b'"\\ud800"')) == 500
        assert await status(port, get("/%ED%A0%80")) == 404
        assert await status(port, get("/ping")) == 200
    caplog.clear()


async def test_idle_connections_make_room_for_newcomers(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(connections=8)) as port:
        busy = await connect(port, get("/slow"))
        await seen.until(lambda them: them.running == 1)
        idle = [await connect(port) for _ in range(13)]
        with trio.fail_after(60):
            assert await status(port, get("/ping")) == 200
        # The first ones were closed, the last ones are served.
        assert await read_all(idle[0]) == b""
        await idle[-1].send_all(get("/ping", "Connection: close"))
        assert b" 200 " in await read_all(idle[-1])
        assert seen.running == 1
        for stream in (*idle, busy):
            await stream.aclose()


async def test_connections_with_requests_have_a_limit_too(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(connections=4)) as port:
        busy = []
        for number in range(8):
            busy.append(await connect(port, get("/slow")))
            await seen.until(lambda them, number=number: them.running == number + 1)
        assert await ask(port, get("/ping")) == b""
        await busy[0].aclose()
        # Its place is free a moment after its request has ended.
        with trio.fail_after(60):
            while await ask(port, get("/ping", "Connection: close")) == b"":  # noqa: ASYNC110  # no event
                await trio.sleep(0.01)
        for stream in busy:
            await stream.aclose()


RUDE = [
    b"",
    b"GET",
    get("/ping"),
    get("/big"),
    post("/echo", b"x" * 100)[:-97],
    get("/sse?n=5&s=0.01"),
    get("/boom_late"),
    get("/echo", CHUNKED) + b"5\r\nabcde\r\nzz",
    get("/echo", CHUNKED) + b"5\r\nabcde\r\nzz\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    get("/%ff%ed%a0%80"),
    b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
    get("/ping", "Upgrade: websocket", "Connection: upgrade"),
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    get("/big").replace(b"GET", b"HEAD"),
    get("/ping", "Expect: 100-continue", "Content-Length: 3"),
    get("/big") * 5,
    get("/ping", "X: " + "y" * 20_000),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3",
]


async def be_rude(port: int, rounds: int) -> None:
    """Leave at bad moments."""
    for number in range(rounds):
        for data in RUDE:
            stream = await connect(port, data)
            if number % 3 == 1:
                # clock: any moment will do
                await trio.sleep(0.003)
            with suppress(trio.BrokenResourceError):
                if number % 3 == 2:
                    await stream.send_eof()
                if number % 2:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.aclose()


@pytest.mark.parametrize("rounds", [6, pytest.param(480, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_rude_clients_leave_nothing_behind(
    app: Any, seen: Seen, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    # A connection that waited would stay for a minute.
    async with serving(app, limits=Limits(wait=60.0)) as port:
        await be_rude(port, 1)
        assert await status(port, get("/ping")) == 200
        before = len(os.listdir("/proc/self/fd"))
        await be_rude(port, rounds)
        assert await status(port, get("/ping")) == 200
        await seen.until(lambda them: them.running == 0)
        await until_files(before)


@pytest.mark.parametrize("size", [1 << 30, 1000])
async def test_a_client_that_ends_during_a_refusal_is_not_an_error(
    app: Any, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(app, limits=Limits(body=100)) as port:
        for _ in range(20):
            stream = await connect(port, post("/echo", b"")[:-2].replace(b" 0", b" %d" % size) + b"\r\n")
            await stream.send_eof()
            await read_all(stream)
        assert await status(port, get("/ping")) == 200
    assert caplog.records == []


async def test_an_application_that_does_not_answer_is_a_500() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/head":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/wrong":
            await send({"type": "http.response.early"})

    async with serving(silent) as port:
        for path in ("/", "/head", "/wrong"):
            assert await status(port, get(path)) == 500


async def test_the_application_learns_of_the_end() -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        first, begun = await receive(), {"type": "http.response.start", "status": 200, "headers": []}
        assert first == {"type": "http.request", "body": b"abc", "more_body": False}
        await send(begun)
        await send({"type": "http.response.body", "body": b"x"})
        told.append((await receive())["type"])

    async with serving(app) as port:
        assert (await ask(port, post("/", b"abc", "Connection: close"))).endswith(b"x\r\n0\r\n\r\n")
    assert told == ["http.disconnect"]
