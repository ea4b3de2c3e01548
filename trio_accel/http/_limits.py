"""Limits for each client, and for all clients together."""

from __future__ import annotations

import math

import attrs

from ..actors import is_number, must_be_whole, named_options, validator
from ..actors._options import SYNONYMS

__all__ = ["Limits"]

_seconds = validator("be seconds above 0", lambda value: is_number(value, 0.0) and value > 0)
_grace = validator("be seconds of at least 0", lambda value: is_number(value, 0.0) and value < math.inf)


def _also(*names: str) -> dict[object, object]:
    """Return metadata of a field with names that other servers give to it."""
    return {SYNONYMS: names}


@named_options
@attrs.frozen(kw_only=True)
class Limits:
    """Limits for each client, and for all clients together, for `serve`.

    Attributes:
        requests: The number of requests that the application serves at once. Others get status 503 with
            ``Retry-After``.
        connections: The number of open connections without a request. Another one closes the oldest of them.
            Together with busy connections, up to twice as many are open, and `serve` closes others at once.
        body: Bytes of a request's body. `serve` reads it whole before the application is called. A longer
            body gets 413.
        bodies: Bytes of all bodies in memory, at least `body`. If another body exceeds them, the largest
            unfinished one gets 503.
        wait: Seconds for the headers of a request, counted from the previous answer, and again for its body.
            Late headers end the connection, and a late body gets 408.
        stall: Seconds in which a client has to read each 64 KiB of an answer, or each shorter part. A slower
            client is disconnected. So is a client that has sent more than 64 KiB of further requests, if it
            waits for an answer as long. On TCP, the kernel also ends the connection of a machine that has
            vanished, after this time.
        answer: Seconds until an answer begins. Then the request's task is cancelled and the client gets 504.
            The request header ``X-Deadline: 1.5`` asks for fewer seconds, in which the answer must also end.
        grace: Seconds from a signal until the program has ended. Open requests get all of them but the last,
            or three quarters of a grace below 4 s.
    """

    requests: int = attrs.field(
        default=256,
        validator=must_be_whole(1),
        metadata=_also("concurrency", "workers", "limit_concurrency", "max_concurrent"),
    )
    connections: int = attrs.field(
        default=512,
        validator=must_be_whole(1),
        metadata=_also("clients", "backlog"),
    )
    body: int = attrs.field(
        default=1 << 20,
        validator=must_be_whole(0),
        metadata=_also("size", "request_size", "content_length"),
    )
    bodies: int = attrs.field(
        default=64 << 20,
        validator=must_be_whole(0),
        metadata=_also("memory", "memory_limit"),
    )
    wait: float = attrs.field(
        default=5.0,
        validator=_seconds,
        metadata=_also(
            "keepalive",
            "keep_alive",
            "keep_alive_timeout",
            "timeout_keep_alive",
            "read_timeout",
            "header_timeout",
            "idle",
        ),
    )
    stall: float = attrs.field(
        default=10.0,
        validator=_seconds,
        metadata=_also("write_timeout", "send_timeout", "slow"),
    )
    answer: float = attrs.field(
        default=30.0,
        validator=_seconds,
        metadata=_also("timeout", "deadline", "request_timeout", "response_timeout", "response"),
    )
    grace: float = attrs.field(
        default=10.0,
        validator=_grace,
        metadata=_also(
            "graceful_timeout", "shutdown_timeout", "shutdown", "timeout_graceful_shutdown", "grace_period"
        ),
    )

    def __attrs_post_init__(self) -> None:
        if self.bodies < self.body:
            raise ValueError(f"Limits: bodies must be at least body, got {self.bodies} and {self.body}")
