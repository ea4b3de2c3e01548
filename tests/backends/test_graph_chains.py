"""Replays of graphs on a kind of GPU that nobody has: the time of their capture, and the launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from trio_accel.backends.base import DType, InThread, KeptCounts, LibraryError, LibraryUsage
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    BranchSpec,
    FillSpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    LoopSpec,
    OperationSpec,
)
from trio_accel.backends.base.gpu.graphs import AnyChain, ChainLibrary, ChainSpec
from trio_accel.backends.base.kit.kernels import kernel

WHERE = ArraySpec(1, 0, DType.int64, (), ())
CONDITION = ArraySpec(2, 0, DType.int64, (), ())


class Stream:
    """The launched work, in order."""

    is_capturing = False

    def __init__(self) -> None:
        self.log: list[object] = []
        self.behind: list[Callable[[], None]] = []
        self.launched = 1

    def after(self, finisher: Callable[[], None]) -> None:
        self.behind.append(finisher)

    def copy_in(self, target: int, host: int, nbytes: int) -> None:
        self.log.append(f"{nbytes} bytes of {host} in")

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        self.log.append(f"{nbytes} bytes to {host} out")

    def end(self) -> None:
        """Do what is done on the host at the next event."""
        ended, self.behind = self.behind, []
        for finisher in ended:
            finisher()


class Pinned:
    """Memory of the host; the last returned piece is the next one."""

    def __init__(self) -> None:
        self.pieces = [ctypes.create_string_buffer(256) for _ in range(2)]
        self.free = [ctypes.addressof(piece) for piece in self.pieces]

    def take(self, nbytes: int) -> int:
        return self.free.pop()

    def give_back(self, nbytes: int, address: int) -> None:
        self.free.append(address)


class Capturing(Stream):
    is_capturing = True


class Fills:
    """A library of which a chain is made."""

    operations = frozenset({FillSpec.operation})

    def captures(self, spec: OperationSpec) -> bool:
        return True

    def prepare(self, spec: OperationSpec) -> None:
        return None

    def enqueue(self, spec: Any, stream: Stream) -> None:
        if spec.value < 0:
            raise LibraryError("below zero", library="fills", code="invalid_value")
        stream.log.append(spec.value)

    def close(self) -> None:
        self.operations = frozenset()


class Graphs(ChainLibrary):
    """The vendor's half: a graph is the list of captured calls."""

    name = "graphs"
    backend: ClassVar[str] = "none"

    def __init__(self) -> None:
        device = SimpleNamespace(
            validated_blocks=(),
            info=SimpleNamespace(name="none:0"),
            context=nullcontext(),
            usage_of=lambda library: LibraryUsage(),
            pinned=Pinned(),
            blocks=SimpleNamespace(blocks={}, freed=0),
            plan_counts=KeptCounts(),
        )
        super().__init__(device)
        self.base = self.freed = 0
        self.conditions: list[int] = []
        self.graphs: list[list[object]] = []
        self.refuses = ""

    @kernel(GraphSpec, backend="none", plan=ChainLibrary.plan_chain)
    @kernel(ChainSpec, backend="none", plan=ChainLibrary.plan_chain)
    @kernel(BranchSpec, backend="none", plan=ChainLibrary.plan_chain)
    @kernel(LoopSpec, backend="none", plan=ChainLibrary.plan_chain)
    def _replay(self, spec: AnyChain, call: Any) -> None:
        self.run_chain(spec, call.plan, call.stream)

    def enqueue(self, spec: Any, stream: Stream) -> None:
        prepare = self.prepare(spec)
        if prepare is not None:
            prepare()
        if not self.launch_chain(spec, stream):
            entry = self._kernel_of(spec)
            entry.function(spec, SimpleNamespace(plan=self._plan_of(spec, entry), stream=stream))

    def _open(self, name: str) -> Fills:
        return Fills()

    def _address(self, array: ArraySpec) -> int:
        return self.base + array.block

    def _freed(self) -> int:
        return self.freed

    def _failure(self) -> Exception | None:
        return None

    def _workspace(self, stream: Stream) -> int:
        return 0

    def _make_graph(self, stream: Stream, workspace: int, enqueue: Any, *, has_conditions: bool) -> Any:
        if self.refuses:
            raise RuntimeError(self.refuses)
        capturing = Capturing()
        enqueue(capturing)
        self.graphs.append(capturing.log)
        return stream, capturing.log

    def _is_in_place(self, graph: Any) -> bool:
        return True

    def _launch_graph(self, graph: Any) -> bool:
        stream, log = graph
        stream.log.append(tuple(log))
        return True

    def _discard(self, graph: Any) -> None:
        self.graphs.remove(graph[1])

    def _read(self, condition: ArraySpec, stream: Stream) -> int:
        return self.conditions.pop(0)

    def _write(self, count: ArraySpec, stream: Stream, turns: int) -> None:
        stream.log.append(f"{turns} turns")


def recipe(*values: int) -> bytes:
    place = ArraySpec(0, 0, DType.int64, (), ())
    return GraphRecipe(GraphNode(f"fill.{n}", "fills", FillSpec(n, place)) for n in values).encode()


def chain(*values: int) -> GraphSpec:
    return GraphSpec(recipe(*values), False, (), (), (WHERE,))


def test_a_chain_is_captured_before_its_fourth_launch_at_a_place() -> None:
    library, stream = Graphs(), Stream()
    for _ in range(5):
        library.enqueue(chain(1, 2), stream)
    assert stream.log == [1, 2, 1, 2, 1, 2, (1, 2), (1, 2)]
    assert library.graphs == [[1, 2]]
    # Elsewhere it is counted again.
    library.base, library.freed = 100, 1
    library.enqueue(chain(1, 2), stream)
    assert stream.log[8:] == [1, 2]
    library._close_libraries()  # as the vendor's half calls it
    assert library.graphs == []


def test_uncapturable_steps_run_one_by_one() -> None:
    library, stream = Graphs(), Stream()
    library.refuses = "not today"
    for _ in range(6):
        library.enqueue(chain(3), stream)
    assert stream.log == [3] * 6


def test_an_operation_that_fails_is_named_by_its_number() -> None:
    library, stream = Graphs(), Stream()
    with pytest.raises(LibraryError, match=r"^node 0 of the graph, fill.-1: below zero"):
        library.enqueue(chain(-1, 2), stream)
    # Enqueued work runs, and its error follows it.
    library.enqueue(chain(1, -2), stream)
    (finisher,) = stream.behind
    with pytest.raises(LibraryError, match=r"^node 1 of the graph, fill.-2: below zero"):
        finisher()


def test_conditions_are_read_when_they_are_not_captured() -> None:
    library, stream = Graphs(), Stream()
    branch = BranchSpec(CONDITION, True, recipe(1, 2), (), (WHERE,))
    loop = LoopSpec(CONDITION, 2, recipe(5), (), (WHERE,), WHERE)
    library.conditions = [7, 0, 1, 1, 0]
    assert isinstance(library.prepare(branch), InThread)
    library.enqueue(branch, stream)
    library.enqueue(branch, stream)
    library.enqueue(loop, stream)
    assert stream.log == [1, 2, 5, 5, "2 turns"]
    assert library.conditions == [0]


def request(*values: int, words: Any, host_data: bytes = b"abc") -> ChainSpec:
    return ChainSpec(recipe(*values), (0, 8, 5), host_data, (), (), (WHERE,), words)


def test_host_arrays_travel_by_one_piece_of_pinned_memory_with_the_chain() -> None:
    library, stream = Graphs(), Stream()
    pinned: Any = library._device.pinned
    place = pinned.free[-1]
    words = np.zeros(2, np.int32)
    for turn in range(5):
        library.enqueue(request(1, 2, words=words), stream)
        assert len(pinned.free) == 1
        assert ctypes.string_at(place, 3) == b"abc"
        # The device writes the result after the given array, at an address aligned for any dtype.
        ctypes.memmove(place + 64, bytes([turn] * 5), 5)
        stream.end()
        assert len(pinned.free) == 2
        assert words.tobytes() == bytes([turn] * 5 + [0] * 3)
    steps = [f"3 bytes of {place} in", 1, 2, f"5 bytes to {place + 64} out"]
    assert stream.log == steps * 3 + [tuple(steps)] * 2
    # A second one in flight has another piece, and runs one by one until that is also known.
    library.enqueue(request(1, 2, words=words), stream)
    library.enqueue(request(1, 2, words=words), stream)
    other = pinned.free
    assert not other
    assert stream.log[-5:] == [tuple(steps), *(stream.log[-4:])]
    assert str(place) not in str(stream.log[-4:])
    stream.end()
    assert len(pinned.free) == 2


def test_pinned_memory_returns_after_a_refused_chain() -> None:
    library, stream = Graphs(), Stream()
    pinned: Any = library._device.pinned
    words = np.zeros(2, np.int32)
    with pytest.raises(LibraryError, match="below zero"):
        library.enqueue(request(-1, words=words), stream)
    # Its copy was enqueued by then, and may not have run.
    assert len(pinned.free) == 1
    stream.end()
    assert len(pinned.free) == 2
    library.enqueue(request(1, -2, words=words), stream)
    assert len(pinned.free) == 1
    with pytest.raises(LibraryError, match="below zero"):
        stream.end()
    assert len(pinned.free) == 2
