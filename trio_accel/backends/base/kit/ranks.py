"""Ranks inside of programs: how a method meets methods on other devices (D196).

On processors, the ranks of one host meet in a shared memory file, a room. Each rank writes only to its own
places.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, reduce
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from ..contract.dtypes import DType, HostArray
from ..contract.errors import Refused
from ..contract.ops import Asker

Reduction: TypeAlias = Literal["sum", "prod", "min", "max", "mean"]
Pair: TypeAlias = "tuple[Any, int]"
"""An array, and the rank that gets it or gives it."""

Way: TypeAlias = "Iterator[None]"

_LOCK, _END = threading.Lock(), object()
_RANK: ContextVar[ProgramRank | None] = ContextVar("trio_accel.rank", default=None)

MEETING: ContextVar[Mapping[str, Any] | None] = ContextVar("trio_accel.meeting", default=None)
"""In the application: the description of a meeting for a rank of a call of all ranks, as plain values."""

# Bytes of half a place for all ranks, and of half a place for a pair.
_HALF, _PAIR_HALF = 1 << 20, 1 << 18
# Words of a place: the last call begun, the last call ended, the pieces written, the pieces read.
_BEGUN, _ENDED, _READY, _READ = range(4)
# Polls without a pause; by how much a pause grows, and the longest pause, in seconds.
_EAGER, _LONGER, _LONGEST = 50, 2e-5, 1e-3
_OPERATIONS: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

ENDED, MISMATCH, REPEATED = "ENDED", "MISMATCH", "AGAIN"
"""Codes of a `Refused`: another rank has failed; ranks do not call the same; a call runs a second time."""

ENDED_TEXTS = ("the call was ended, as another rank has failed", "the ranks no longer meet")
"""The texts of refusals with the code `ENDED`."""


def current_rank() -> ProgramRank:
    """Return the rank of the call that runs, in a method that `World.call` asks for.

    Raises:
        RuntimeError: The method was asked for in another way.
    """
    rank = _RANK.get()
    if rank is None:
        raise RuntimeError("current_rank: the method was not called by World.call, so its rank is undefined")
    return rank


@contextmanager
def as_rank(rank: ProgramRank | None) -> Generator[None]:
    """Let the code inside be a rank."""
    token = _RANK.set(rank)
    try:
        if rank is not None:
            rank.begin()
        yield
        # After an error, other ranks must not take this rank for one that calls less often than they do.
        if rank is not None:
            rank.end()
    finally:
        _RANK.reset(token)


class ProgramRank(ABC):
    """One rank inside of a method; `current_rank` returns it.

    All ranks call the same methods in the same order, with arrays of the same sizes and dtypes. These are
    arrays of NumPy, PyTorch or CuPy, C-contiguous, where the program computes. On a GPU a call enqueues, on a
    processor it returns when the result is there.

    Attributes:
        number: Its number.
        size: How many ranks there are.
    """

    def __init__(self, meeting: Mapping[str, Any], by: Any, name: str = "") -> None:
        # A group is made of these, and its name; the group of all has an empty name.
        self._meeting, self._by = meeting, by
        self._room, ranks = meeting["rooms"][name]
        self.number: int = list(ranks).index(meeting["number"])
        self.size: int = len(ranks)
        self._groups: dict[str, ProgramRank] = {}

    def group(self, name: str) -> ProgramRank:
        """Return this rank within a group of `World.call`.

        Raises:
            KeyError: The group does not exist.
        """
        if name not in self._groups:
            self._groups[name] = type(self)(self._meeting, self._by, name)
            self._groups[name].begin()
        return self._groups[name]

    def all_reduce(self, array: Any, reduction: Reduction = "sum", *, stream: Any = None) -> None:
        """Reduce the arrays of all ranks, in the order of these, to each of them in place.

        float16 and bfloat16 are added in float32 and rounded once; NCCL rounds after each addition.

        Args:
            array: The array of this rank.
            reduction: How.
            stream: On a GPU the stream, as a handle or an object of PyTorch or CuPy; by default the call's.
        """
        self._ask("all_reduce", array, array, stream, reduction)

    def reduce_scatter(
        self, array: Any, out: Any, reduction: Reduction = "sum", *, stream: Any = None
    ) -> None:
        """Reduce the arrays of all ranks, and write this rank's part along the first axis to `out`."""
        self._ask("reduce_scatter", array, out, stream, reduction)

    def all_gather(self, array: Any, out: Any, *, stream: Any = None) -> None:
        """Join the arrays of all ranks along the first axis, in `out`."""
        self._ask("all_gather", array, out, stream)

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> None:
        """Copy the array of rank `root` to the arrays of all other ranks."""
        self._check_rank("broadcast", root)
        self._ask("broadcast", array, array, stream, root=root)

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair], *, stream: Any = None) -> None:
        """Send arrays to ranks, and receive some from ranks, at the same time."""
        moves = [("send", *pair) for pair in sends] + [("recv", *pair) for pair in receives]
        for _, _, rank in moves:
            self._check_rank("exchange", rank)
        self._move([(name, Memory.of(array), rank) for name, array, rank in moves], stream)

    def send(self, array: Any, to: int, *, stream: Any = None) -> None:
        """Send an array to a rank, which receives it."""
        self.exchange([(array, to)], [], stream=stream)

    def recv(self, out: Any, source: int, *, stream: Any = None) -> None:
        """Receive an array that a rank sends."""
        self.exchange([], [(out, source)], stream=stream)

    @abstractmethod
    def begin(self) -> None:
        """Come to the call."""

    def end(self) -> None:
        """Leave the call."""
        for group in self._groups.values():
            group.end()

    def _ask(
        self, kind: str, array: Any, out: Any, stream: Any, reduction: str = "", root: int | None = None
    ) -> None:
        source, target = Memory.of(array), Memory.of(out)
        full, part = (target, source) if kind == "all_gather" else (source, target)
        parts = self.size if kind in ("all_gather", "reduce_scatter") else 1
        if part.size * parts != full.size or source.dtype is not target.dtype:
            problem = f"{source.size} {source.dtype} do not fit to {target.size} {target.dtype}"
            raise ValueError(f"{kind} of {self.size} ranks: {problem}")
        self._meet(Collective(kind, source, target, reduction, root), stream)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}: rank {rank} does not exist in a world of {self.size}")

    @abstractmethod
    def _meet(self, asked: Collective, stream: Any) -> None:
        """Run a collective with arrays that fit."""

    @abstractmethod
    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """Run an `exchange`."""


@attrs.frozen
class Memory:
    """The address, dtype and size of an array without gaps."""

    address: int
    dtype: DType
    size: int

    @classmethod
    def of(cls, array: Any) -> Memory:
        """Return the memory of a NumPy, PyTorch or CuPy array.

        Raises:
            TypeError: It is not such an array.
            ValueError: It is not C-contiguous.
        """
        if hasattr(array, "data_ptr"):
            dtype, is_packed = DType(str(array.dtype).removeprefix("torch.")), array.is_contiguous()
            address, shape = array.data_ptr(), tuple(array.shape)
        else:
            names = ("__cuda_array_interface__", "__array_interface__")
            interface = next((getattr(array, name) for name in names if hasattr(array, name)), None)
            if interface is None:
                raise TypeError(f"a rank takes arrays of NumPy, PyTorch or CuPy, got {type(array).__name__}")
            dtype, is_packed = DType.of(np.dtype(array.dtype)), interface.get("strides") is None
            address, shape = interface["data"][0], tuple(interface["shape"])
        if not is_packed:
            raise ValueError(f"a rank takes C-contiguous arrays, got one of shape {shape} with gaps")
        return cls(address, dtype, math.prod(shape))

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size * self.dtype.itemsize

    def part(self, first: int, size: int) -> Memory:
        """Return some elements."""
        return Memory(self.address + first * self.dtype.itemsize, self.dtype, size)

    def on_host(self) -> HostArray:
        """Return memory of the host as an array of NumPy, with one axis."""
        memory: Any = (ctypes.c_byte * self.nbytes).from_address(self.address)
        return np.ndarray(self.size, self.dtype.dtype, memory)


Move: TypeAlias = tuple[str, Memory, int]
"""``"send"`` or ``"recv"``, an array, and the other rank."""


@attrs.frozen
class Collective:
    """A collective that a rank calls.

    Attributes:
        kind: Name of the method.
        source: The array of this rank.
        target: The array for its result, which may be the same.
        reduction: How elements are combined; empty if they are not.
        root: The only rank that gives or gets an array; None without one.
    """

    kind: str
    source: Memory
    target: Memory
    reduction: str
    root: int | None


def room_of(size: int) -> np.dtype[Any]:
    """Return the layout of a room for `size` ranks.

    Each rank has a place for all ranks, and one for each other rank. One rank writes to a place: words, and
    two halves with a text each. A piece is written to one half while others read the previous piece from the
    other half. The writer announces it by a word after the data. Stores of x86 are visible in their order; on
    other processors the lock is a barrier.
    """
    of_all, of_one = [
        np.dtype([("words", np.int64, 8), ("texts", "S192", 2), ("halves", np.uint8, (2, half))])
        for half in (_HALF, _PAIR_HALF)
    ]
    return np.dtype([("ranks", of_all, size), ("pairs", of_one, (size, size))])


@lru_cache(maxsize=8)
def _mapped(path: str, file_number: int, size: int) -> Any:
    """Map the room of some ranks; the number distinguishes successive files with the same descriptor."""
    return np.asarray(np.memmap(path, room_of(size), "r+", shape=()))


def last_calls(path: str, size: int, call: int) -> Iterator[tuple[int, str]]:
    """Yield for each rank of a room its number of collectives in a call, and its last collective.

    Args:
        path: See `RoomRank`.
        size: The number of ranks.
        call: The number of the call.
    """
    for slot in _mapped(path, os.stat(path).st_ino, size)["ranks"]:
        of, count = divmod(int(slot["words"][_READY]), 1 << 32)
        yield (count, slot["texts"][count % 2].decode(errors="replace")) if of == call else (0, "")


def forget_rooms() -> None:
    """Let the memory of rooms go that nobody is in."""
    _mapped.cache_clear()


class RoomRank(ProgramRank):
    """A rank in shared memory.

    Words have the number of the call in their upper half, so words of an earlier call are recognized.

    Args:
        meeting: The number of the rank, and the number of the call, above all before. For each group its
            file, which the application holds open, and its ranks.
        by: The caller: it may have left, and it sees while the rank waits for others.
        name: The group.
    """

    def __init__(self, meeting: Mapping[str, Any], by: Asker, name: str = "") -> None:
        super().__init__(meeting, by, name)
        self._call: int = meeting["call"]
        self._counts: Counter[tuple[int, int]] = Counter()
        room = _mapped(self._room, os.stat(self._room).st_ino, self.size)
        self._slots, self._pairs = room["ranks"], room["pairs"]

    def begin(self) -> None:
        """See `ProgramRank`."""
        words = self._slots[self.number]["words"]
        if words[_BEGUN] == self._call:
            # A worker was lost, and the next worker got its call again, while the other ranks continued.
            raise Refused(f"rank {self.number} has begun this call before", code=REPEATED)
        words[_BEGUN] = self._call

    def end(self) -> None:
        """See `ProgramRank`."""
        super().end()
        self._slots[self.number]["words"][_ENDED] = self._call

    def _meet(self, asked: Collective, stream: Any) -> None:
        """See `ProgramRank`. All ranks write pieces, one after the other, and read the pieces of all."""
        host, out, root = asked.source.on_host(), asked.target.on_host(), asked.root
        # The offset of this rank's part in a reduced array, and the distance of ranks in a gathered one.
        start = self.number * out.size if asked.kind == "reduce_scatter" else 0
        step = host.size if asked.kind == "all_gather" else 0
        label = f"{asked.kind}({asked.reduction if root is None else root}) of {host.size} {host.dtype}"
        slot, piece_size = self._slots[self.number :][:1], max(1, _HALF // host.itemsize)
        for first in range(0, max(host.size, 1), piece_size):
            number, chunk = self._next(-1, -1), host[first : first + piece_size]
            parts = [chunk if root in (None, rank) else chunk[:0] for rank in range(self.size)]
            text = f"number {number}, {label}"
            put = self._put(slot, self._slots, number, text, parts[self.number])
            come = self._come(self._slots, number, text, range(self.size))
            self._run([(itertools.chain(put, come), range(self.size))], label)
            halves = self._slots["halves"][:, number % 2]
            pieces = [half[: part.nbytes].view(part.dtype) for half, part in zip(halves, parts, strict=True)]
            if not asked.reduction:
                for rank, piece in enumerate(pieces):
                    out[rank * step + first :][: len(piece)] = piece
            elif (low := max(first, start)) < (high := min(first + len(chunk), start + out.size)):
                chosen = [piece[low - first : high - first] for piece in pieces]
                out[low - start : high - start] = _reduced(chosen, asked.reduction)
            slot["words"][0, _READ] = self._word(number)

    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """See `ProgramRank`."""
        functions = {"send": self._sent, "recv": self._received}
        ways = [(functions[name](memory.on_host(), rank), [rank]) for name, memory, rank in moves]
        self._run(ways, f"exchange: {', '.join(f'{name} {rank}' for name, _, rank in moves)}")

    def _sent(self, host: Any, to: int) -> Way:
        slot, data = self._pairs[self.number, to : to + 1], host.view(np.uint8)
        for first in range(0, max(data.size, 1), _PAIR_HALF):
            part, number = data[first : first + _PAIR_HALF], self._next(self.number, to)
            yield from self._put(slot, slot, number, f"an exchange of {host.size} {host.dtype}", part)

    def _received(self, out: Any, source: int) -> Way:
        slot, data = self._pairs[source, self.number :][:1], out.view(np.uint8)
        for first in range(0, max(data.size, 1), _PAIR_HALF):
            part, number = data[first : first + _PAIR_HALF], self._next(source, self.number)
            yield from self._come(slot, number, f"an exchange of {out.size} {out.dtype}", [source])
            part[:] = slot["halves"][0, number % 2, : part.size]
            # The reader has a word of its own in the writer's place.
            slot["words"][0, _READ] = self._word(number)

    def _next(self, source: int, to: int) -> int:
        self._counts[source, to] += 1
        return self._counts[source, to]

    def _put(self, slot: Any, readers: Any, number: int, text: str, piece: Any) -> Way:
        """Write a piece when all have read the one before the last."""
        while not self._have(readers, _READ, number - 2):
            yield
        slot["texts"][0, number % 2] = text.encode()
        slot["halves"][0, number % 2, : piece.nbytes] = piece.view(np.uint8)
        slot["words"][0, _READY] = self._word(number)

    def _come(self, slots: Any, number: int, text: str, ranks: Sequence[int]) -> Way:
        """Wait for a piece of ranks, and require that they call the same."""
        while not self._have(slots, _READY, number):
            yield
        for rank, encoded in zip(ranks, slots["texts"][:, number % 2].tolist(), strict=True):
            if encoded != text.encode():
                said = encoded.decode(errors="replace")
                raise _mismatch(f"rank {rank} asks for {said} where rank {self.number} asks for {text}")

    def _word(self, number: int) -> int:
        return (self._call << 32) + number

    def _have(self, slots: Any, word: int, number: int) -> bool:
        """Return whether all ranks have reached a piece, or there is none to reach."""
        with _LOCK:
            return number <= 0 or min(slots["words"][:, word].tolist()) >= self._word(number)

    def _run(self, ways: Sequence[tuple[Way, Sequence[int]]], label: str) -> None:
        """Go all ways to their ends, whichever can go on; each has the ranks that it waits for."""
        pause, remaining = 0.0, list(ways)
        try:
            for attempt in itertools.count():
                remaining = [entry for entry in remaining if next(entry[0], _END) is not _END]
                if not remaining:
                    return
                if attempt < _EAGER:
                    continue
                # The rank that it waits for has a limit of its own.
                self._by.waits_for_others = True
                if self._by.has_left:
                    raise Refused(f"{label}: {ENDED_TEXTS[0]}", code=ENDED)
                for way, ranks in remaining:
                    ended = [rank for rank in ranks if self._slots[rank]["words"][_ENDED] == self._call]
                    # A rank may have given something before its end: this is the last look for it.
                    if ended and next(way, _END) is not _END:
                        problem = (
                            f"rank {ended[0]} has ended its call, and rank {self.number} waits in {label}"
                        )
                        raise _mismatch(problem)
                time.sleep(pause)
                pause = min(pause + _LONGER, _LONGEST)
        finally:
            self._by.waits_for_others = False


def _mismatch(problem: str) -> Refused:
    return Refused(f"ranks do not call the same: {problem}", code=MISMATCH)


def _reduced(pieces: Sequence[Any], reduction: str) -> Any:
    """Reduce pieces in the order of the ranks; narrow ones in float32."""
    dtype = pieces[0].dtype
    is_narrow = DType.of(dtype).kind == "float" and dtype.itemsize == 2
    wide = [piece.astype(np.float32) for piece in pieces] if is_narrow else list(pieces)
    result = reduce(_OPERATIONS["sum" if reduction == "mean" else reduction], wide)
    return result / len(pieces) if reduction == "mean" else result
