"""How messages and descriptors lie in a stream: what both ends of a channel know."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ._codec import Message

__all__ = [
    "BUFFER",
    "HEADER",
    "LOST",
    "MAX_DESCRIPTORS",
    "MAX_LENGTH",
    "RETRY",
    "TRANSIENT",
    "Received",
    "close_all",
    "duplicates",
]

Received: TypeAlias = tuple[Message, tuple[int, ...]]
"""A message and the descriptors that came with it, which belong to the receiver.

`LOST` stands for all of them if too many files are open in the process that receives.
"""

MAX_DESCRIPTORS = 16
"""Descriptors that one message can carry."""

LOST = -1
"""In place of the descriptors of a message that were lost."""

HEADER = struct.Struct("<IBQ")
"""What stands before each payload: its length, the number of descriptors, the number of the frame."""

MAX_LENGTH = 2**32 - 1
"""The most bytes of a payload."""

BUFFER = 256 * 1024
"""One read takes at most so many bytes, and one write gathers about so many."""

TRANSIENT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
"""The kernel has no memory, or too many descriptors are on their way to processes that do not read.

A socket counts as ready all the same, so one looks again after `RETRY` seconds.
"""

RETRY = 0.005


def duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """Duplicate descriptors.

    Raises:
        OSError: One cannot be duplicated; then none is.
    """
    copies: list[int] = []
    try:
        copies.extend(os.dup(descriptor) for descriptor in descriptors)
    except BaseException:
        close_all(copies)
        raise
    return tuple(copies)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that came with a message, or were to go with one."""
    for descriptor in descriptors:
        if descriptor != LOST:
            os.close(descriptor)
