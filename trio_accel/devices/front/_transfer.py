"""Copies of arrays from one device to another, by way of host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ...backends.base import AccelBackend, ContextPoisonedError
from ...backends.base.ops import CopyFromHostSpec
from ..arrays._ref import AccelRef, Device
from ..base._views import indexed
from ..operations._operation import Operation, Planned, Planner
from ._memory import MemoryActor, ToHost

__all__ = ["copy_between"]

_PATH = "trio_accel.devices:MemoryActor"
_PIECE = 16 << 20
_IN_FLIGHT = 3
"""Pieces on their way at a time: one leaves its device, one is copied by the host, one arrives."""

_Part: TypeAlias = tuple[slice, ...]


async def copy_between(backend: AccelBackend, source: AccelRef, target: Device) -> AccelRef:
    """Copy an array to another device, in pieces that are on their way at the same time.

    Takes host memory for three pieces of 16 MiB. None is taken where the host addresses the memory of the
    source: then the pieces are copied from there.

    Args:
        backend: Backend of the source.
        source: The array.
        target: The device.

    Raises:
        ContextPoisonedError, DeviceLostError, StaleRefError: As for `to_host` and `put`; nothing is left.
        OutOfMemoryError: There is not enough memory on the other device.
    """
    losses = 0
    while True:
        try:
            return await _copy(backend, source, target)
        except ContextPoisonedError as error:
            losses += 1
            if error.device != target.name or losses > target.options.retry:
                raise


async def _copy(backend: AccelBackend, source: AccelRef, target: Device) -> AccelRef:
    first, *others = _parts(source.shape, source.dtype.itemsize)
    async with AsyncExitStack() as stack:
        reader: _Reader
        if _is_addressed(backend):
            reader = _Shared(await stack.enter_async_context(source.lease()))
        else:
            reader = _Staged(source)
        out = await target.ask(PutFirst(await reader.read(first), source.shape, first))
        try:
            await _copy_parts(reader, out, others)
        except BaseException:
            # A kept error would keep the memory.
            out.release()
            raise
    return out


async def _copy_parts(reader: _Reader, out: AccelRef, parts: Iterable[_Part]) -> None:
    left = iter(parts)
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def carry(reader: _Reader) -> None:
            try:
                for part in left:
                    await out.device.ask(PutPart(await reader.read(part), out, part))
            except Exception as error:  # noqa: BLE001  # raised below, as it is and not in a group
                errors.append(error)
                nursery.cancel_scope.cancel(reason="another piece of the copy has failed")

        for one in (reader, *[reader.another() for _ in range(_IN_FLIGHT - 1)]):
            nursery.start_soon(carry, one)
    if errors:
        first = errors[0]
        errors.clear()
        try:
            raise first
        finally:
            # The error has this frame, which would have the error.
            del first


def _is_addressed(backend: AccelBackend) -> bool:
    """Whether the host addresses the memory of such a device."""
    return backend.shares_memory_with_host


class _Reader:
    """Gets pieces of an array to the host, one at a time."""

    async def read(self, part: _Part) -> npt.NDArray[Any]:
        """A piece; it may be overwritten with the next."""
        raise NotImplementedError

    def another(self) -> _Reader:
        """One for pieces of the same array."""
        raise NotImplementedError


class _Shared(_Reader):
    """Of an array that the host addresses."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    async def read(self, part: _Part) -> npt.NDArray[Any]:
        # With the dots it is an array in any case.
        index: tuple[Any, ...] = (*part, ...)
        piece: npt.NDArray[Any] = self._array[index]
        return piece

    def another(self) -> _Shared:
        return self


class _Staged(_Reader):
    """By way of memory that the source transfers to by itself, and that is used again for each piece."""

    def __init__(self, source: AccelRef) -> None:
        self._source = source
        self._memory: npt.NDArray[Any] | None = None

    async def read(self, part: _Part) -> npt.NDArray[Any]:
        piece = self._source[part]
        if self._memory is None:
            count = min(max(_PIECE // piece.dtype.itemsize, piece.size), self._source.size)
            self._memory = self._source.device.host_empty(count, piece.dtype)
        host = self._memory[: piece.size].reshape(piece.shape)
        return await self._source.device.ask(ToHost(piece, host))

    def another(self) -> _Staged:
        return _Staged(self._source)


@attrs.define(eq=False, on_setattr=None)
class PutFirst(Operation[MemoryActor, AccelRef]):
    """Make an array, and copy one part of it from the host; replies when that may be changed again."""

    host: npt.NDArray[Any]
    shape: tuple[int, ...]
    part: _Part
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        out = planner.output(self.shape, planner.dtype("host", self.host.dtype))
        planner.keep(self.host)
        return Planned(CopyFromHostSpec(self.host, indexed(out.spec, self.part)), out)


@attrs.define(eq=False, on_setattr=None)
class PutPart(Operation[MemoryActor, AccelRef]):
    """Copy another part of the array from the host."""

    host: npt.NDArray[Any]
    out: AccelRef
    part: _Part
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        planner.keep(self.host)
        out = indexed(planner.update("out", self.out), self.part)
        return Planned(CopyFromHostSpec(self.host, out), self.out)


def _parts(shape: Sequence[int], itemsize: int) -> Iterator[_Part]:
    """Cut an array into parts of so many bytes at most, each contiguous if the array is."""
    row = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    rows = _PIECE // row if row else 0
    if not shape or rows >= shape[0]:
        yield ()
    elif rows:
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
    else:
        for index in range(shape[0]):
            for rest in _parts(shape[1:], itemsize):
                yield (slice(index, index + 1), *rest)
