"""The boundaries of the requests on a connection, and the requests hidden from the protocol library.

Hypercorn gives all received bytes to h11. Some of them are harmful there:

* h11 matches each header line by a regular expression. Its time grows with the square of the spaces before an
  illegal byte, and its limit for headers does not apply to headers that arrive whole.
* Hypercorn answers the preface of HTTP/2 and the offer ``Upgrade: h2c`` by HTTP/2, in which a non-ASCII path
  raises an error. The preface is refused. Offers are removed, because a server may ignore them and Java's
  HTTP client makes them by default.
* h11 accepts a request with a length and chunks, which a proxy may read as two requests.
* Each chunk of a body costs much more than its bytes. `Framing` can join them.

So the headers and the trailers of a request reach h11 only when they are complete and checked. That needs the
length of each body, which `Framing` takes from the headers. If h11 and this module could disagree, this
module refuses the request.
"""

from __future__ import annotations

import enum
import re

import attrs

HEAD_BYTES = 16 << 10
# Bytes of the line before a chunk, with its extensions.
_CHUNK_LINE_BYTES = 256
# The mean size of chunks, because each chunk costs as much as its bytes. A few chunks may be of any size.
_BYTES_PER_CHUNK, _FEW_CHUNKS = 256, 1024

_END = re.compile(rb"\n\r?\n")
_BLANK_LINE = re.compile(rb"\r?\n")
# Bytes that no header has, and a line that continues the header before it.
_ILLEGAL = re.compile(rb"[\0\f\v]|\r(?!\n)|\n[ \t]")
_VERSION = re.compile(rb"[^\n]* HTTP/([0-9]\.[0-9])\r?\n")
_OFFER = re.compile(rb"(?i)\n(?:upgrade|http2-settings):")
_WEBSOCKET = re.compile(rb"(?i)\nupgrade:[^\n]*websocket")
_OF_OFFERS = re.compile(rb"(?i)\n(upgrade|http2-settings|connection):([^\n]*)")
_OFFER_TOKENS = {b"upgrade", b"http2-settings", b""}
# An absolute target has the path that a proxy or an old client asks for (RFC 9112, section 3.2.2).
_ABSOLUTE = re.compile(rb"(?i)([^ \n]+ )https?://([^/?# \n]*)(/?)")
_HOST = re.compile(rb"(?i)\nhost:[^\n]*")
_LENGTH = re.compile(rb"(?i)\n(content-length|transfer-encoding):([^\n]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")


class RefusedError(Exception):
    """The next request is refused.

    Attributes:
        status: The status of the answer.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _RequestPart(enum.Enum):
    """The part of a request that the next byte belongs to."""

    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILERS = enum.auto()


@attrs.define(eq=False)
class Framing:
    """The bytes that a client has sent, cut into requests.

    Attributes:
        joins_chunks: Whether the data of received chunks is returned as a single chunk, without extensions.
    """

    joins_chunks: bool = False
    _data: bytearray = attrs.field(factory=bytearray, init=False)
    _part: _RequestPart = attrs.field(default=_RequestPart.HEAD, init=False)
    # Bytes until the end of the body or the chunk.
    _remaining: int = attrs.field(default=0, init=False)
    # The index from which the end of headers is searched.
    _searched: int = attrs.field(default=0, init=False)
    _chunks: int = attrs.field(default=0, init=False)
    _chunk_bytes: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a request."""
        return self._part is _RequestPart.HEAD

    @property
    def has_head(self) -> bool:
        """Whether the headers of the next request have arrived, if the next byte begins one."""
        return self.is_between and _END.search(self._data, 0, HEAD_BYTES) is not None

    def feed(self, data: bytes | bytearray) -> None:
        """Append received bytes."""
        self._data += data

    def take(self) -> bytes:
        """Remove and return the checked bytes of one request or a part of it.

        Returns:
            Bytes up to the end of the request at most, without offers of other protocols, blank lines before
            the request, and the host of its target; ``b""`` if more bytes must be fed first.

        Raises:
            RefusedError: The headers, the trailers or a chunk are refused. Nothing else may be taken then.
        """
        parts: list[bytes] = []
        while part := self._take_part():
            parts.append(part)
            if self.is_between:
                break
        return b"".join(parts)

    def _take_part(self) -> bytes:
        match self._part:
            case _RequestPart.HEAD:
                # Some clients send a blank line after a body (RFC 9112, section 2.2).
                if _BLANK_LINE.fullmatch(head := self._take_lines()):
                    head = self._take_lines()
                if head:
                    self._begin(head)
                    if absolute := _ABSOLUTE.match(head):
                        head = _with_origin(head, absolute)
                return _without_offers(head) if _OFFER.search(head) else head
            case _RequestPart.TRAILERS:
                lines = self._take_lines()
                if lines:
                    self._part = _RequestPart.HEAD
                return lines
            case _RequestPart.BODY:
                part = self._cut(min(self._remaining, len(self._data)))
                self._remaining -= len(part)
                if not self._remaining:
                    self._part = _RequestPart.HEAD
                return part
            case _:
                return self._take_chunks()

    def _cut(self, count: int) -> bytes:
        part = bytes(self._data[:count])
        del self._data[:count]
        return part

    def _take_lines(self) -> bytes:
        """Take header lines up to and including the blank line."""
        # Without any header, the blank line is the first one.
        end = _BLANK_LINE.match(self._data) or _END.search(self._data, self._searched)
        if (end.end() if end else len(self._data)) > HEAD_BYTES:
            raise RefusedError(431)
        if end is None:
            # The end may have begun in the last two bytes.
            self._searched = max(0, len(self._data) - 2)
            return b""
        self._searched = 0
        lines = self._cut(end.end())
        if _ILLEGAL.search(lines):
            raise RefusedError(400)
        return lines

    def _begin(self, head: bytes) -> None:
        """Find the end of the request that begins with these headers."""
        version = _VERSION.match(head)
        if (version and version[1] not in {b"1.0", b"1.1"}) or _WEBSOCKET.search(head):
            raise RefusedError(505)
        lengths = _LENGTH.findall(head)
        if not lengths:
            return
        [(name, value), *extra] = lengths
        if extra:
            raise RefusedError(400)
        if name.lower() == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise RefusedError(501)
            self._part, self._chunks, self._chunk_bytes = _RequestPart.CHUNK_LINE, 0, 0
            return
        if not re.fullmatch(rb"[0-9]{1,16}", value.strip()):
            raise RefusedError(400)
        self._remaining = int(value)
        if self._remaining:
            self._part = _RequestPart.BODY

    def _take_chunks(self) -> bytes:
        """Take all received chunks before the last one, or the line of the last one."""
        data, offset = bytearray(), 0
        while self._part is not _RequestPart.TRAILERS:
            if self._part is _RequestPart.CHUNK:
                part = self._data[offset : offset + self._remaining]
                data += part
                taken = len(part)
                self._remaining -= taken
                if not self._remaining:
                    self._part = _RequestPart.CHUNK_END
            elif self._part is _RequestPart.CHUNK_END:
                taken = self._end_chunk(offset)
            else:
                taken = self._begin_chunk(offset, is_first=not data)
            if not taken:
                break
            offset += taken
        raw = self._cut(offset)
        if not self.joins_chunks:
            return raw
        if data:
            return b"%x\r\n%b\r\n" % (len(data), bytes(data))
        return b"0\r\n" if self._part is _RequestPart.TRAILERS else b""

    def _end_chunk(self, offset: int) -> int:
        """Return the bytes of the line break after a chunk, or 0 if they have not arrived."""
        end = self._data[offset : offset + 2]
        if not b"\r\n".startswith(end):
            raise RefusedError(400)
        if len(end) < 2:
            return 0
        self._part = _RequestPart.CHUNK_LINE
        return 2

    def _begin_chunk(self, offset: int, *, is_first: bool) -> int:
        """Return the bytes of the line before a chunk; 0 if they must wait.

        The line of the last chunk waits until the chunks before it are taken.
        """
        match = _CHUNK.match(self._data, offset, offset + _CHUNK_LINE_BYTES)
        if match is None:
            line = self._data[offset : offset + _CHUNK_LINE_BYTES]
            if b"\n" in line or len(line) == _CHUNK_LINE_BYTES:
                raise RefusedError(400)
            return 0
        size = int(match[1], 16)
        if not size and not is_first:
            return 0
        self._count_chunk(size)
        self._part, self._remaining = (_RequestPart.CHUNK if size else _RequestPart.TRAILERS), size
        return match.end() - offset

    def _count_chunk(self, size: int) -> None:
        self._chunks += 1
        self._chunk_bytes += size
        if self._chunks > _FEW_CHUNKS + self._chunk_bytes // _BYTES_PER_CHUNK:
            raise RefusedError(413)


def _with_origin(head: bytes, absolute: re.Match[bytes]) -> bytes:
    """Remove the host from the target of headers. It replaces the value of the first ``Host``."""
    host = b"\nHost: %b\r" % absolute[2]
    return absolute[1] + b"/" + _HOST.sub(lambda _: host, head[absolute.end() :], count=1)


def _without_offers(head: bytes) -> bytes:
    """Remove the offer of another protocol from headers."""

    def keep(line: re.Match[bytes]) -> bytes:
        tokens = [
            token for token in map(bytes.strip, line[2].split(b",")) if token.lower() not in _OFFER_TOKENS
        ]
        is_kept = tokens and line[1].lower() == b"connection"
        return b"\n%b: %b\r" % (line[1], b", ".join(tokens)) if is_kept else b""

    return _OF_OFFERS.sub(keep, head)
