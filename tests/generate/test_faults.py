"""`examples/generate/faults.py`: a stream may differ by rounding, and must not have a wrong token."""

from __future__ import annotations

import numpy as np
import pytest
from faults import Reference, is_possible
from generation import Prompt
from hypothesis import given
from hypothesis import strategies as st
from llama import Llama, _draw, random_weights
from model import GREEDY, Sampling, open_model
from running import TINY, generate

import trio_accel as ta

pytestmark = pytest.mark.examples

WEIGHTS = random_weights(TINY, 3)
# The second token of a pair has the weights of the first: they are equally likely.
WEIGHTS["words"][1::2] = WEIGHTS["words"][::2]
PROMPT = list(range(100, 113))
HOW = [GREEDY, *(Sampling(temperature=0.5 * number, top_p=0.9, seed=number) for number in (1, 2, 3))]
NEVER = frozenset[int]()
REFERENCE = Reference(TINY, WEIGHTS)


def prompt_of(how: Sampling, most: int = 8) -> Prompt:
    return Prompt(tokens=PROMPT, most=most, sampling=how)


async def streams(device: ta.Device) -> list[list[int]]:
    async with open_model(device, TINY, WEIGHTS, pages=80, size=4, forward="operations") as model:
        return await generate(model, [PROMPT] * len(HOW), 8, samplings=HOW)


async def test_tokens_of_the_model_are_allowed_and_others_are_not(device: ta.Device) -> None:
    for how, made in zip(HOW, await streams(device), strict=True):
        assert REFERENCE.allows(prompt_of(how), made, NEVER)
        for place in range(len(made)):
            wrong = [*made[:place], (made[place] + 150) % 300, *made[place + 1 :]]
            assert not REFERENCE.allows(prompt_of(how), wrong, NEVER)


async def test_a_tie_may_end_either_way(device: ta.Device) -> None:
    greedy, *_ = await streams(device)
    for place in range(len(greedy)):
        other = [*greedy[:place], greedy[place] ^ 1, *greedy[place + 1 :]]
        assert REFERENCE.allows(prompt_of(GREEDY), other, NEVER)


async def test_a_stream_that_ends_early_has_an_end_there(device: ta.Device) -> None:
    greedy, *_ = await streams(device)
    assert not REFERENCE.allows(prompt_of(GREEDY), greedy[:3], NEVER)
    assert REFERENCE.allows(prompt_of(GREEDY), greedy[:3], frozenset({greedy[3]}))
    assert not REFERENCE.allows(prompt_of(GREEDY), greedy[:3], frozenset({(greedy[3] + 150) % 300}))
    assert not REFERENCE.allows(prompt_of(GREEDY, 7), greedy, NEVER)


@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([0.1, 0.9, 1.0]))
def test_draws_from_rounded_logits_are_possible(seed: int, temperature: float, top_p: float) -> None:
    rng, rounding = np.random.default_rng(seed), 1e-2
    logits = rng.standard_normal(50).astype(np.float32)
    moved = (logits + rng.uniform(-rounding, rounding, 50)).astype(np.float32)
    how = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    sampling = np.array([temperature, top_p, how.draw(7)], np.float32)
    assert is_possible(logits, int(_draw(moved, *sampling)), how, 7, rounding)
    assert is_possible(logits, int(moved.argmax()), GREEDY, 7, rounding)
    # Without rounding few tokens are possible: the drawn one, and its neighbours at an edge.
    exact = [token for token in range(50) if is_possible(logits, token, how, 7, 0.0)]
    assert int(_draw(logits, *sampling)) in exact
    assert len(exact) <= 2


def test_the_reference_is_the_forward_of_the_program() -> None:
    assert isinstance(REFERENCE._model, Llama)
    assert [is_possible(np.float32([0, 1, 0.9995]), token, GREEDY, 1, 5e-4) for token in range(3)] == [
        False,
        True,
        True,
    ]
