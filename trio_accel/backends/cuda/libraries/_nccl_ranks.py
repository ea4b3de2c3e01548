"""Ranks inside of programs on GPUs: they enqueue collectives of NCCL on a stream (D196)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda.bindings import driver

from ...base import DType, LibraryError, Refused
from ...base.kit.ranks import AGAIN, ENDED, Pair, ProgramRank, Reduction, described
from .nccl import BYTES, OPEN, REDUCTIONS, TYPES


class NcclRank(ProgramRank):
    """A rank of a communicator that the application has had opened.

    Args:
        number: Its number.
        size: How many ranks there are.
        communicator: The number of the communicator; 0 for a single rank, which has none.
        groups: The same three for each group.
        call: Not used here: the communicator is another one after a loss.
        stream: The stream of the call.
    """

    def __init__(
        self,
        number: int,
        size: int,
        communicator: int,
        groups: Mapping[str, Sequence[int]],
        call: int,
        stream: int,
    ) -> None:
        self.number, self.size = number, size
        self._communicator, self._groups, self._call, self._stream = communicator, groups, call, stream

    def begin(self) -> None:
        """See `ProgramRank`."""
        if self._communicator:
            try:
                OPEN.find(self._communicator)
            except LibraryError as error:
                raise Refused(f"rank {self.number} has a new worker: {error.message}", code=AGAIN) from error

    def end(self) -> None:
        """See `ProgramRank`."""

    def group(self, name: str) -> ProgramRank:
        """See `ProgramRank`."""
        number, size, communicator = self._groups[name]
        return NcclRank(number, size, communicator, {}, self._call, self._stream)

    def all_reduce(self, array: Any, reduction: Reduction = "sum", *, stream: Any = None) -> None:
        """See `ProgramRank`."""
        address, count, code, operation, _ = self._reducible(array, reduction)
        if self.size > 1:
            self._enqueue("all_reduce", stream, address, address, count, code, operation)

    def reduce_scatter(
        self, array: Any, out: Any, reduction: Reduction = "sum", *, stream: Any = None
    ) -> None:
        """See `ProgramRank`."""
        address, _, code, operation, nbytes = self._reducible(array, reduction)
        own, count, _, _, taken = self._reducible(out, reduction)
        self._check(taken * self.size == nbytes, "reduce_scatter", nbytes, taken)
        if self.size > 1:
            self._enqueue("reduce_scatter", stream, address, own, count, code, operation)
        else:
            self._copy(own, address, nbytes, stream)

    def all_gather(self, array: Any, out: Any, *, stream: Any = None) -> None:
        """See `ProgramRank`."""
        (address, nbytes), (whole, taken) = _memory(array), _memory(out)
        self._check(nbytes * self.size == taken, "all_gather", nbytes, taken)
        if self.size > 1:
            self._enqueue("all_gather", stream, address, whole, nbytes, BYTES)
        else:
            self._copy(whole, address, nbytes, stream)

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> None:
        """See `ProgramRank`."""
        address, nbytes = _memory(array)
        if self.size > 1:
            self._enqueue("broadcast", stream, address, address, nbytes, BYTES, root)

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair], *, stream: Any = None) -> None:
        """See `ProgramRank`."""
        handle = self._handle(stream)
        pieces = [("send", *_memory(array), rank) for array, rank in sends]
        pieces += [("recv", *_memory(array), rank) for array, rank in receives]

        def call(one: Any) -> None:
            one.nccl.group_start()
            try:
                for name, address, nbytes, rank in pieces:
                    getattr(one.nccl, name)(address, nbytes, BYTES, rank, one.comm, handle)
            finally:
                one.nccl.group_end()

        self._run(call)

    def _enqueue(self, name: str, stream: Any, *args: int) -> None:
        handle = self._handle(stream)
        self._run(lambda one: getattr(one.nccl, name)(*args, one.comm, handle))

    def _run(self, call: Callable[[Any], object]) -> None:
        try:
            communicator = OPEN.find(self._communicator)
            communicator.call(call)
            communicator.settle()
        except LibraryError as error:
            raise Refused(f"the ranks do not meet any more: {error.message}", code=ENDED) from error

    def _handle(self, stream: Any) -> int:
        """Return the handle of a stream of PyTorch or CuPy, or the call's."""
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                return int(getattr(stream, name))
        return self._stream if stream is None else int(stream)

    def _copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        if nbytes:
            driver.cuMemcpyDtoDAsync(to, source, nbytes, self._handle(stream))

    @staticmethod
    def _reducible(array: Any, reduction: Reduction) -> tuple[int, int, int, int, int]:
        """Return address, numbers, NCCL's codes of their type and of the reduction, and bytes."""
        address, dtype, shape = described(array)
        if dtype not in TYPES or dtype is DType.bool:
            raise TypeError(f"NCCL reduces no {dtype}")
        code, numbers = TYPES[dtype]
        size = math.prod(shape)
        return address, size * numbers, code, REDUCTIONS[reduction], size * dtype.itemsize

    @staticmethod
    def _check(is_right: bool, name: str, nbytes: int, taken: int) -> None:
        if not is_right:
            raise ValueError(f"{name}: {nbytes} bytes do not fit to {taken}")


def _memory(array: Any) -> tuple[int, int]:
    address, dtype, shape = described(array)
    return address, math.prod(shape) * dtype.itemsize
