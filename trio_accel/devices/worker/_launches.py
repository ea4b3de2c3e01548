"""Launches as plain values, and what a worker makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import DType, OutOfMemoryError
from ...backends.base.host import available_bytes, total_bytes
from ...backends.base.ops import CopyToHostSpec
from .._blocks import Block
from .._faults import Fault, FaultHit, FaultPlan, Faults
from .._host_pool import HostPool, Region
from .._operation import Launch
from ._channel import Message
from ._remote_copies import RemoteArray, StagedArray
from ._wire import decode_array, decode_spec, encode_array, encode_spec
from ._wire_errors import decode_error, encode_error

__all__ = ["ALLOCATIONS", "NAME", "OUTPUTS", "HostArrays", "HostCopy", "decode_launch", "encode_launch"]

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""


_transfers = itertools.count(1)


@attrs.define(eq=False)
class HostCopy:
    """A copy that the application makes between a host array and memory that it shares with the worker.

    Attributes:
        host: The array.
        is_upload: Whether it is read.
        region: Where it is copied to or from. None if that is the device's own memory: then the worker
            tells the place when its stream gets there.
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


class HostArrays:
    """The host arrays of one request, on the application's side; they are the same for every worker.

    Args:
        by_value: Those up to so many bytes travel with the messages.
        pool: Memory that the device transfers from and to by itself. None if the application has the
            device's memory mapped.

    Attributes:
        copies: Those that the application copies, by index.
        is_written: Whether the worker writes to memory of the application.
    """

    __slots__ = ("_by_value", "_filled", "_next", "_pool", "copies", "is_written")

    def __init__(self, by_value: int, pool: HostPool | None) -> None:
        self._by_value = by_value
        self._pool = pool
        self._filled: list[npt.NDArray[Any]] = []
        self._next = 0
        self.copies: list[HostCopy] = []
        self.is_written: bool = False

    def begin(self) -> None:
        """The request is told to a worker, from its first host array on."""
        self._filled.clear()
        self._next = 0

    def read(self, host: npt.NDArray[Any]) -> Message:
        """How the worker gets a host array: from shared memory, by value, or by a copy."""
        known = self._find(host)
        if known is not None:
            return known
        if host.nbytes <= self._by_value:
            return "value", encode_array(host)
        return self._copy(host, is_upload=True)

    def write(self, host: npt.NDArray[Any]) -> Message:
        """How a host array is filled: by the device itself, from the reply, or by a copy."""
        known = self._find(host)
        if known is not None:
            self.is_written = True
            return known
        if host.nbytes > self._by_value:
            return self._copy(host, is_upload=False)
        self._filled.append(host)
        return "result", DType.of(host.dtype).value, host.shape

    def fill(self, results: Any) -> None:
        """Fill host arrays from the reply."""
        for host, data in zip(self._filled, results, strict=True):
            np.copyto(host, decode_array(data))

    def clear(self) -> None:
        """The request is over: what it had of the pool goes back."""
        self.copies.clear()
        self._filled.clear()

    def _find(self, host: npt.NDArray[Any]) -> Message | None:
        if self._pool is None or not host.flags.c_contiguous:
            return None
        place = self._pool.find(host)
        return None if place is None else _shared(*place, host, None)

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
        if self._pool is None:
            return None
        try:
            return self._pool.region(nbytes)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"there is no host memory to bring {nbytes} bytes to the device by way of; make the array "
                "with device.host_empty(), which needs none, or in smaller parts",
                requested=nbytes,
                free=available_bytes(),
                total=total_bytes(),
            ) from error


def _shared(slab: int, offset: int, host: npt.NDArray[Any], transfer: int | None) -> Message:
    return "shared", slab, offset, DType.of(host.dtype).value, host.shape, transfer


def encode_launch(launch: Launch, hosts: HostArrays) -> Message:
    """Make plain values of a launch.

    Raises:
        TypeError: The specification holds what cannot cross.
    """
    host = hosts.write if isinstance(launch.spec, CopyToHostSpec) else hosts.read
    return (
        launch.name,
        launch.library,
        encode_spec(launch.spec, host),
        launch.allocations,
        tuple([encode_spec(staged, hosts.read) for staged in launch.staged]),
        tuple([block.id for block in launch.outputs]),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else _encode_fault(launch.fault.fault),
    )


def decode_launch(
    data: Any,
    number: int,
    block: Callable[[int], Block],
    shared: Callable[..., npt.NDArray[Any] | StagedArray],
    results: list[npt.NDArray[Any]],
) -> Launch:
    """Make a launch of what `encode_launch` made of it.

    Args:
        data: From `encode_launch`.
        number: Number of the request.
        block: Finds the block of an id.
        shared: Makes an array over memory of the application's.
        results: Takes the host arrays that are to travel with the reply.

    Raises:
        ImportError: This process does not have the specification's module.
    """
    name, library, spec, allocations, staged, outputs, uses, fault = data

    def host(plain: Any) -> npt.NDArray[Any]:
        kind, *rest = plain
        if kind == "value":
            return decode_array(rest[0])
        if kind == "copy":
            return cast("npt.NDArray[Any]", RemoteArray(number, rest[0]))
        if kind == "shared":
            return cast("npt.NDArray[Any]", shared(*rest))
        results.append(_empty(*rest))
        return results[-1]

    return Launch(
        name,
        decode_spec(spec, host),
        allocations,
        cast("Any", tuple([decode_spec(copy, host) for copy in staged])),
        [block(output) for output in outputs],
        [(argument, block(used)) for argument, used in uses],
        [],
        library,
        None if fault is None else FaultHit(FaultPlan(name, _decode_fault(fault), 1), Faults()),
        number,
    )


def _empty(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.empty(shape, DType(dtype).dtype)


def _encode_fault(fault: Fault) -> Message:
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def _decode_fault(data: Any) -> Fault:
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
