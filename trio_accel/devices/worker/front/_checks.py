"""Whether what a worker tells can be so, given what it was asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....backends.base.ops import ArraySpec
from ..transport._codec import NonsenseError
from ..transport._frames import Address
from ..transport._framing import Received, close_all
from ._chunks import ChunkTable
from ._request import OperationRequest, RemoteRequest

__all__ = ["check_addresses", "check_copy", "check_results", "close_descriptors", "expect"]


def expect(is_so: bool, what: str) -> None:
    """See that something is so; not for what happens with each operation, as the text takes long to make.

    Raises:
        NonsenseError: It is not.
    """
    if not is_so:
        raise NonsenseError(what)


def check_addresses(request: RemoteRequest, addresses: tuple[Address, ...], chunks: ChunkTable) -> None:
    """See that a worker tells of the blocks that a request makes, and that they can lie there.

    Raises:
        NonsenseError: They are no blocks of the request, or there is no such memory.
    """
    made = request.launch.allocations if isinstance(request, OperationRequest) else ()
    for address in addresses:
        if address[:2] not in made:
            block, nbytes, *_ = address
            raise NonsenseError(f"request {request.number} makes no block {block} of {nbytes} bytes")
        chunks.check_address(address)


def check_results(request: RemoteRequest, results: tuple[bytes, ...], trouble: Any) -> None:
    """See that the host arrays that came with an answer are those that were asked for.

    Raises:
        NonsenseError: They are not.
    """
    if not isinstance(request, OperationRequest):
        expect(not results and trouble is None, f"request {request.number} is a lease")
        return
    if trouble is not None:
        how, _, _, error, _ = trouble
        if how != "done" or error is not None:
            return
    if (results or request.hosts.is_used) and not request.hosts.fits(results):
        raise NonsenseError(f"request {request.number} has other host arrays")


def check_copy(request: OperationRequest, index: int, array: ArraySpec) -> None:
    """See that what a worker wants copied is a host array of the request.

    Raises:
        NonsenseError: It is not.
    """
    copies = request.hosts.copies
    expect(index < len(copies), f"request {request.number} has no host array {index}")
    host = copies[index].host
    is_like = host.shape == array.shape and host.dtype == array.dtype.dtype
    expect(is_like, f"host array {index} of request {request.number} is another")


def close_descriptors(received: Iterable[Received]) -> None:
    """Close what came with messages that are not taken."""
    for _, descriptors in received:
        close_all(descriptors)
