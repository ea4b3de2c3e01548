"""The messages of the application to a worker. They are pickled, because the worker trusts the application.

A launch contains its name, the import path of its library, the specification, ids and sizes of the blocks to
make, staged copies, later copies, ids of the written blocks, existing arguments and their blocks, and the
fault that hits it.

A specification consists of the import path of its class and the values of its fields. Values of other than
plain types are encoded as tuples, which begin with one of the tags.
"""

from __future__ import annotations

from ...backends.base import Ints
from ._messages import Messages
from ._protocol import Address, Message, WorkerConfig

ORDERS = Messages(are_read=False)
"""All orders."""

_order = ORDERS.declare()


@_order
def config(config: WorkerConfig) -> None:
    """Begin; this is the first message."""


@_order
def chunk(number: int, nbytes: int, *descriptors: int) -> None:
    """Map existing memory, which may be another worker's."""


@_order
def chunk_received(number: int) -> None:
    """The application has received the descriptor of a chunk."""


@_order
def tell_chunk(number: int) -> None:
    """Send a chunk again, because its descriptor was lost."""


@_order
def unchunk(number: int) -> None:
    """Unmap freed memory, or borrowed memory after its use."""


@_order
def prepare(library: str, blocks: tuple[Address, ...]) -> None:
    """Open a used library in advance.

    It contains the places of the blocks that the library has from its start. Their chunks are sent before.
    """


@_order
def forget(library: str) -> None:
    """A library was closed, so it need not be open in advance."""


@_order
def start(generation: int, blocks: tuple[Address, ...]) -> None:
    """Begin to serve, with these existing blocks."""


@_order
def template(number: int, launch: Message) -> None:
    """A launch with block positions in place of the ids; sent before its first replay."""


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

    The word is its library's. `invalidates` is whether outputs become invalid even if it is not launched.
    """


@_order
def forget_templates(numbers: Ints) -> None:
    """Forget these templates, because no later replay uses them."""


@_order
def request(number: int, word: int, invalidates: bool, launch: Message, released: Ints) -> None:
    """A request without a template; see `replay`."""


@_order
def lease(number: int, block: int, write: bool, released: Ints) -> None:
    """Hold a block; `write` is whether it is written."""


@_order
def borrow(number: int, released: Ints, address: Address, size: int, stays: bool, *descriptors: int) -> None:
    """Make memory of another device readable until `unlease`.

    The size is the chunk's, and `stays` is whether it stays mapped until `unchunk`. Its descriptor is
    attached unless the worker has mapped it.
    """


@_order
def unlease(number: int) -> None:
    """A lease has ended, and the block is returned."""


@_order
def cancel(number: int) -> None:
    """The caller of a request was cancelled."""


@_order
def caller_left(number: int) -> None:
    """The caller of a request has left before all of its host arrays were copied."""


@_order
def heard(number: int) -> None:
    """The progress of a request was received, and the next may follow."""


@_order
def copied(transfer: int) -> None:
    """A copy that the worker has requested is done."""


@_order
def slab(number: int, nbytes: int, *descriptors: int) -> None:
    """Host memory of the application; sent before any array in it is used."""


@_order
def unslab(number: int) -> None:
    """A slab no longer contains arrays."""


@_order
def filled(transfer: int) -> None:
    """A host array is in its slab, or never will be."""


@_order
def release(blocks: Ints) -> None:
    """Blocks that the program has released."""


@_order
def call(number: int, question: str, path: str) -> None:
    """A question: "count", "synchronize", or "close" with the import path of a library."""


@_order
def poison(reason: str) -> None:
    """Damage the context, for tests."""


@_order
def observe(is_observed: bool, is_timed: bool) -> None:
    """Whether messages are observed, and launches are timed."""


@_order
def close() -> None:
    """End in order."""
