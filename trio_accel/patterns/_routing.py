"""Which replica gets a request: by load, or by a key of the request."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs

from ..actors import named_options
from ._numbers import must_be_count

__all__ = ["ByKey", "ByLoad", "Candidate", "Key", "Routing"]

Key: TypeAlias = str | bytes | int
"""What requests are routed by: equal keys have equal places, in every process."""


class Candidate(Protocol):
    """What a routing knows of a replica."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that it works on."""
        ...

    @property
    def turn(self) -> int:
        """Number of the last request that it got."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Routing(Protocol):
    """How a router chooses."""

    @property
    def skips(self) -> bool:
        """Whether it is offered no replica that restarts, as long as another works."""
        ...

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """Choose one of at least one replica."""
        ...


def _choices(value: int | None) -> int | None:
    return value if value is None else must_be_count("ByLoad: choices", value)


@named_options
@attrs.frozen(kw_only=True)
class ByLoad:
    """The replica with the fewest requests in flight; of equal ones, that which had none for longest.

    Attributes:
        choices: Look at so many replicas only, chosen at random. With 2 that is the power of two choices
            (Mitzenmacher, IEEE TPDS 2001): it spreads well where several routers share replicas and do not
            see each other's requests. None looks at all.
        random: Source of chance; seed it to make the choices repeatable.
    """

    choices: int | None = attrs.field(default=None, converter=_choices)
    random: random.Random = attrs.field(factory=random.Random, eq=False)

    @property
    def skips(self) -> bool:
        """One that restarts is skipped as long as another works."""
        return True

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """See `Routing.choose`."""
        if self.choices is not None and self.choices < len(candidates):
            candidates = self.random.sample(candidates, self.choices)
        return min(candidates, key=_load)


@named_options
@attrs.frozen
class ByKey:
    """The same replica for the same key, by rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998).

    The names of the replicas decide, not their number or order. So when one ends for good, its keys move
    to all the others, and no other key moves.

    Attributes:
        key: Gives the key of an item: a str, bytes or an int.
        fails_over: Whether another replica serves the keys of one that restarts. If not, their requests
            wait for it, in order, and a mailbox that is full refuses them. So a key with a state of its own
            is served by one replica, as long as that lives.
    """

    key: Callable[[Any], Key]
    fails_over: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not callable(self.key):
            raise TypeError(f"ByKey: key must be a function, got {self.key!r}")

    @property
    def skips(self) -> bool:
        """Whether one that restarts is skipped: `fails_over`."""
        return self.fails_over

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """See `Routing.choose`."""
        key = _as_bytes(self.key(item))
        return max(candidates, key=lambda candidate: (_score(key, candidate.name), candidate.name))


def _load(candidate: Candidate) -> tuple[int, int]:
    return candidate.in_flight, candidate.turn


def _score(key: bytes, name: str) -> bytes:
    # The length parts the two, so that no other pair gives the same text.
    named = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(len(named).to_bytes(8, "big") + named + key, digest_size=16).digest()


def _as_bytes(key: object) -> bytes:
    """A key as bytes, by which keys of several types differ."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, int):
        return b"i" + str(int(key)).encode()
    raise TypeError(f"a key must be a str, bytes or an int, got {key!r}")
