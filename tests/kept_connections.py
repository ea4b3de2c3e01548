"""Clients that keep their connections, as pools do."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import attrs
import httpx2

__all__ = ["Asked", "check_kept_connections", "check_next"]


@attrs.frozen
class Asked:
    """A request, and the status that must answer it."""

    status: int
    method: str
    path: str
    body: str | None = None


def check_kept_connections(port: int, asked: Sequence[Asked], headers: Mapping[str, str] = {}) -> None:
    """Send 600 requests over a pool of connections, and each request before another one on one connection."""

    def ask(request: Asked) -> int:
        return client.request(request.method, request.path, content=request.body).status_code

    sent = list(islice(cycle(asked), 600))
    url = f"http://127.0.0.1:{port}"
    with httpx2.Client(base_url=url, headers=dict(headers), timeout=60.0, trust_env=False) as client:
        # An error of a connection is raised here.
        assert [ask(request) for request in sent[:200]] == [request.status for request in sent[:200]]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, sent[200:])) == [request.status for request in sent[200:]]
    for request in asked:
        check_next(port, request, asked[0], headers)


def check_next(port: int, first: Asked, second: Asked, headers: Mapping[str, str] = {}) -> None:
    """Have a connection serve two requests, unless the first answer announces its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        for request in (first, second):
            connection.request(request.method, request.path, request.body, dict(headers))
            response = connection.getresponse()
            response.read()
            assert response.status == request.status, request
            if response.headers.get("connection", "").lower() == "close":
                return
            # From here on the client must not connect again, as it would behind the back of its user.
            connection.auto_open = 0
    finally:
        connection.close()
