"""Clients that ask a server for HTTP/2 without TLS."""

from __future__ import annotations

import socket
from contextlib import suppress

HTTP_2 = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    ),
]


def check_http_2(port: int | None, asked: bytes) -> None:
    """Ask the server at a port, which must not answer by HTTP/2."""
    found = b""
    with socket.create_connection(("127.0.0.1", port or 0), timeout=5) as client, suppress(ConnectionError):
        client.sendall(asked)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(4096):
            found += part
    # Of HTTP/2, the first frame would be the settings.
    assert b"\x00\x04\x00\x00\x00\x00\x00" not in found
    assert b"101" not in found.partition(b"\r\n")[0]
