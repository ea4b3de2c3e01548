"""Speculative decoding of many texts at once: after losses, in streams, and with a prompt as the draft."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import Many, Model, Remembering, batcher_of, random_chain, step_of, tokens_of
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    DecodingStatistics,
    Generate,
    ModelOutputError,
    PromptLookup,
    Score,
    SpeculativeStep,
    Submit,
    open_parts,
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    alike=st.floats(0, 1),
    lookahead=st.integers(1, 5),
    temperatures=st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=1, max_size=5),
    stop=st.frozensets(st.integers(0, 4), max_size=1),
    losses=st.frozensets(st.integers(1, 40), max_size=8),
)
def test_a_text_is_the_same_on_its_own_next_to_others_and_after_losses(
    seed: int,
    alike: float,
    lookahead: int,
    temperatures: list[float],
    stop: frozenset[int],
    losses: frozenset[int],
) -> None:
    verifier = Remembering(seed, 5)
    draft = Remembering(seed + 1, 5, near=verifier, alike=alike)
    requests = [
        Generate(
            (number, *range(number)), max_tokens=3 + 2 * number, temperature=heat, stop=stop, seed=number
        )
        for number, heat in enumerate(temperatures)
    ]

    async def main() -> None:
        async with ta.open_system("test") as system:
            lone = step_of(draft, verifier, lookahead=lookahead)
            alone_in = await batcher_of(system, lone)
            alone = [await alone_in.ask(Submit(request)) for request in requests]
            step = SpeculativeStep(Many(verifier, losses), Many(draft, losses), lookahead=lookahead)
            # Prompts go through in chunks.
            batcher = await batcher_of(system, step, max_sequences=3, max_positions=4, patience=60.0)
            assert await tokens_of(batcher, requests) == alone
            # Lost rounds do not count.
            assert step.statistics == lone.statistics

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_models_see_all_texts_of_a_step_at_once(system: ta.System) -> None:
    chain = random_chain(2, 6)
    draft, verifier = Many(chain), Many(chain)
    step = SpeculativeStep(verifier, draft, lookahead=4)
    batcher = await batcher_of(system, step)
    requests = [Generate((number,), max_tokens=10, temperature=0) for number in range(5)]
    await tokens_of(batcher, requests)
    # The draft is right, so a round gives five tokens of each text.
    assert verifier.sizes == [5, 5]
    assert draft.sizes == [5] * 8
    assert step.statistics == DecodingStatistics(tokens=50, rounds=10, proposed=40, accepted=40)


async def test_without_a_draft_a_step_gives_one_token(system: ta.System) -> None:
    verifier = Many(Remembering(3, 6))
    batcher = await batcher_of(system, SpeculativeStep(verifier))
    requests = [Generate((number,), max_tokens=8, temperature=0) for number in range(3)]
    texts = await tokens_of(batcher, requests)
    assert verifier.sizes == [3] * 8
    for number, text in enumerate(texts):
        alone: list[int] = []
        while len(alone) < 8:
            alone.append(int(Remembering(3, 6).row((number, *alone)).argmax()))
        assert list(text) == alone


async def test_tokens_are_streamed_and_no_more_are_computed_than_are_read(system: ta.System) -> None:
    verifier = random_chain(2, 8)
    batcher = await batcher_of(system, step_of(random_chain(1, 8), verifier, lookahead=3), buffer=1)
    request = Generate((0,), max_tokens=100, seed=3)
    whole = await batcher.ask(Submit(request))
    calls = len(verifier.calls)
    async with open_parts(batcher, request) as stream:
        tokens: list[int] = []
        async for token in stream:
            tokens.append(token)
            await wait_all_tasks_blocked()
            # It waits with the rest of a round, at most 4 tokens.
            assert len(verifier.calls[-1].tokens) <= 1 + len(tokens) + 2 * 4
    assert stream.parts == tuple(tokens) == whole
    assert len(verifier.calls) == 2 * calls


async def test_a_reader_that_leaves_ends_the_text(system: ta.System) -> None:
    verifier = random_chain(2, 8)
    batcher = await batcher_of(system, step_of(random_chain(1, 8), verifier))
    async with open_parts(batcher, Generate((0,), max_tokens=10**9)) as stream:
        await stream.__anext__()
    await wait_all_tasks_blocked()
    calls = len(verifier.calls)
    await wait_all_tasks_blocked()
    assert len(verifier.calls) == calls
    assert system.tree().find(batcher.path).deferred == 0


async def test_an_error_of_a_model_follows_the_tokens_before_it(system: ta.System) -> None:
    chain = random_chain(2, 8)

    async def fails_later(score: Score) -> Any:
        if len(score.tokens) > 10:
            raise OSError("gone")
        return await chain(score)

    batcher = await batcher_of(system, step_of(fails_later, fails_later))
    tokens: list[int] = []

    async def read() -> None:
        async with open_parts(batcher, Generate((0,), seed=1)) as stream:
            async for token in stream:
                tokens.append(token)  # noqa: PERF401  # those before the error count

    with pytest.raises(OSError, match="gone"):
        await read()
    assert len(tokens) in range(6, 11)


async def test_results_of_a_step_before_a_lost_one_are_given_again(system: ta.System) -> None:
    step, calls = SpeculativeStep(Many(Remembering(3, 6))), 0

    async def lossy(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        results = await step(batch)
        if calls % 2:
            raise ta.ContextLostError("killed", device="cpu:0")
        return results

    request = Generate((0,), max_tokens=6, seed=1)
    tokens = await (await batcher_of(system, step)).ask(Submit(request))
    assert await (await batcher_of(system, lossy)).ask(Submit(request)) == tokens


def repeating(tokens: list[int]) -> Model:
    """A model that repeats a cycle in a text, whatever came before the last two tokens."""
    table = {(a, b): c for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False)}

    async def model(score: Score) -> Any:
        await trio.lowlevel.checkpoint()
        length = len(score.tokens)
        ends = range(length - score.count + 1, length + 1)
        rows = np.full((score.count, 10), 0.001)
        for row, end in zip(rows, ends, strict=True):
            row[table.get((score.tokens[end - 2], score.tokens[end - 1]), 0)] = 1 - 0.009
        return rows

    return model


@pytest.mark.parametrize("logits", [False, True])
async def test_the_prompt_is_a_draft(system: ta.System, logits: bool) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    model = repeating(text)

    async def as_logits(score: Score) -> Any:
        return np.log(await model(score)) + 3

    plain = Many(as_logits if logits else model)
    step = SpeculativeStep(plain, PromptLookup(10, logits=logits), lookahead=8, logits=logits)
    batcher = await batcher_of(system, step)
    request = Generate((*text[:9], 1, 2), max_tokens=18, temperature=0)
    [tokens] = await tokens_of(batcher, [request])
    assert tokens == (3, 4, 5, 6, 7, 8, 9, 1, 2) * 2
    # Nine tokens a round, in place of one.
    assert len(plain.sizes) == 2
    assert step.statistics.acceptance_rate == 1


async def test_a_prompt_that_repeats_nothing_proposes_nothing(system: ta.System) -> None:
    lookup = PromptLookup(10)
    rows = await lookup(
        [Score((1, 2, 3)), Score(()), Score((1, 2, 9, 1, 2)), Score((4, 4)), Score((99, 4, 99))]
    )
    assert rows[0] is None
    assert rows[1] is None
    assert rows[2] is not None
    assert rows[2].tolist() == [[0.0] * 9 + [1.0]]
    assert rows[3] is not None
    assert int(rows[3].argmax()) == 4
    assert rows[4] is not None
    assert int(rows[4].argmax()) == 4
    # The last time counts, and more tokens count more than one.
    [late, longer] = await lookup([Score((1, 2, 1, 3, 1)), Score((5, 1, 2, 6, 1, 3, 5, 1))])
    assert late is not None
    assert longer is not None
    assert (int(late.argmax()), int(longer.argmax())) == (3, 2)
    # The verifier would refuse it.
    assert await lookup([Score((4, 99, 4))]) == [None]
    with pytest.raises(ValueError, match="PromptLookup: vocabulary must be at least 1"):
        PromptLookup(0)
    with pytest.raises(ValueError, match="PromptLookup: longest must be at least 1"):
        PromptLookup(9, longest=0)


@pytest.mark.slow
def test_texts_by_prompt_lookup_have_the_distribution_of_the_verifier() -> None:
    from test_speculative import likelihood

    verifier = random_chain(2, 4, zeros=1)

    async def main() -> list[tuple[int, ...]]:
        async with ta.open_system("test") as system:
            step = SpeculativeStep(Many(verifier), PromptLookup(4), lookahead=3)
            batcher = await batcher_of(system, step, capacity=None)
            requests = [Generate((0, 1, 2, 3, 0), max_tokens=4, seed=seed) for seed in range(1500)]
            texts = await tokens_of(batcher, requests)
            assert step.statistics.proposed > 1000
            return texts

    assert likelihood(verifier, trio.run(main), 4) > 0.01


async def test_only_bad_texts_fail(system: ta.System) -> None:
    chain = random_chain(2, 6)

    async def model(score: Score) -> Any:
        rows = await within(chain)(score)
        return np.full_like(rows, math.nan) if score.tokens[0] == 3 else rows

    batcher = await batcher_of(system, SpeculativeStep(Many(model), Many(within(chain))))
    prompts = (0,), (3,), (2, 6)
    requests = [Generate(prompt, max_tokens=5, seed=1) for prompt in prompts]
    found: dict[int, object] = {}

    async def ask(number: int) -> None:
        try:
            found[number] = await batcher.ask(Submit(requests[number]))
        except ValueError as error:
            found[number] = error

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, number)
    alone = await batcher_of(system, step_of(chain, chain))
    assert found[0] == await alone.ask(Submit(requests[0]))
    assert isinstance(found[1], ModelOutputError)
    assert "the verifier returned NaN" in str(found[1])
    assert "the prompt has the token 6, and the vocabulary ends at 5" in str(found[2])


def within(chain: Model) -> Model:
    """A model of six tokens that also accepts others."""

    async def model(score: Score) -> Any:
        return await chain(Score(tuple(min(token, 5) for token in score.tokens), score.count))

    return model


@pytest.mark.parametrize("may_fail", [False, True])
async def test_a_draft_that_fails(system: ta.System, may_fail: bool) -> None:
    chain = random_chain(2, 6)

    async def draft(scores: list[Score]) -> Any:
        await trio.lowlevel.checkpoint()
        raise OSError("no draft")

    step = SpeculativeStep(Many(chain), draft, draft_may_fail=may_fail)
    batcher = await batcher_of(system, step)
    requests = [Generate((number,), max_tokens=4, temperature=0) for number in range(2)]
    if not may_fail:
        with pytest.RaisesGroup(OSError, OSError):
            await tokens_of(batcher, requests)
        return
    texts = await tokens_of(batcher, requests)
    assert [len(text) for text in texts] == [4, 4]
    # In the last round nothing is proposed, and so nothing fails.
    assert step.statistics == DecodingStatistics(tokens=8, rounds=8, draft_failures=6)


async def test_a_draft_of_another_vocabulary(system: ta.System) -> None:
    step = SpeculativeStep(Many(random_chain(2, 7)), Many(random_chain(1, 6)))
    batcher = await batcher_of(system, step)
    with pytest.raises(ModelOutputError, match="share a vocabulary"):
        await batcher.ask(Submit(Generate((0,), max_tokens=4)))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="SpeculativeStep: lookahead must be at least 1"):
        SpeculativeStep(Many(random_chain(2, 6)), lookahead=0)
    with pytest.raises(TypeError, match="a model is"):
        SpeculativeStep(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
