"""How messages between the application and a worker become bytes."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

__all__ = ["PICKLED", "Codec", "Message", "NonsenseError"]

Message: TypeAlias = tuple[object, ...]


class NonsenseError(ValueError):
    """The peer sent something that is no message, or a message that cannot be meant."""


@attrs.frozen
class Codec:
    """How messages become bytes, and bytes messages.

    Attributes:
        encode: Writes one message.
        encode_all: Writes several that go in one frame.
        decode: Reads what either has written: a message, or a list of them. Where it cannot, it raises
            `NonsenseError`, or any other exception.
    """

    encode: Callable[[Message], bytes]
    encode_all: Callable[[Sequence[Message]], bytes]
    decode: Callable[[bytes | memoryview], Message | list[Message]]


_pickle = functools.partial(pickle.dumps, protocol=5)

PICKLED = Codec(_pickle, _pickle, pickle.loads)
"""For messages of a trusted peer: to read one may run code that the sender has chosen."""
