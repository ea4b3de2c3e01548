"""MRG32k3a and XORWOW: against their recurrences in Python integers, and jumps against drawing on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.random._sequences import MODULI, moved, seeded

both = pytest.mark.parametrize("isolation", ["inline", "process"])
kinds = pytest.mark.parametrize("kind", ["mrg32k3a", "xorwow"])

# L'Ecuyer's RngStreams begins with this state; these are its first numbers.
RNG_STREAMS = (12345,) * 6
RNG_STREAMS_FIRST = (0.1270111220, 0.3185275654)


def mrg32k3a(state: tuple[int, ...]) -> Iterator[int]:
    """The recurrences of L'Ecuyer, Operations Research 47 (1999), as they are written there."""
    one, two = list(state[:3]), list(state[3:])
    while True:
        one.append((1403580 * one[-2] - 810728 * one[-3]) % (2**32 - 209))
        two.append((527612 * two[-1] - 1370589 * two[-3]) % (2**32 - 22853))
        yield (one[-1] - two[-1]) % (2**32 - 209)


def xorwow(state: tuple[int, ...]) -> Iterator[int]:
    """The generator of Marsaglia, Journal of Statistical Software 8 (2003), as it is written there."""
    x, y, z, w, v, d = state
    while True:
        t = x ^ (x >> 2)
        x, y, z, w = y, z, w, v
        v = (v ^ (v << 4) ^ (t ^ (t << 1))) & 0xFFFFFFFF
        d = (d + 362437) & 0xFFFFFFFF
        yield (d + v) & 0xFFFFFFFF


RECURRENCES = {"mrg32k3a": mrg32k3a, "xorwow": xorwow}
STATES = {
    "mrg32k3a": [RNG_STREAMS, (1, 0, 0, 0, 0, 1), (*[MODULI[0] - 1] * 3, *[MODULI[1] - 1] * 3)],
    # The second one is the state in Marsaglia's paper.
    "xorwow": [(1, 0, 0, 0, 0, 0), (123456789, 362436069, 521288629, 88675123, 5783321, 6615241)],
}


@both
@kinds
async def test_words_match_the_recurrence(device: ta.Device, kind: str) -> None:
    for state in STATES[kind]:
        expected = [*islice(RECURRENCES[kind](state), 70_001)]
        for size in (1, 2, 3, 257, 70_001):
            drawn = await (await device.ask(ta.random.SequenceBits(kind, state, (size,)))).to_host()
            assert drawn.dtype == np.uint32
            np.testing.assert_array_equal(drawn, expected[:size])


async def test_the_first_numbers_of_rng_streams(device: ta.Device) -> None:
    drawn = await (await device.ask(ta.random.SequenceBits("mrg32k3a", RNG_STREAMS, (2,)))).to_host()
    np.testing.assert_allclose(drawn / (2.0**32 - 208), RNG_STREAMS_FIRST, atol=1e-10)


@kinds
async def test_a_group_of_pieces_begins_at_the_end_of_the_one_before(device: ta.Device, kind: str) -> None:
    # The CPU backend draws 2**20 words side by side.
    state, size = STATES[kind][0], (1 << 21) + 9
    drawn = await (await device.ask(ta.random.SequenceBits(kind, state, (size,)))).to_host()
    for place in (1 << 20, 1 << 21):
        expected = [*islice(RECURRENCES[kind](moved(kind, state, place)), 9)]
        np.testing.assert_array_equal(drawn[place : place + 9], expected)


@kinds
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), words=st.integers(0, 3000))
def test_a_state_moved_on_equals_the_state_after_single_steps(kind: str, seed: int, words: int) -> None:
    state = seeded(kind, seed)
    sequence = RECURRENCES[kind](state)
    for _ in range(words):
        next(sequence)
    assert [*islice(RECURRENCES[kind](moved(kind, state, words)), 4)] == [*islice(sequence, 4)]


@kinds
@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 2**185), second=st.integers(0, 2**185))
def test_moves_add_up(kind: str, first: int, second: int) -> None:
    state = seeded(kind, 7)
    assert moved(kind, moved(kind, state, first), second) == moved(kind, state, first + second)


@both
@kinds
async def test_draws_go_on_with_the_next_word(device: ta.Device, kind: str) -> None:
    whole = await (await ta.random.Generator(device, kind, 5).bits(3000)).to_host()
    generator = ta.random.Generator(device, kind, 5)
    parts = [await (await generator.bits(size)).to_host() for size in (1, 0, 2, 997, 2000)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(whole, [*islice(RECURRENCES[kind](seeded(kind, 5)), 3000)])


@pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])
async def test_to_advance_is_to_draw(device: ta.Device, kind: str) -> None:
    for size in (0, 1, 5000, 262_145):
        drawing, skipping = (ta.random.Generator(device, kind, 3) for _ in range(2))
        await drawing.bits(size)
        skipping.advance(size)
        assert drawing.state == skipping.state
        one, other = await drawing.bits(50), await skipping.bits(50)
        np.testing.assert_array_equal(await one.to_host(), await other.to_host())


@pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])
async def test_a_jump_has_the_requested_length(device: ta.Device, kind: str) -> None:
    generator, skipping = (ta.random.Generator(device, kind, 3) for _ in range(2))
    jumped = generator.jumped(2)
    # Philox's draws take whole pairs of rows: drawing 2**65 words skips 2**66.
    skipping.advance(2 * (1 << 65 if kind == "philox4x32_10" else 1 << 96))
    assert jumped.state == skipping.state
    one, other = await jumped.bits(50), await skipping.bits(50)
    np.testing.assert_array_equal(await one.to_host(), await other.to_host())
    assert generator.jumped(0).state == generator.state
    assert generator.jumped().jumped().state == generator.jumped(2).state


async def test_the_end_of_a_sequence_is_an_error(device: ta.Device) -> None:
    for kind, jumps in (("philox4x32_10", 1 << 16), ("mrg32k3a", 1 << 95), ("xorwow", 1 << 95)):
        generator = ta.random.Generator(device, kind, 3)
        generator.jumped(jumps - 1)
        with pytest.raises(ValueError, match=f"the sequence of {kind} ends before word"):
            generator.jumped(jumps)
        with pytest.raises(ValueError, match="jumps must be at least 0, got -1"):
            generator.jumped(-1)
        with pytest.raises(ValueError, match="words must be at least 0, got -1"):
            generator.advance(-1)


@kinds
async def test_out_and_shapes(device: ta.Device, kind: str) -> None:
    out = await device.zeros((3, 4), "uint32")
    assert await ta.random.Generator(device, kind, 1).bits((3, 4), out=out) is out
    expected = await (await ta.random.Generator(device, kind, 1).bits(12)).to_host()
    np.testing.assert_array_equal((await out.to_host()).reshape(-1), expected)
    assert (await ta.random.Generator(device, kind, 1).bits(())).shape == ()
    with pytest.raises(ValueError, match=r"out must have shape \(3,\) and dtype uint32"):
        await ta.random.Generator(device, kind, 1).bits(3, out=out)
