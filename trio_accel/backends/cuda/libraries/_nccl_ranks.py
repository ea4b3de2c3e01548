"""Ranks inside of programs on GPUs: they enqueue collectives of NCCL on a stream (D196)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from cuda.bindings import driver

from ...base import DType, LibraryError, Refused
from ...base.kit.ranks import ENDED, ENDED_TEXTS, REPEATED, Collective, Move, ProgramRank
from ..runtime._signals import StatusWord, StatusWords
from .nccl import OPEN, TYPES, enqueue, exchange

_MASK = 0xFFFFFFFF


@attrs.define(eq=False)
class Marks:
    """The progress of a program's streams: each writes a number before a collective, and after it.

    Events would not do, because a query of an event ends a capture of PyTorch.

    Attributes:
        words: The words for the numbers.
        stream: The stream of the running call.
    """

    words: StatusWords
    stream: int = 0
    _pairs: dict[int, tuple[StatusWord, StatusWord]] = attrs.field(factory=dict[int, Any])

    @contextmanager
    def around(self, stream: int) -> Generator[None]:
        """Have a stream note when it reaches the work enqueued inside, and when it has finished it."""
        if stream not in self._pairs:
            self._pairs[stream] = self.words.take(), self.words.take()
        started, finished = self._pairs[stream]
        started.sequence += 1
        driver.cuStreamWriteValue32(stream, started.native, started.sequence & _MASK, 0)
        try:
            yield
        finally:
            driver.cuStreamWriteValue32(stream, finished.native, started.sequence & _MASK, 0)

    def wait_for_others(self) -> bool:
        """Return whether a stream is in a collective now. Any thread may call this."""
        return any(started.read() != finished.read() for started, finished in list(self._pairs.values()))


class NcclRank(ProgramRank):
    """A rank of a communicator that the application has had opened.

    Its room is the communicator's number, or 0 for a single rank. Its `by` is the program's `Marks`.
    """

    def begin(self) -> None:
        """See `ProgramRank`."""
        if self._room:
            try:
                OPEN.find(self._room)
            except LibraryError as error:
                raise Refused(
                    f"rank {self.number} has a new worker: {error.message}", code=REPEATED
                ) from error

    def _meet(self, asked: Collective, stream: Any) -> None:
        """See `ProgramRank`."""
        source, target, handle = asked.source, asked.target, self._handle(stream)
        if asked.reduction and (source.dtype not in TYPES or source.dtype is DType.bool):
            raise TypeError(f"NCCL reduces no {source.dtype}")
        if self.size > 1:
            self._run(lambda nccl_handle: enqueue(nccl_handle, asked, handle), handle)
        elif source.nbytes and source.address != target.address:
            driver.cuMemcpyDtoDAsync(target.address, source.address, source.nbytes, handle)

    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """See `ProgramRank`."""
        handle = self._handle(stream)
        self._run(lambda nccl_handle: exchange(nccl_handle, moves, handle), handle)

    def _run(self, call: Callable[[Any], object], stream: int) -> None:
        try:
            communicator = OPEN.find(self._room)
            with self._by.around(stream):
                communicator.call(call)
                communicator.settle()
        except LibraryError as error:
            raise Refused(f"{ENDED_TEXTS[1]}: {error.message}", code=ENDED) from error

    def _handle(self, stream: Any) -> int:
        """Return the handle of a PyTorch or CuPy stream, or of the call's stream."""
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                return int(getattr(stream, name))
        return int(self._by.stream) if stream is None else int(stream)
