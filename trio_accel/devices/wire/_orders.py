"""The messages of the application to a worker, which trusts it: they are pickled.

A launch is its name, the import path of its library, the specification, id and bytes of the blocks to be
made, what is staged for it, copies behind it, ids of the blocks that it writes, arguments that exist already
and their blocks, and the fault that is to hit it.

A specification is the import path of its class and the values of its fields. A value that is not plain is a
tuple that begins with one of the tags.
"""

from __future__ import annotations

from ...backends.base import Ints
from ._messages import Messages
from ._protocol import Address, Message, WorkerConfig

ORDERS = Messages(are_read=False)
"""All of them."""

_order = ORDERS.declare()


@_order
def config(config: WorkerConfig) -> None:
    """Begin; first of all."""


@_order
def chunk(number: int, nbytes: int, *descriptors: int) -> None:
    """Map memory that there is already, or another worker has made."""


@_order
def kept(number: int) -> None:
    """The descriptor of a chunk has come."""


@_order
def tell_chunk(number: int) -> None:
    """Send a chunk again, whose descriptor was lost."""


@_order
def unchunk(number: int) -> None:
    """That memory is gone, or was borrowed and need not stay mapped."""


@_order
def prepare(library: str, blocks: tuple[Address, ...]) -> None:
    """Open a library ahead that is in use now.

    Blocks that it has from its start are told with their places, behind their chunks.
    """


@_order
def forget(library: str) -> None:
    """A library was closed: what was opened ahead is not needed."""


@_order
def start(generation: int, blocks: tuple[Address, ...]) -> None:
    """Begin to serve, with blocks that there are."""


@_order
def template(number: int, launch: Message) -> None:
    """A launch with positions of blocks in place of their ids; ahead of its first replay."""


@_order
def replay(
    number: int,
    word: int,
    invalidates: bool,
    template: int,
    blocks: Ints,
    released: Ints,
    packed: tuple[bytes, ...],
) -> None:
    """A request by a template: its blocks, ids of released blocks, and packed scalars.

    The word is that of its library. `invalidates` says whether outputs are invalid although it was not
    launched.
    """


@_order
def forget_templates(numbers: Ints) -> None:
    """No later replay names these templates."""


@_order
def request(number: int, word: int, invalidates: bool, launch: Message, released: Ints) -> None:
    """A request that is sent whole; see `replay`."""


@_order
def lease(number: int, block: int, write: bool, released: Ints) -> None:
    """Hold a block, and say whether it is written."""


@_order
def borrow(number: int, released: Ints, place: Address, size: int, stays: bool, *descriptors: int) -> None:
    """Memory of another device, which is read until `unlease`.

    The size is that of the chunk, and `stays` says whether it stays mapped until `unchunk`. Its descriptor
    comes with it if the worker does not have it mapped.
    """


@_order
def unlease(number: int) -> None:
    """A lease is over: the block is given back."""


@_order
def cancel(number: int) -> None:
    """The asker of a request was cancelled."""


@_order
def left(number: int) -> None:
    """The asker of a request has gone, and not all of its host arrays were copied."""


@_order
def heard(number: int) -> None:
    """The progress of a request has come, and the next may follow."""


@_order
def copied(transfer: int) -> None:
    """A copy is over that the worker has asked for."""


@_order
def slab(number: int, nbytes: int, *descriptors: int) -> None:
    """Host memory of the application, before any array in it is named."""


@_order
def unslab(number: int) -> None:
    """A slab has no array any more."""


@_order
def filled(transfer: int) -> None:
    """A host array is in its slab, or never will be."""


@_order
def release(blocks: Ints) -> None:
    """Blocks that the program has let go."""


@_order
def call(number: int, what: str, path: str) -> None:
    """A question: "count", "synchronize", or "close" with the import path of a library."""


@_order
def poison(reason: str) -> None:
    """Damage the context, for tests."""


@_order
def observe(is_observed: bool, is_timed: bool) -> None:
    """Say whether somebody observes messages, and whether times of launches are wanted."""


@_order
def close() -> None:
    """End in order."""
