"""Memory that the application shares with its workers, for the copies of host arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy.typing as npt

from ...host._host_pool import HostPool, Region

__all__ = ["HostCopy", "Staging"]

# The next array is copied while one is transferred; and memory that is promised is not all taken yet,
# so that what the machine has left does not tell.
_STAGED = 2 << 30

_transfers = itertools.count(1)


@attrs.define(eq=False)
class HostCopy:
    """A copy that the application makes between a host array and memory that it shares with the worker.

    Attributes:
        host: The array.
        is_upload: Whether it is read.
        region: Where it is copied to or from. None if that is the device's own memory: then the worker
            tells the address when its stream gets there.
        transfer: What the worker calls a region that is not filled yet; the same for every worker.
        is_begun: Whether the copy runs or has run.
        is_over: Whether it has run.
    """

    host: npt.NDArray[Any]
    is_upload: bool
    region: Region | None
    transfer: int = attrs.field(factory=lambda: next(_transfers))
    is_begun: bool = False
    is_over: bool = False


class Staging:
    """Regions of the pool for staged transfers of other arrays, so many bytes at a time.

    Args:
        pool: Where they are.
        on_free: Called when some are given back.

    Attributes:
        pool: The pool; its own arrays need no region.
        limit: The most bytes at a time, unless one request needs more.
        taken: Bytes that are taken.
    """

    def __init__(self, pool: HostPool, on_free: Callable[[], None]) -> None:
        self.pool: HostPool = pool
        self.limit: int = _STAGED
        self.taken: int = 0
        self._on_free = on_free

    def take(self, nbytes: int) -> Region:
        """Take a region.

        Raises:
            OutOfMemoryError: The machine has not so much.
        """
        region = self.pool.stage(nbytes)
        self.taken += nbytes
        return region

    def give_back(self, copies: Iterable[HostCopy]) -> None:
        """A request needs its regions no more."""
        self.taken -= sum(copy.region.nbytes for copy in copies if copy.region is not None)
        self._on_free()
