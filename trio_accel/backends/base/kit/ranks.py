"""Ranks inside of programs: what a method meets those of other devices by (D196).

On processors, ranks of one host meet in shared memory, in a room. Each rank writes to its own places alone.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial, reduce
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..contract.dtypes import DType
from ..contract.errors import Refused
from ..contract.ops import Asker

Reduction: TypeAlias = Literal["sum", "prod", "min", "max", "mean"]
Pair: TypeAlias = "tuple[Any, int]"
"""An array, and the rank that gets it or gives it."""

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Way: TypeAlias = "Generator[None, None, None]"

_LOCK, _END = threading.Lock(), object()
_RANK: ContextVar[ProgramRank | None] = ContextVar("trio_accel.rank", default=None)

MEETING: ContextVar[Mapping[str, Any] | None] = ContextVar("trio_accel.meeting", default=None)
"""In the application: what a rank of a call of all ranks is told, as plain values."""

# Bytes of a half of a place for all ranks, and of one for a pair of them.
_HALF, _PAIR_HALF = 1 << 20, 1 << 18
# Words of a place: the last call that began, the last that ended, the pieces that are there, those read.
_BEGUN, _ENDED, _READY, _READ = range(4)
_TEXT, _HEAD = 192, 512
# Looks without a pause; by how much a pause grows, and the longest one, in seconds.
_EAGER, _LONGER, _LONGEST = 50, 2e-5, 1e-3
_PAGE = mmap.ALLOCATIONGRANULARITY
_OPERATIONS: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

ENDED, MISMATCH, AGAIN = "ENDED", "MISMATCH", "AGAIN"
"""Codes of a `Refused`: another rank has failed; ranks do not call the same; a call runs a second time."""


def current_rank() -> ProgramRank:
    """Return the rank of the call that runs, in a method that `World.call` asks for.

    Raises:
        RuntimeError: The method was asked for in another way.
    """
    rank = _RANK.get()
    if rank is None:
        raise RuntimeError("current_rank: the method has no rank; ask for it by World.call")
    return rank


@contextmanager
def as_rank(rank: ProgramRank | None) -> Generator[None, None, None]:
    """Let the code inside be a rank."""
    token = _RANK.set(rank)
    try:
        if rank is not None:
            rank.begin()
        yield
        # After an error, others must not take it for one that calls less than they do.
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

    def __init__(self, ranks: Sequence[int], number: int, *given: Any) -> None:
        self.number: int = list(ranks).index(number)
        self.size: int = len(ranks)
        # A group is made of these, and its name.
        self._given = given
        self._groups: dict[str, ProgramRank] = {}

    def group(self, name: str) -> ProgramRank:
        """Return this rank among those of a group that `World.call` was told of.

        Raises:
            KeyError: There is no such group.
        """
        if name not in self._groups:
            make: Any = type(self)
            self._groups[name] = make(*self._given, name)
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
        """Copy the array of rank `root` to those of all others."""
        self._check_rank("broadcast", root)
        self._ask("broadcast", array, array, stream, root=root)

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair], *, stream: Any = None) -> None:
        """Send arrays to ranks, and receive some from ranks, at the same time."""
        moves = [("send", *one) for one in sends] + [("recv", *one) for one in receives]
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
        given, own = Memory.of(array), Memory.of(out)
        whole, part = (own, given) if kind == "all_gather" else (given, own)
        parts = self.size if kind in ("all_gather", "reduce_scatter") else 1
        if part.size * parts != whole.size or given.dtype is not own.dtype:
            told = f"{given.size} {given.dtype} do not fit to {own.size} {own.dtype}"
            raise ValueError(f"{kind} of {self.size} ranks: {told}")
        self._meet(Collective(kind, given, own, reduction, root), stream)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}: there is no rank {rank} of {self.size}")

    @abstractmethod
    def _meet(self, asked: Collective, stream: Any) -> None:
        """Run a collective, whose arrays fit."""

    @abstractmethod
    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """Run an `exchange`."""


@attrs.frozen
class Memory:
    """Where an array without gaps is."""

    address: int
    dtype: DType
    size: int

    @classmethod
    def of(cls, array: Any) -> Memory:
        """Return that of an array of NumPy, PyTorch or CuPy.

        Raises:
            TypeError: It is none.
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

    def on_host(self) -> npt.NDArray[Any]:
        """Return memory of the host as an array of NumPy, with one axis."""
        if not self.size:
            return np.empty(0, self.dtype.dtype)
        memory: Any = (ctypes.c_byte * self.nbytes).from_address(self.address)
        return np.frombuffer(memory, self.dtype.dtype)


Move: TypeAlias = tuple[str, Memory, int]
"""``"send"`` or ``"recv"``, an array, and the other rank."""


@attrs.frozen
class Collective:
    """A collective that a rank asks for.

    Attributes:
        kind: Name of the method.
        given: The array of this rank.
        own: Where its result goes, which may be the same.
        reduction: How elements become one; empty where they do not.
        root: The rank that gives or gets an array alone; None for none.
    """

    kind: str
    given: Memory
    own: Memory
    reduction: str
    root: int | None


@lru_cache(maxsize=8)
def _mapped(path: str, file_number: int, first: int, size: int) -> mmap.mmap:
    """Map the room of some ranks; the number tells files apart that had one descriptor after the other."""
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, room_bytes(size), offset=first)
    finally:
        os.close(file)


def last_calls(path: str, first: int, size: int, call: int) -> Iterator[tuple[int, str]]:
    """Yield for each rank of a room how often it has come in a call, and to what it came last.

    Args:
        path: See `RoomRank`.
        first: Where the room begins.
        size: How many ranks it has.
        call: The number of the call.
    """
    memory = _mapped(path, os.stat(path).st_ino, first, size)
    for rank in range(size):
        place = _Place(memory, rank * (_HEAD + 2 * _HALF), _HALF)
        of, count = divmod(int(place.words[_READY]), 1 << 32)
        yield (count, place.text(count)) if of == call else (0, "")


def forget_rooms() -> None:
    """Let the memory of rooms go that nobody is in."""
    _mapped.cache_clear()


def room_bytes(size: int) -> int:
    """Return the bytes of a room of so many ranks."""
    nbytes = size * (_HEAD + 2 * _HALF) + size * size * (_HEAD + 2 * _PAIR_HALF)
    return -(-nbytes // _PAGE) * _PAGE


class _Place:
    """Where one rank writes, for all others or for one: words, and two halves with a text each.

    A piece is written to one half while others read the last one from the other. The writer says that it is
    there by a word behind the data. Stores of x86 are seen in their order; elsewhere the lock is a barrier.
    """

    def __init__(self, memory: mmap.mmap, first: int, half: int) -> None:
        self.words: Any = np.frombuffer(memory, np.int64, _HEAD // 8, first)
        self.half = half
        self._texts = memoryview(memory)[first + 64 : first + 64 + 2 * _TEXT]
        self._data: Any = np.frombuffer(memory, np.uint8, 2 * half, first + _HEAD)

    def write(self, number: int, text: str, piece: Bytes) -> None:
        """Write a piece."""
        side, told = number % 2, text.encode()[:_TEXT].ljust(_TEXT)
        self._texts[side * _TEXT : (side + 1) * _TEXT] = told
        self._data[side * self.half : side * self.half + piece.size] = piece

    def text(self, number: int) -> str:
        """Return the text of a piece."""
        return bytes(self._texts[number % 2 * _TEXT :][:_TEXT]).decode(errors="replace").rstrip()

    def read(self, number: int, nbytes: int) -> Bytes:
        """Return a piece, as it lies there."""
        first: int = number % 2 * self.half
        found: Bytes = self._data[first : first + nbytes]
        return found


class RoomRank(ProgramRank):
    """A rank in shared memory.

    Words have the number of the call in their upper half, so what an earlier call has left is seen as such.

    Args:
        path: The file, which the application holds open.
        rooms: For each group its offset in the file, and its ranks; the group of all has an empty name.
        number: The number of this rank.
        call: The number of the call, above all before.
        asker: The asker of the call: it may have left, and is told while the rank waits for others.
        name: The group.
    """

    def __init__(
        self,
        path: str,
        rooms: Mapping[str, tuple[int, Sequence[int]]],
        number: int,
        call: int,
        asker: Asker,
        name: str = "",
    ) -> None:
        first, ranks = rooms[name]
        super().__init__(ranks, number, path, rooms, number, call, asker)
        self._call, self._asker, self._name = call, asker, name
        self._counts: Counter[tuple[int, int]] = Counter()
        memory = _mapped(path, os.stat(path).st_ino, first, self.size)
        step = _HEAD + 2 * _PAIR_HALF
        pairs = self.size * (_HEAD + 2 * _HALF)
        self._places = [_Place(memory, rank * (_HEAD + 2 * _HALF), _HALF) for rank in range(self.size)]
        self._pairs = {
            (one, other): _Place(memory, pairs + (one * self.size + other) * step, _PAIR_HALF)
            for one in range(self.size)
            for other in range(self.size)
        }

    def begin(self) -> None:
        """See `ProgramRank`."""
        own = self._places[self.number].words
        if own[_BEGUN] == self._call:
            # A worker was lost, and the next one has got its call, where the others went on.
            raise Refused(f"rank {self.number} has begun this call before", code=AGAIN)
        own[_BEGUN] = self._call

    def end(self) -> None:
        """See `ProgramRank`."""
        super().end()
        self._places[self.number].words[_ENDED] = self._call

    def _meet(self, asked: Collective, stream: Any) -> None:
        """See `ProgramRank`. All give pieces, one after the other, and take from those of all."""
        host, out, root = asked.given.on_host(), asked.own.on_host(), asked.root
        # This rank's part begins here in what is reduced, and ranks are so far apart in what is joined.
        start = self.number * out.size if asked.kind == "reduce_scatter" else 0
        step = host.size if asked.kind == "all_gather" else 0

        def take(first: int, pieces: Sequence[Any]) -> None:
            if not asked.reduction:
                for rank, piece in enumerate(pieces):
                    out[rank * step + first :][: len(piece)] = piece
                return
            low, high = max(first, start), min(first + len(pieces[0]), start + out.size)
            if low < high:
                chosen = [piece[low - first : high - first] for piece in pieces]
                out[low - start : high - start] = _reduced(chosen, asked.reduction)

        if self.size == 1:
            take(0, [host.copy()])
            return
        what = f"{asked.kind}({asked.reduction if root is None else root}) of {host.size} {host.dtype}"
        each = max(1, _HALF // host.itemsize)
        for first in range(0, max(host.size, 1), each):
            piece = host[first : first + each]
            parts = [piece if root in (None, rank) else piece[:0] for rank in range(self.size)]
            way = self._met(f"number {self._counts[-1, -1] + 1}, {what}", parts, partial(take, first))
            self._run([(way, range(self.size))], what)

    def _move(self, moves: Sequence[Move], stream: Any) -> None:
        """See `ProgramRank`."""
        functions = {"send": self._sent, "recv": self._received}
        ways = [(functions[name](memory.on_host(), rank), [rank]) for name, memory, rank in moves]
        self._run(ways, f"exchange: {', '.join(f'{name} {rank}' for name, _, rank in moves)}")

    def _met(self, text: str, parts: Sequence[Any], take: Callable[[Sequence[Any]], None]) -> Way:
        self._counts[-1, -1] += 1
        number, places, own = self._counts[-1, -1], self._places, self._places[self.number]
        while not all(self._has(place, _READ, number - 2) for place in places):
            yield
        own.write(number, text, parts[self.number].view(np.uint8))
        own.words[_READY] = self._word(number)
        while not all(self._has(place, _READY, number) for place in places):
            yield
        for rank, place in enumerate(places):
            if place.text(number) != text:
                told = f"rank {rank} asks for {place.text(number)} where rank {self.number} asks for {text}"
                raise Refused(f"ranks do not call the same: {told}", code=MISMATCH)
        pairs = zip(places, parts, strict=True)
        take([place.read(number, part.nbytes).view(part.dtype) for place, part in pairs])
        own.words[_READ] = self._word(number)

    def _sent(self, host: Any, to: int) -> Way:
        place, data = self._pairs[self.number, to], host.view(np.uint8)
        for first in range(0, max(data.size, 1), _PAIR_HALF):
            self._counts[self.number, to] += 1
            number = self._counts[self.number, to]
            while not self._has(place, _READ, number - 2):
                yield
            place.write(number, f"{host.size} {host.dtype}", data[first : first + _PAIR_HALF])
            place.words[_READY] = self._word(number)

    def _received(self, out: Any, source: int) -> Way:
        place, data, text = self._pairs[source, self.number], out.view(np.uint8), f"{out.size} {out.dtype}"
        for first in range(0, max(data.size, 1), _PAIR_HALF):
            self._counts[source, self.number] += 1
            number = self._counts[source, self.number]
            while not self._has(place, _READY, number):
                yield
            if place.text(number) != text:
                told = f"rank {source} sends {place.text(number)}, and rank {self.number} receives {text}"
                raise Refused(f"ranks do not call the same: {told}", code=MISMATCH)
            part = data[first : first + _PAIR_HALF]
            part[:] = place.read(number, part.size)
            # The reader has a word of its own in the writer's place.
            place.words[_READ] = self._word(number)

    def _word(self, number: int) -> int:
        return (self._call << 32) + number

    def _has(self, place: _Place, word: int, number: int) -> bool:
        """Tell whether a rank has come to a piece, or has none to come to."""
        with _LOCK:
            return number <= 0 or int(place.words[word]) >= self._word(number)

    def _run(self, ways: Sequence[tuple[Way, Sequence[int]]], what: str) -> None:
        """Go all ways to their ends, whichever can go on; each has the ranks that it waits for."""
        try:
            self._go(ways, what)
        finally:
            self._asker.waits_for_others = False

    def _go(self, ways: Sequence[tuple[Way, Sequence[int]]], what: str) -> None:
        pause, left = 0.0, list(ways)
        for look in itertools.count():
            left = [each for each in left if next(each[0], _END) is not _END]
            if not left:
                return
            if look < _EAGER:
                continue
            # The one that it waits for has a limit of its own.
            self._asker.waits_for_others = True
            if self._asker.has_left:
                raise Refused(f"{what}: the call was ended, as another rank has failed", code=ENDED)
            for way, ranks in left:
                ended = [rank for rank in ranks if self._places[rank].words[_ENDED] == self._call]
                # A rank may have given something before its end: this is the last look for it.
                if ended and next(way, _END) is not _END:
                    told = f"rank {ended[0]} has ended its call, and rank {self.number} waits in {what}"
                    raise Refused(f"ranks do not call the same: {told}", code=MISMATCH)
            time.sleep(pause)
            pause = min(pause + _LONGER, _LONGEST)


def _reduced(pieces: Sequence[Any], reduction: str) -> Any:
    """Reduce pieces in the order of the ranks; narrow ones in float32."""
    dtype = pieces[0].dtype
    if dtype == np.bool_:
        return np.logical_and.reduce(pieces) if reduction in ("prod", "min") else np.logical_or.reduce(pieces)
    is_narrow = DType.of(dtype).kind == "float" and dtype.itemsize == 2
    wide = [piece.astype(np.float32) for piece in pieces] if is_narrow else list(pieces)
    made = reduce(_OPERATIONS["sum" if reduction == "mean" else reduction], wide)
    return made / len(pieces) if reduction == "mean" else made
