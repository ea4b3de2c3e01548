"""Sums of products with several tensors: numbers, orders by opt_einsum, and the memory that they take."""

from __future__ import annotations

import itertools
import math
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import check, extents_of, values, wide

import trio_accel as ta

opt_einsum: Any = import_module("opt_einsum")

# A chain, a star, a ring, a batch of bilinear forms, a diagonal, and a letter in only one tensor.
NETWORKS = [
    *("ij,jk,kl,lm->im", "ai,bi,ci->abc", "ab,bc,cd,da->", "bi,ij,bj->b", "ii,ij,jkk->k", "ij,jk,lm->im"),
    *("ab,cd,ef->acebdf", "bqhd,bkhd,bkhe->bqhe", "ij", "ijj->i", "ij,jk"),
]


@pytest.mark.parametrize("subscripts", NETWORKS)
async def test_einsum(device: ta.Device, subscripts: str) -> None:
    extents = {letter: 2 + ord(letter) % 4 for letter in subscripts if letter.isalpha()}
    shapes = [tuple(extents[x] for x in term) for term in subscripts.partition("->")[0].split(",")]
    for dtype in ("float32", "complex128"):
        arrays = [values(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        refs = [await device.put(array) for array in arrays]
        expected = np.einsum(subscripts, *map(wide, arrays))
        for optimize in ("auto", "greedy", "dp"):
            result = await ta.tensor.einsum(subscripts, *refs, optimize=optimize)
            await check(result, expected, math.prod(extents.values()))
        await check(await ta.linalg.einsum(subscripts, *refs), expected, math.prod(extents.values()))


@st.composite
def networks(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Two to five terms of up to four letters, and shapes."""
    sizes = {letter: draw(st.sampled_from([1, 2, 3])) for letter in "abcdefg"}
    terms = draw(st.lists(st.text("abcdefg", min_size=1, max_size=4), min_size=2, max_size=5))
    used = sorted(set("".join(terms)))
    output = "".join(draw(st.permutations(used)))[: draw(st.integers(0, len(used)))]
    return f"{','.join(terms)}->{output}", [tuple(sizes[letter] for letter in term) for term in terms]


@given(networks(), st.sampled_from(["auto", "greedy", "optimal", "random-greedy"]))
@settings(max_examples=8 if IS_STAND_IN else 25, deadline=None)
def test_any_network(case: tuple[str, list[tuple[int, ...]]], optimize: Any) -> None:
    subscripts, shapes = case
    arrays = [values(shape, seed=seed) for seed, shape in enumerate(shapes)]

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            refs = [await device.put(array) for array in arrays]
            result = await ta.tensor.einsum(subscripts, *refs, optimize=optimize)
            count = math.prod(extents_of(subscripts, *arrays).values())
            await check(result, np.einsum(subscripts, *arrays), count)

    trio.run(main)


def big(subscripts: str, **extents: int) -> list[Any]:
    """Tensors that take no memory."""
    terms = subscripts.partition("->")[0].split(",")
    return [np.broadcast_to(np.float64(0), [extents[x] for x in term]) for term in terms]


@pytest.mark.parametrize("optimize", ["auto", "greedy", "optimal", "branch-2", "dp"])
def test_the_order_is_that_of_opt_einsum(optimize: Any) -> None:
    generator = np.random.default_rng(0)
    subscripts = "ab,bcd,de,efa,cg,gf->"
    for _ in range(5):
        extents = {letter: int(generator.integers(2, 50)) for letter in "abcdefg"}
        arrays = big(subscripts, **extents)
        path, info = opt_einsum.contract_path(subscripts, *arrays, optimize=optimize)
        found = ta.tensor.contract_path(subscripts, *arrays, optimize=optimize)
        assert list(found.steps) == [tuple(sorted(step)) for step in path]
        assert found.flops == info.opt_cost
        assert found.largest == 8 * info.largest_intermediate


def test_memory_of_a_path() -> None:
    """By hand: ab (n) and bc make ac, cd and de make ce, and both of these the result."""
    arrays = big("ab,bc,cd,de->ae", a=2, b=3, c=4, d=5, e=6)
    path = ta.tensor.contract_path("ab,bc,cd,de->ae", *arrays, optimize=[(0, 1), (0, 1), (0, 1)])
    assert path.steps == ((0, 1), (0, 1), (0, 1))
    assert path.largest == 8 * 4 * 6
    assert path.peak == 8 * (2 * 4 + 4 * 6 + 2 * 6)
    assert path.flops == 2 * (2 * 3 * 4 + 4 * 5 * 6 + 2 * 4 * 6)
    summed = ta.tensor.contract_path("xab,bc->ac", *big("xab,bc->ac", x=7, a=2, b=3, c=4))
    assert (summed.largest, summed.peak) == (8 * 2 * 4, 8 * (2 * 3 + 2 * 4))
    alone = ta.tensor.contract_path("ab->a", *big("ab->a", a=2, b=3))
    assert (alone.steps, alone.peak) == ((), 16)


# The order with the fewest operations makes a large tensor, and another one does not.
TRADE = "ia,ib,jc,jd,abcd->ij"


async def test_a_limit_of_memory(device: ta.Device) -> None:
    extents = {"i": 6, "j": 6, **dict.fromkeys("abcd", 5)}
    shapes = [tuple(extents[x] for x in term) for term in TRADE.partition("->")[0].split(",")]
    arrays = [values(shape, seed=seed) for seed, shape in enumerate(shapes)]
    refs = [await device.put(array) for array in arrays]
    # This order multiplies operands without a common letter.
    bad = [(0, 2), (0, 1), (0, 1), (0, 1)]
    wasteful = ta.tensor.contract_path(TRADE, *arrays, optimize=bad)
    # opt_einsum's dynamic programming never multiplies operands without a letter to add along.
    chosen = ta.tensor.contract_path(TRADE, *arrays, optimize="dp")
    least = ta.tensor.contract_path(TRADE, *arrays, optimize="dp", memory_limit=3600).peak
    assert (wasteful.peak > 3600, chosen.peak, least) == (True, 7200, 3600)
    expected = np.einsum(TRADE, *arrays)
    for einsum in (ta.tensor.einsum, ta.linalg.einsum):
        await check(await einsum(TRADE, *refs, optimize=bad), expected, 625)
        await check(await einsum(TRADE, *refs, optimize="dp", memory_limit=least), expected, 625)
        launched = (await device.statistics()).launched
        with pytest.raises(ta.OutOfMemoryError, match=r"einsum: no path .* memory_limit of 1000 bytes"):
            await einsum(TRADE, *refs, memory_limit=1000)
        with pytest.raises(ta.OutOfMemoryError) as refused:
            await einsum(TRADE, *refs, optimize=bad, memory_limit=wasteful.peak - 1)
        assert (refused.value.requested, refused.value.total) == (wasteful.peak, wasteful.peak - 1)
        assert (await device.statistics()).launched == launched


async def test_the_device_limits_it_too(system: ta.System) -> None:
    options = ta.DeviceOptions(memory_limit=1 << 20, isolation="inline")
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(1000, np.float32))
        with pytest.raises(ta.OutOfMemoryError, match="the device's memory of 1048576 bytes"):
            await ta.tensor.einsum("i,j->ij", x, x)
        with pytest.raises(ta.OutOfMemoryError, match="the device's memory"):
            await ta.tensor.einsum("i,j,k->ijk", x, x, x)
        assert await (await ta.tensor.einsum("i,i,i->", x, x, x)).item() == 1000


async def test_a_path_takes_the_memory_that_it_reports(system: ta.System) -> None:
    """By the device's own count of bytes. A block takes an integral number of pieces of some size."""
    subscripts, options = "ab,bc,cd,de,ef,fg->ag", ta.DeviceOptions(isolation="inline")
    sides = [96, 32, 64, 32, 96, 64, 32]
    arrays = [values(shape, seed=seed) for seed, shape in enumerate(itertools.pairwise(sides))]
    for optimize in ("optimal", [(0, 1), (0, 1), (0, 1), (0, 1), (0, 1)]):
        path = ta.tensor.contract_path(subscripts, *arrays, optimize=optimize)
        async with system.open_device(BACKEND, options=options) as device:
            refs = [await device.put(array) for array in arrays]
            before = (await device.statistics()).memory
            assert before.peak == before.used
            result = await ta.tensor.einsum(subscripts, *refs, optimize=path.steps)
            await check(result, np.linalg.multi_dot(arrays), 96)
            after = (await device.statistics()).memory
            assert after.peak - before.used == path.peak
            assert after.used - before.used == 8 * 96 * 32


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    a, b = await device.zeros((2, 3)), await device.zeros((3, 4))
    for einsum in (ta.tensor.einsum, ta.linalg.einsum):
        with pytest.raises(ValueError, match=r"einsum: optimize must be one of .* got 'best'"):
            await einsum("ij,jk->ik", a, b, optimize="best")  # type: ignore[arg-type]
        for path in ([(0, 2)], [(0, 0)], [], [(0, 1), (0, 1)], [0], [("a", "b")], [(0,), (0, 1)]):
            with pytest.raises((ValueError, TypeError), match=r"einsum: optimize must be .* pairs of places"):
                await einsum("ij,jk->ik", a, b, optimize=path)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"memory_limit must be an integer, got 1.5"):
            await einsum("ij,jk->ik", a, b, memory_limit=1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="memory_limit must be a number of bytes, got -1"):
            await einsum("ij,jk->ik", a, b, memory_limit=-1)
        with pytest.raises(ValueError, match="einsum: subscripts 'ij,jk,kl' have 3 terms, got 2 operands"):
            await einsum("ij,jk,kl", a, b)
        with pytest.raises(TypeError, match="einsum: "):
            await einsum("")
    with pytest.raises(TypeError, match=r"got int64; ta.linalg.einsum takes integers"):
        await ta.tensor.einsum("i->", await device.zeros((3,), "int64"))


MOST = {"optimal": 6, "branch-all": 6, "branch-2": 14, "dp": 14}


def _outer(count: int) -> tuple[str, list[np.ndarray]]:
    """Subscripts of this many vectors that share no axis: all orders are possible."""
    letters = "abcdefghijklmnopqrstuvwxyz"[:count]
    return f"{','.join(letters)}->{letters}", [np.ones(2)] * count


@pytest.mark.parametrize("optimize", MOST)
def test_a_search_that_takes_too_long_is_refused(optimize: Any) -> None:
    most = MOST[optimize]
    subscripts, vectors = _outer(most + 1)
    told = f"contract_path: optimize='{optimize}' searches too long for more than {most} operands"
    with pytest.raises(ValueError, match=told):
        ta.tensor.contract_path(subscripts, *vectors, optimize=optimize)
    assert len(ta.tensor.contract_path(subscripts, *vectors, optimize="auto").steps) == most


@pytest.mark.parametrize("optimize", [*MOST, "auto", "auto-hq", "greedy", "branch-1", "random-greedy"])
def test_no_search_takes_many_steps(optimize: Any) -> None:
    steps = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call"

    subscripts, vectors = _outer(MOST.get(optimize, 20))
    ta.tensor.contract_path("a,b,c->abc", *vectors[:3], optimize=optimize)
    sys.setprofile(note)
    try:
        ta.tensor.contract_path(subscripts, *vectors, optimize=optimize)
    finally:
        sys.setprofile(None)
    # Of `optimal`, ten operands take tens of millions.
    assert steps < 300_000
