"""Bytes of a client are cut into requests as h11 cuts them, and harmful ones do not reach it."""

from __future__ import annotations

import itertools
import time

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.http._framing import Framing, RefusedError

HEAD = b"POST /a HTTP/1.1\r\nHost: a\r\n"

bodies = st.binary(max_size=300)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A correct request, with any body."""
    body = draw(bodies)
    line = draw(st.sampled_from([b"\r\n", b"\n"]))
    more = draw(st.sampled_from([b"", b"X: \t  y  z \r\n", b"Upgraded: TLS/1.0\r\n", b"a:\r\n"]))
    head = HEAD + more
    form = draw(st.sampled_from(["none", "length", "chunks"]))
    if form == "none":
        return head.replace(b"\r\n", line) + line
    if form == "length":
        name = draw(st.sampled_from([b"Content-Length:", b"content-length:  "]))
        return (head + name + b"%d\r\n\r\n" % len(body)).replace(b"\r\n", line) + body
    chunks = [body[i : i + 37] for i in range(0, len(body), 37)]
    extension = draw(st.sampled_from([b"", b";a=b", b" "]))
    sent = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    trailers = draw(st.sampled_from([b"", b"t: u\r\n"]))
    return head + b"Transfer-Encoding: Chunked\r\n\r\n" + sent + b"0\r\n" + trailers + b"\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def take_all(framing: Framing, parts: list[bytes]) -> list[bytes]:
    """The requests taken after each part was fed, joined."""
    found = [b""]
    for part in parts:
        framing.feed(part)
        while taken := framing.take():
            found[-1] += taken
            if framing.is_between:
                found.append(b"")
    return found


def body_by_h11(request: bytes) -> bytes:
    connection, body = h11.Connection(h11.SERVER), b""
    connection.receive_data(request)
    while type(event := connection.next_event()) is not h11.EndOfMessage:
        assert event is not h11.NEED_DATA
        body += bytes(getattr(event, "data", b""))
    assert connection.trailing_data[0] == b""
    return body


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(0, 1200), max_size=8))
def test_each_request_arrives_separately_and_unchanged(asked: list[bytes], places: list[int]) -> None:
    *found, rest = take_all(Framing(), cut(b"".join(asked), places))
    assert (found, rest) == (asked, b"")
    for request in asked:
        body_by_h11(request)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_other_bytes_are_refused_or_have_the_end_that_h11_finds(data: bytes, places: list[int]) -> None:
    """With h11 as the judge of any bytes after a request line."""
    try:
        *found, _ = take_all(Framing(), cut(HEAD + data, places))
    except RefusedError:
        return
    for request in found[:1]:
        try:
            body_by_h11(request)
        except h11.RemoteProtocolError:
            return


@given(st.lists(requests(), min_size=2, max_size=2), st.integers(0, 600), st.sampled_from([b"\n", b"\r\n"]))
def test_a_blank_line_before_a_request_is_ignored(asked: list[bytes], place: int, blank: bytes) -> None:
    *found, rest = take_all(Framing(), cut(b"".join(blank + request for request in asked), [place]))
    assert (found, rest) == (asked, b"")


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://b/x?y=1", b"/x?y=1", b"b"),
        (b"HTTPS://b:80/http://c/", b"/http://c/", b"b:80"),
        (b"http://b", b"/", b"b"),
        (b"http://b?y", b"/?y", b"b"),
        (b"http://b\\1/", b"/", b"b\\1"),
        (b"http:///x", b"/x", b""),
        (b"/http://b/x", b"/http://b/x", b"a"),
        (b"*", b"*", b"a"),
        (b"ftp://b/x", b"ftp://b/x", b"a"),
        (b"http:/b/x", b"http:/b/x", b"a"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_host_of_a_target_is_the_host(target: bytes, path: bytes, host: bytes, end: bytes) -> None:
    found, rest = take_all(
        Framing(), [end.join([b"GET %b HTTP/1.1" % target, b"hOst: a", b"X: host: a", b"", b""])]
    )
    assert rest == b""
    assert body_by_h11(found) == b""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(found)
    request = connection.next_event()
    assert isinstance(request, h11.Request)
    assert (request.target, list(request.headers)) == (path, [(b"host", host), (b"x", b"host: a")])


def test_the_host_of_a_target_does_not_grow_the_headers() -> None:
    asked = b"GET http://" + b"a" * 8000 + b"/ HTTP/1.1\r\n" + b"Host:\r\n" * 1000 + b"\r\n"
    found, _ = take_all(Framing(), [asked])
    assert len(found) <= len(asked)
    with pytest.raises(h11.RemoteProtocolError, match="multiple Host"):
        body_by_h11(found)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Content-Length: 4\r\nContent-Length: 5\r\n", 400),
        (b"Content-Length: 4, 4\r\n", 400),
        (b"Content-Length: -1\r\n", 400),
        (b"Content-Length: " + b"9" * 17 + b"\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 501),
        (b"X: a\r\n b\r\n", 400),
        (b"X: a\0\r\n", 400),
        (b"X: a\rb\r\n", 400),
        (b"X: a\x0b\r\n", 400),
        (b"X: " + b"y" * (16 << 10) + b"\r\n", 431),
        (b"uPGRADE:WebSocket\r\n", 505),
        (b"Upgrade: h2c, websocket\r\n", 505),
    ],
)
def test_headers_are_refused(lines: bytes, status: int) -> None:
    for parts in ([HEAD + lines + b"\r\n"], [bytes([byte]) for byte in HEAD + lines + b"\r\n"]):
        with pytest.raises(RefusedError) as refused:
            take_all(Framing(), parts)
        assert refused.value.status == status


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize(
    ("offer", "kept"),
    [
        ([b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"], []),
        ([b"upgrade:h2c", b"connection:upgrade", b"connection:close ,upgrade"], [b"connection: close"]),
        ([b"HTTP2-Settings: a", b"Connection: keep-alive"], [b"Connection: keep-alive"]),
        ([b"Upgrade: TLS/1.0, h2c", b"UPGRADE: h2c", b"Connection:,"], []),
        ([b"X-Upgrade: h2c", b"Connection:  a ,b"], [b"X-Upgrade: h2c", b"Connection:  a ,b"]),
    ],
)
def test_an_offer_of_another_protocol_is_removed(offer: list[bytes], kept: list[bytes], end: bytes) -> None:
    def request(lines: list[bytes]) -> bytes:
        return end.join([HEAD[:-2].replace(b"\r\n", end), *lines, b"content-length: 3", b"", b"abc"])

    for parts in ([request(offer)], [bytes([byte]) for byte in request(offer)]):
        [found, rest] = take_all(Framing(), parts)
        assert (found.replace(b"\r\n", end), rest) == (request(kept), b"")
        assert body_by_h11(found) == b"abc"


@pytest.mark.parametrize("line", [b"GET / HTTP/2.0", b"PRI * HTTP/2.0", b"GET / HTTP/9.9", b"GET / HTTP/0.9"])
def test_other_versions_are_refused(line: bytes) -> None:
    framing = Framing()
    framing.feed(line + b"\r\nHost: a\r\n\r\n")
    with pytest.raises(RefusedError) as refused:
        framing.take()
    assert refused.value.status == 505


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n",
        b"-1\r\nx",
        b"5\n",
        b"1" * 300,
        b"1;" + b"x" * 300 + b"\r\n",
        b"1\r\nx\r\n" * 2000,
        b"0\r\nx:" + b" " * 9000 + b"\0\r\n\r\n",
    ],
)
def test_chunks_are_refused(chunks: bytes) -> None:
    with pytest.raises(RefusedError):
        take_all(Framing(), [HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks])


def test_large_chunks_are_not_too_many() -> None:
    sent = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(3000)) + b"0\r\n\r\n"
    request = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + sent
    assert take_all(Framing(), cut(request, list(range(0, len(request), 60_000)))) == [request, b""]


@pytest.mark.parametrize("size", [1 << 18, 1 << 20])
@pytest.mark.parametrize("byte", [b" ", b"\n ", b"\t"])
def test_spaces_cost_their_size(size: int, byte: bytes) -> None:
    """h11 would take minutes for a quarter of a megabyte."""
    framing = Framing()
    began = time.process_time()
    with pytest.raises(RefusedError):
        take_all(framing, [HEAD + b"X: a" + byte * size + b"\0\r\n\r\n"])
    assert time.process_time() - began < 1.0


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.lists(st.integers(0, 900), max_size=8))
def test_joined_chunks_have_the_same_data(chunks: list[bytes], places: list[int]) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    sent = b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nX: y\r\n\r\n"
    framing, connection, data = Framing(joins_chunks=True), h11.Connection(h11.SERVER), b""
    events: list[type] = []
    for part in cut(head + sent + HEAD, places):
        framing.feed(part)
        while not (events and events[-1] is h11.EndOfMessage) and (taken := framing.take()):
            connection.receive_data(taken)
            while isinstance(event := connection.next_event(), h11.Event):
                events.append(type(event))
                data += bytes(event.data) if isinstance(event, h11.Data) else b""
    assert data == b"".join(chunks)
    assert events[-1] is h11.EndOfMessage
    # One chunk for each received part, because each costs much more than its bytes.
    assert events.count(h11.Data) <= len(places) + 1
