"""Ranks inside of programs on GPUs: they enqueue collectives of NCCL on a stream (D196)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver

from ...base import DType, LibraryError, Refused
from ...base.kit.ranks import AGAIN, ENDED, Collective, Move, ProgramRank
from .nccl import OPEN, TYPES, enqueue, exchange


class NcclRank(ProgramRank):
    """A rank of a communicator that the application has had opened.

    The number of that is the room; it is 0 where there is one rank. The stream of the call is what it is
    called by.
    """

    def begin(self) -> None:
        """See `ProgramRank`."""
        if self._room:
            try:
                OPEN.find(self._room)
            except LibraryError as error:
                raise Refused(f"rank {self.number} has a new worker: {error.message}", code=AGAIN) from error

    def _meet(self, asked: Collective, stream: Any) -> None:
        """See `ProgramRank`."""
        given, own, handle = asked.given, asked.own, self._handle(stream)
        if asked.reduction and (given.dtype not in TYPES or given.dtype is DType.bool):
            raise TypeError(f"NCCL reduces no {given.dtype}")
        if self.size > 1:
            self._run(lambda one: enqueue(one, asked, handle))
        elif given.nbytes and given.address != own.address:
            driver.cuMemcpyDtoDAsync(own.address, given.address, given.nbytes, handle)

    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """See `ProgramRank`."""
        handle = self._handle(stream)
        self._run(lambda one: exchange(one, moves, handle))

    def _run(self, call: Callable[[Any], object]) -> None:
        try:
            communicator = OPEN.find(self._room)
            communicator.call(call)
            communicator.settle()
        except LibraryError as error:
            raise Refused(f"the ranks do not meet any more: {error.message}", code=ENDED) from error

    def _handle(self, stream: Any) -> int:
        """Return the handle of a stream of PyTorch or CuPy, or the call's."""
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                return int(getattr(stream, name))
        return int(self._by) if stream is None else int(stream)
