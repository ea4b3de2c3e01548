"""The messages between application and worker: tuples whose first item says which one it is.

From the application:

================  ==========================================================================================
config            the pickled `WorkerConfig`; first of all
chunk             id, bytes; with its descriptor: memory that there is already, or another worker has made
kept              id: the descriptor of a chunk has come
tell_chunk        id: send a chunk again, whose descriptor was lost
unchunk           id: that memory is gone
prepare           import path of a library that is in use now, blocks as in start, that it has from its start,
                  behind their chunks: open it ahead
forget            import path of a library that was closed: what was opened ahead is not needed
start             generation, blocks as (block, bytes, chunk, offset): begin to serve
template          number, the launch with positions of blocks in place of their ids; ahead of its first
                  replay
replay            number, word, whether outputs are invalid although it was not launched, template, blocks,
                  ids of released blocks, packed scalars
forget_templates  no template of before is named any more
request           number, word, whether outputs are invalid although it was not launched, the launch, ids of
                  released blocks
lease             number, block, whether it is written, ids of released blocks
unlease           number
cancel            number
copied            transfer
slab              id, bytes; with its descriptor: host memory of the application, before any array in it is
                  named
unslab            id: it has no array any more
filled            transfer
release           ids of blocks
call              number, what: "count" or "synchronize"
poison            reason
observe           whether somebody observes messages, and whether times of launches are wanted
close             end in order
================  ==========================================================================================

From the worker, which is not trusted; `_answers` says how they are encoded:

================  ==========================================================================================
ready             names of the libraries: the device is open
started           the context serves
made              name of a program's library that is open now, nanoseconds that this took, those of them
                  for the import of its module
times             number, when its launch began, when it was complete, in nanoseconds: ahead of "done"
done              number, blocks as in start, bytes of host arrays, and None if it was launched and all went
                  well, otherwise "done" or "withdrawn", whether it was launched, whether its fault has
                  struck, error, ids of invalid blocks; exactly one for each request and lease. Where all
                  went well, blocks that are where they were before are not named; otherwise all are that it
                  has made and that are there
granted           number, block as in start
copy              transfer, number of the request, index of the host array, chunk, offset, array
chunk             id, bytes; with its descriptor: before any block in it is named
unchunk           id
result            number of the call, value: of "count" what was launched and completed, what is in flight
                  by library, memory, plans and workspace by library
event             an encoded event of the worker's actors
log               logger, level, text
lost              error: the context is gone, nothing more is launched; whether nothing of it writes any
                  more
closed            the context has ended in order
================  ==========================================================================================

A launch is its name, the import path of its library, the specification, id and bytes of the blocks to be
made, what is staged for it, ids of the blocks that it writes, arguments that exist already and their blocks,
and the fault that is to hit it.

A specification is the import path of its class and the values of its fields. A value that is not plain is a
tuple that begins with one of the tags.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from ....backends.base import DType
from ....backends.base.fast_paths import FastPaths
from ..._options import DeviceOptions

__all__ = [
    "ALLOCATIONS",
    "ARRAY",
    "COMPLEX",
    "DTYPES",
    "ENUM",
    "HOST",
    "NAME",
    "OUTPUTS",
    "PICKLED",
    "TUPLE",
    "Address",
    "Codec",
    "Message",
    "NonsenseError",
    "Wire",
    "WorkerConfig",
]

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


Wire: TypeAlias = tuple[object, ...]
"""Real numbers, strings, bytes, None and tuples of these: what the pickler writes without calling Python."""

TUPLE, ARRAY, COMPLEX, ENUM, HOST = range(5)
"""Tags: the first item of every tuple that stands for a value."""

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""

DTYPES = {member.value: member for member in DType}
"""The dtypes by their names."""


Address: TypeAlias = tuple[int, int, int, int]
"""Place of a block as plain values: its id, bytes, the chunk, and the offset in it."""


@attrs.frozen(kw_only=True)
class WorkerConfig:
    """First message to a worker.

    Attributes:
        device: Name of the device, such as ``"cpu:0"``.
        path: Path of the device's actor; the actors of the worker have the paths that the tree shows.
        options: Options of the device.
        in_use: Import paths of the libraries that are in use, and have no blocks from their start: it opens
            them ahead.
        is_observed: Whether somebody observes messages.
        is_timed: Whether times of launches are wanted.
        window: The most seconds to stay awake for a request that is due; 0 to sleep.
        fast_paths: Those that are taken.
    """

    device: str
    path: str
    options: DeviceOptions
    in_use: tuple[str, ...]
    is_observed: bool
    is_timed: bool
    window: float
    fast_paths: FastPaths
