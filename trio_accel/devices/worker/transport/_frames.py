"""The messages between application and worker: tuples whose first item says which one it is.

From the application:

==========  ===========================================================================================
config      the pickled `WorkerConfig`; first of all
chunk       id, bytes; with its descriptor: memory that there is already, or another worker has made
unchunk     id: that memory is gone
warm        import path of a library: load it ahead
start       generation, blocks as (block, bytes, chunk, offset): begin to serve
request     number, word, whether outputs are spoiled although it was not launched, the launch, ids of
            released blocks
lease       number, block, whether it is written, ids of released blocks
unlease     number
cancel      number
copied      transfer
slab        id, bytes; with its descriptor: host memory of the application, before any array in it is named
unslab      id: no array lies in it any more
filled      transfer
release     ids of blocks
call        number, what: "count" or "synchronize"
poison      reason
observe     whether somebody observes messages
close       end in order
==========  ===========================================================================================

From the worker, which is not trusted; `_answers` says how these travel:

==========  ===========================================================================================
ready       names of the libraries: the device is open
started     the context serves
done        number, blocks as in start, bytes of host arrays, and None if it was launched and all went well,
            otherwise "done" or "withdrawn", whether it was launched, whether its fault has struck, error,
            ids of damaged blocks; exactly one for each request and lease. Where all went well, blocks that
            lie where they did before are not named; otherwise all are that it has made and that are there
granted     number, block as in start
copy        transfer, number of the request, index of the host array, chunk, offset, array
chunk       id, bytes; with its descriptor: before anything that lies in it is named
unchunk     id
result      number of the call, value
event       an encoded event of the worker's actors
log         logger, level, text
lost        error: the context is gone, nothing more is launched; whether nothing of it writes any more
closed      the context has ended in order
==========  ===========================================================================================
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from ....backends.base import ContextPoisonedError, PlacedBlock
from ....backends.base.ops import ArraySpec
from ..._options import DeviceOptions
from ._channel import Message

__all__ = [
    "Place",
    "WorkerConfig",
    "died",
    "place_of",
    "plain_array",
    "plain_place",
]

Place: TypeAlias = tuple[int, int, int, int]
"""Where a block lies, as plain values: its id, bytes, the chunk, and the offset in it."""


@attrs.frozen(kw_only=True)
class WorkerConfig:
    """What a worker is told first.

    Attributes:
        device: Name of the device, such as ``"cpu:0"``.
        path: Path of the device's actor; the actors of the worker have the paths that the tree shows.
        options: Options of the device.
        warm: Import paths of the libraries to load ahead.
        is_observed: Whether somebody observes messages.
        window: The most seconds to stay awake for a request that is due; 0 to sleep.
    """

    device: str
    path: str
    options: DeviceOptions
    warm: tuple[str, ...]
    is_observed: bool
    window: float


def plain_place(block: PlacedBlock) -> Place:
    """A placed block as plain values."""
    return block[:]


def place_of(data: Any) -> PlacedBlock:
    """What `plain_place` made."""
    return PlacedBlock(*data)


def plain_array(array: ArraySpec) -> Message:
    """An array as plain values."""
    return array.block, array.offset, array.dtype.value, array.shape, array.strides


def died(how: str, device: str) -> ContextPoisonedError:
    """The error of a context whose worker has ended."""
    return ContextPoisonedError(f"the worker process {how}", device=device)
