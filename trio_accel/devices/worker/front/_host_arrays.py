"""The host arrays of requests, and how each of them reaches a worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import CopyFromHostSpec, CopyToHostSpec
from ...host._host_pool import HostPool, Region
from ...operations._operation import Launch
from ..transport._codec import Message
from ..transport._wire import encode_array

__all__ = ["HostArrays", "HostCopy", "Staging"]

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


class HostArrays:
    """The host arrays of one request; they are the same for every worker.

    Args:
        by_value: Those up to so many bytes are sent in the messages.
        staging: Memory that the device transfers from and to by itself. None if the application has the
            device's memory mapped.

    Attributes:
        copies: Those that the application copies, by index.
        is_used: Whether there are any that a worker was told of one by one, and not by a template.
        is_written: Whether the worker writes to memory of the application.
        staging: As given.
    """

    __slots__ = ("_by_value", "_filled", "_next", "copies", "is_used", "is_written", "staging")

    def __init__(self, by_value: int, staging: Staging | None) -> None:
        self._by_value = by_value
        self.staging: Staging | None = staging
        self._filled: list[npt.NDArray[Any]] = []
        self._next = 0
        self.copies: list[HostCopy] = []
        self.is_used: bool = False
        self.is_written: bool = False

    def fit(self, launch: Launch) -> bool:
        """Whether what the arrays of a launch need of host memory is there, or would be the first."""
        staging = self.staging
        if staging is None or not staging.taken or self.copies:
            return True
        specs = (launch.spec, *launch.staged)
        hosts = [spec.host for spec in specs if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))]
        needed = [host.nbytes for host in hosts if host.nbytes > self._by_value and not self.address(host)]
        return not needed or staging.taken + sum(needed) <= staging.limit

    def are_direct(self, launch: Launch) -> bool:
        """Whether the device itself transfers an array of the program for a launch."""
        specs = (launch.spec, *launch.staged)
        hosts = [spec.host for spec in specs if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))]
        return any(host.size and self.address(host) is not None for host in hosts)

    @property
    def is_copied(self) -> bool:
        """Whether no array of the program is read any more."""
        return all(copy.is_over for copy in self.copies if copy.is_upload)

    def begin(self) -> None:
        """The request is told to a worker, from its first host array on."""
        self._filled.clear()
        self._next = 0

    def read(self, host: npt.NDArray[Any]) -> Message:
        """How the worker gets a host array: from shared memory, by value, or by a copy."""
        self.is_used = True
        address = self.address(host)
        if address is not None:
            return address
        if host.nbytes <= self._by_value:
            return "value", encode_array(host)
        return self._copy(host, is_upload=True)

    def write(self, host: npt.NDArray[Any]) -> Message:
        """How a host array is filled: by the device itself, from the reply, or by a copy."""
        self.is_used = True
        address = self.address(host)
        if address is not None:
            self.is_written = True
            return address
        if host.nbytes > self._by_value:
            return self._copy(host, is_upload=False)
        return self.fill_later(host)

    def fill_later(self, host: npt.NDArray[Any]) -> Message:
        """How a host array is filled from the reply."""
        self.is_used = True
        self._filled.append(host)
        return "result", DType.of(host.dtype).value, host.shape

    def fits(self, results: Sequence[bytes]) -> bool:
        """Whether these are as long as the host arrays that are filled from the reply."""
        return [host.nbytes for host in self._filled] == list(map(len, results))

    def fill(self, results: Sequence[bytes]) -> None:
        """Fill host arrays from the reply, which `fits`: it has their elements in C order."""
        for host, data in zip(self._filled, results, strict=True):
            np.copyto(host, np.ndarray(host.shape, host.dtype, data))

    def clear(self) -> None:
        """The request is over: what it had of the pool goes back."""
        copies, self.copies = self.copies, []
        self._filled.clear()
        if self.staging is not None and copies:
            self.staging.give_back(copies)

    def address(self, host: npt.NDArray[Any]) -> Message | None:
        """Where a host array lies in memory that the worker has, too; None if it does not."""
        if self.staging is None or not host.flags.c_contiguous:
            return None
        address = self.staging.pool.find(host)
        return None if address is None else _shared(*address, host, None)

    def _copy(self, host: npt.NDArray[Any], *, is_upload: bool) -> Message:
        index, self._next = self._next, self._next + 1
        if index == len(self.copies):
            self.copies.append(HostCopy(host, is_upload, self._region(host.nbytes)))
        copy = self.copies[index]
        region = copy.region
        if region is None:
            return "copy", index
        self.is_written |= not is_upload
        is_filled = copy.is_over or not is_upload
        return _shared(region.slab.number, region.offset, host, None if is_filled else copy.transfer)

    def _region(self, nbytes: int) -> Region | None:
        return None if self.staging is None else self.staging.take(nbytes)


def _shared(slab: int, offset: int, host: npt.NDArray[Any], transfer: int | None) -> Message:
    return "shared", slab, offset, DType.of(host.dtype).value, host.shape, transfer
