"""A graph's use of each array, and the places of intermediate results."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel import linalg
from trio_accel.backends.base import DType, KeptCounts
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopySpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    OperationSpec,
)
from trio_accel.backends.base.kit.kept_chains import KeptChains, with_words
from trio_accel.backends.cpu.runtime._stream import CpuStream
from trio_accel.devices import Recorded
from trio_accel.devices.front._layout import lay_out

F64 = DType.float64


def vector(block: int, n: int = 4, offset: int = 0) -> ArraySpec:
    return ArraySpec(block, offset, F64, (n,), (8,))


X, Y, MADE, OTHER = 10, 11, 20, 21

CHAINS: list[tuple[list[OperationSpec], str]] = [
    ([CopySpec(vector(X), vector(Y))], "write"),
    ([CopySpec(vector(X), vector(Y)), linalg.scal.spec(2.0, vector(Y))], "write"),
    ([linalg.scal.spec(2.0, vector(Y)), CopySpec(vector(X), vector(Y))], "update"),
    ([CopySpec(vector(Y), vector(MADE)), CopySpec(vector(X), vector(Y))], "update"),
    ([CopySpec(vector(X, 2), vector(Y, 2))], "update"),
    ([CopySpec(vector(X, 2), vector(Y, 2, 16)), CopySpec(vector(X), vector(Y))], "update"),
    ([linalg.axpy.spec(1.0, vector(Y), vector(X))], "read"),
    ([CopySpec(vector(X), vector(MADE))], "none"),
]


@pytest.mark.parametrize(("specs", "use"), CHAINS)
def test_uses(specs: list[OperationSpec], use: str) -> None:
    nodes = [GraphNode("test", "blas", spec) for spec in specs]
    recorded = Recorded(nodes, (X, Y), {}, {MADE: 32})
    layout = lay_out(recorded, [("x", vector(3)), ("y", vector(4))], [])
    assert [argument.use for argument in layout.inputs][1] == use


def test_places() -> None:
    """Inputs by use, then what is returned, then the rest in one array."""
    nodes = [
        GraphNode("test", "blas", CopySpec(vector(X, 2, 64), vector(MADE, 2))),
        GraphNode("test", "blas", CopySpec(vector(MADE, 2), vector(OTHER, 2))),
        GraphNode("test", "blas", CopySpec(vector(OTHER, 2), vector(22, 2))),
        GraphNode("test", "blas", linalg.axpy.spec(1.0, vector(22, 2), vector(Y, 2))),
    ]
    recorded = Recorded(nodes, (Y, X), {}, {MADE: 16, OTHER: 16, 22: 16})
    layout = lay_out(recorded, [("y", vector(3, 2)), ("x", vector(4, 2, 48))], [OTHER, OTHER])
    # x is read, y is updated; then follow the results, and the memory of the others.
    first, second, third, last = [node.spec for node in layout.recipe.nodes]
    assert first == CopySpec(vector(0, 2, 16), vector(3, 2))
    assert second == CopySpec(vector(3, 2), vector(2, 2))
    assert third == CopySpec(vector(2, 2), vector(3, 2))
    assert last == linalg.axpy.spec(1.0, vector(3, 2), vector(1, 2))
    assert (dict(layout.output_sizes), layout.scratch) == ({OTHER: 16}, 256)
    arrays = (vector(7, 2, 8), vector(8, 2), vector(9, 2), ArraySpec(6, 0, DType.uint8, (256,), (1,)))
    assert layout.recipe.bind(arrays)[0] == CopySpec(vector(7, 2, 24), vector(6, 2))


def test_each_run_has_status_words_of_its_own() -> None:
    """Neither the recipe nor a binding has words that a run writes, on any stream."""
    arrays = [ArraySpec(block, 0, F64, (2, 2), (16, 8)) for block in (0, 1)]
    of_recipe = np.zeros(1, np.int32)
    spec = linalg.cholesky.spec(arrays[0], False, arrays[1], of_recipe)
    encoded = GraphRecipe([GraphNode("linalg.Cholesky", "solver", spec)]).encode()
    chain = GraphSpec(encoded, False, (arrays[0],), (), (arrays[1],))
    kept = KeptChains(SimpleNamespace(blocks={}, freed=0), KeptCounts())
    streams = [CpuStream(name) for name in ("first", "second")]
    bound = [kept.find(chain, stream).binding.nodes[0] for stream in streams]
    assert [one.info for _, one in bound] == [None, None]
    made: list[Any] = [with_words(*one) for one in (*bound, *bound)]
    words = [kept.recipe(encoded).nodes[0].spec.info, *[each.info for each in made]]
    assert not any(np.shares_memory(one, other) for one, other in combinations(words, 2))
    assert [each.shape for each in words] == [(1,)] * 5
    # A stream has the same binding each time, because a library keeps what it has prepared with it.
    assert [kept.find(chain, stream).binding.nodes[0] for stream in streams] == bound
    counts = kept.plans.counts
    assert (counts.recorded, counts.bound, counts.hits) == (3, 2, 2)


def test_a_binding_ends_with_the_place_of_a_block() -> None:
    """The id of a dropped block is given again; other blocks are dropped without harm."""
    memory = SimpleNamespace(blocks={0: (b"", 8, (-1, 0, 0)), 1: (b"", 8, (-2, 0, 256))}, freed=0)
    kept = KeptChains(memory, KeptCounts())
    encoded = GraphRecipe([GraphNode("test", "blas", CopySpec(vector(0, 2), vector(1, 2)))]).encode()
    chain = GraphSpec(encoded, False, (vector(0, 2),), (), (vector(1, 2),))
    stream = CpuStream("one")
    first = kept.find(chain, stream).binding
    memory.freed += 1
    assert kept.find(chain, stream).binding is first
    memory.freed += 1
    memory.blocks[1] = b"", 8, (-3, 0, 512)
    plan = kept.find(chain, stream)
    assert plan.binding is not first
    assert (plan.state, plan.binding.locations) == ("bound", ((-1, 0, 0), (-3, 0, 512)))
    kept.plans.close()
    assert (plan.state, plan.binding, dict(kept.plans.plans)) == ("over", None, {})


def test_results_in_between_share_memory() -> None:
    """Each at an aligned offset, in the first gap among the arrays used before and later."""

    def copies(*pairs: tuple[int, int]) -> list[GraphNode]:
        return [GraphNode("test", "blas", CopySpec(vector(one, 1), vector(other, 1))) for one, other in pairs]

    # 30 lives until the end; 31 is over when 33 begins, and is too small for 34; 35 is used by nothing.
    nodes = copies((X, 30), (X, 31), (31, 32), (32, 33), (33, 34), (34, Y), (30, Y))
    sizes = {30: 8, 31: 300, 32: 8, 33: 257, 34: 1000, 35: 4096}
    layout = lay_out(Recorded(nodes, (X, Y), {}, sizes), [("x", vector(3)), ("y", vector(4))], [])
    made = [node.spec.outputs()[0] for node in layout.recipe.nodes[:5]]
    assert {array.block for array in made} == {2}
    # Rounded up, they have 256, 512, 256, 512 and 1024 bytes. 33 is where 31 was, and 34 where 32 was.
    assert [array.offset for array in made] == [0, 256, 768, 256, 768]
    assert layout.scratch == 768 + 1024


def _shared_as_before(spans: list[tuple[int, int, int]]) -> dict[int, int]:
    """Give each result the first gap among all that live with it, found by looking at each of them."""
    offsets: dict[int, int] = {}
    living: list[tuple[int, int, int]] = []
    for block, (first, last, nbytes) in enumerate(spans):
        living = [one for one in living if one[2] >= first]
        offset = 0
        for start, end, _ in sorted(living):
            if offset + nbytes <= start:
                break
            offset = end
        living.append((offset, offset + nbytes, last))
        offsets[block] = offset
    return offsets


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 1200)), min_size=1, max_size=40)
)
def test_each_result_has_the_first_gap(drawn: list[tuple[int, int, int]]) -> None:
    steps, lives, sizes = zip(*drawn, strict=True)
    first = np.cumsum(steps).tolist()
    last = [one + more for one, more in zip(first, lives, strict=True)]
    count = max(last) + 1
    nodes: list[GraphNode] = []
    for number in range(count):
        used = [
            vector(100 + block, 1) for block in range(len(drawn)) if number in (first[block], last[block])
        ]
        nodes.append(GraphNode("test", "graphs", GraphSpec(b"", False, tuple(used), (), ())))
    layout = lay_out(Recorded(nodes, (), {}, {100 + block: size for block, size in enumerate(sizes)}), [], [])
    rounded = [-(-size // 256) * 256 for size in sizes]
    expected = _shared_as_before(list(zip(first, last, rounded, strict=True)))
    assert layout.positions == {100 + block: (0, offset) for block, offset in expected.items()}
    assert layout.scratch == max(offset + rounded[block] for block, offset in expected.items())
