"""`examples/generate`: steps requested while the one before them runs, with tokens on the device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from generation import Generation, Prompt, WrongTokensError, _Company, _Made, open_generation
from llama import checksum, multipliers, packed
from model import GREEDY, Chosen, Sampling, open_model
from running import TINY, generate
from text import load_random

import trio_accel as ta
from trio_accel.patterns import GetStatistics, RunningSequence, Submit, open_parts

pytestmark = pytest.mark.examples
pytest.importorskip("tokenizers", reason="pip install '.[generate]'")
pytest.importorskip("jinja2", reason="pip install '.[generate]'")
if BACKEND != "cpu":
    pytest.skip("these programs compute on the CPU here", allow_module_level=True)

LOADED = load_random(TINY, 3)
HOT = Sampling(temperature=0.8, top_p=0.9, seed=5)
PROMPTS = [[5], [7, 8, 9], list(range(20, 37)), [250, 1, 1, 1, 299], list(range(100, 140))]
SAMPLINGS = [GREEDY, HOT, GREEDY, attrs.evolve(HOT, seed=6), GREEDY]
MOST = [23, 9, 30, 1, 17]
FORWARDS = ["numpy", *(["torch"] if find_spec("torch") else [])]


async def alone(model: Any) -> list[tuple[int, ...]]:
    found = await generate(model, PROMPTS, max(MOST), samplings=SAMPLINGS)
    return [tuple(tokens[:most]) for tokens, most in zip(found, MOST, strict=True)]


async def together(made: Generation, pause: float = 0.0) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in PROMPTS]

    async def read(number: int) -> None:
        how, most = SAMPLINGS[number], MOST[number]
        item = Prompt(tokens=PROMPTS[number], most=most, sampling=how)
        async with open_parts(made.batcher, item) as stream:
            async for token in stream:
                found[number].append(token)
                if number % 2:
                    # clock: any moment will do
                    await trio.sleep(pause)

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(read, number)
    return list(map(tuple, found))


@pytest.mark.parametrize("forward", FORWARDS)
async def test_tokens_match_single_steps(system: ta.System, device: ta.Device, forward: str) -> None:
    async with open_model(device, TINY, LOADED.weights, pages=60, size=4, forward=forward) as model:
        expected = await alone(model)
        async with open_generation(system, model, LOADED, positions=70, ahead=True) as made:
            for pause in (0.0, 0.002):
                assert await together(made, pause) == expected
            await made.batcher.stop(drain=True)
            assert made.pages.used == 0
            # Others find what the texts have left.
            assert made.pages.open([*PROMPTS[2], *expected[2]], tenant="").length == 44


@pytest.mark.parametrize("forward", FORWARDS)
async def test_more_sequences_than_a_step_ahead_may_have(
    system: ta.System, device: ta.Device, forward: str
) -> None:
    """Tokens stay on the device for this many sequences only, so these steps leave none there."""
    opening = open_model(device, TINY, LOADED.weights, pages=60, size=4, forward=forward, width=2)
    async with opening as model:
        expected = await alone(model)
        async with open_generation(system, model, LOADED, positions=70) as made:
            assert await together(made) == expected
            assert (await made.batcher.ask(GetStatistics())).repeated == 0


async def test_a_step_is_asked_for_before_the_tokens_of_the_last_are_there(
    system: ta.System, device: ta.Device
) -> None:
    async with open_model(device, TINY, LOADED.weights, pages=60, size=4, forward="numpy") as model:
        sources: list[bool] = []

        async def forward(batch: Any) -> Chosen:
            sources.append(len(batch.rows) == 5 and bool((batch.rows[3] >= 0).any()))
            return await model.forward(batch)

        watched = attrs.evolve(model, forward=forward)
        async with open_generation(system, watched, LOADED, positions=70, ahead=True) as made:
            prompt = Prompt(tokens=[5], most=30, sampling=GREEDY)
            assert len(await made.batcher.ask(Submit(prompt))) == 30
            # The prompt, the first step, and others on its heels, unless the one before is over by then.
            assert len(sources) == 30
            assert sources[:2] == [False, False]
            assert sum(sources) > 5
            assert (await made.batcher.ask(GetStatistics())).repeated == 0


async def test_a_token_that_ends_a_text_drops_the_step_ahead(system: ta.System, device: ta.Device) -> None:
    async with open_model(device, TINY, LOADED.weights, pages=60, size=4, forward="numpy") as model:
        expected = await alone(model)
        place = next(n for n, token in enumerate(expected[2]) if n > 1 and token not in expected[2][:n])
        loaded = attrs.evolve(LOADED, text=load_random(TINY, 3).text)
        loaded.text.ends = frozenset({expected[2][place]})
        async with open_generation(system, model, loaded, positions=70, ahead=True) as made:
            found = await together(made)
            for tokens, whole in zip(found, expected, strict=True):
                ends = [n for n, token in enumerate(whole) if token in loaded.text.ends]
                assert tokens == whole[: ends[0] if ends else None]
            await made.batcher.stop(drain=True)
            assert made.pages.used == 0


@pytest.mark.parametrize("place", range(2, 8))
async def test_wrong_tokens_are_seen_and_the_step_runs_again(
    system: ta.System, device: ta.Device, place: int
) -> None:
    """The device has other tokens than the step before has chosen."""
    async with open_model(device, TINY, LOADED.weights, pages=60, size=4, forward="numpy") as model:
        expected = await alone(model)
        calls, struck = 0, 0

        async def forward(batch: Any) -> Chosen:
            nonlocal calls, struck
            calls += 1
            if calls >= place and not struck and len(batch.rows) == 5 and (batch.rows[3] >= 0).any():
                struck = calls
                sources = batch.rows[3]
                batch.rows[3] = np.where(sources < 0, sources, (sources + 64) % 256)
                batch.rows[3] %= 256
            return await model.forward(batch)

        watched = attrs.evolve(model, forward=forward)
        async with open_generation(system, watched, LOADED, positions=200, ahead=True) as made:
            assert await together(made) == expected
            seen = await made.batcher.ask(GetStatistics())
            assert struck >= place
            assert seen.repeated == 1


@pytest.mark.parametrize("retry", [0, 3])
@pytest.mark.parametrize("forward", FORWARDS)
async def test_kills_change_no_token(system: ta.System, forward: str, retry: int) -> None:
    options = ta.DeviceOptions(
        isolation="process",
        retry=retry,
        retry_suspects=bool(retry),
        intensity=ta.Intensity(100, 60.0),
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    )
    async with (
        system.open_device("cpu", options=options) as device,
        open_model(device, TINY, LOADED.weights, pages=60, size=4, forward=forward) as model,
    ):
        expected = await alone(model)
        async with open_generation(system, model, LOADED, positions=70, ahead=True) as made:
            fault = ta.testing.inject_fault(device, model.operation, kill=True, count=3)
            assert await together(made) == expected
            assert fault.hit == 3
            await made.batcher.stop(drain=True)
            assert made.pages.used == 0


async def test_a_step_ahead_has_no_more_sequences_than_the_device_keeps_tokens_of(
    system: ta.System, device: ta.Device
) -> None:
    opening = open_model(device, TINY, LOADED.weights, pages=8, size=4, forward="numpy", width=2)
    async with opening as model:
        with pytest.raises(ValueError, match="sequences must be at most 2 for steps in advance, got 3"):
            async with open_generation(system, model, LOADED, sequences=3, ahead=True):
                raise AssertionError
        async with open_generation(system, model, LOADED, sequences=2, positions=70, ahead=True) as made:
            prompts = [Prompt(tokens=[token], most=5, sampling=GREEDY) for token in (5, 6, 7)]
            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(made.batcher.ask, Submit(prompt))


def test_a_checksum_distinguishes_tokens() -> None:
    tokens = np.arange(64)
    made = packed(np.append(tokens, (tokens * multipliers(64)).sum()))
    assert np.frombuffer(made[:-8], np.int32).tolist() == tokens.tolist()
    assert int.from_bytes(made[-8:], "little") == checksum(tokens)
    for line in range(64):
        other = tokens.copy()
        other[line] += 1
        assert checksum(other) != checksum(tokens)
    assert checksum(tokens[::-1]) != checksum(tokens)
    assert issubclass(WrongTokensError, ta.NotExecutedError)


async def test_a_step_may_have_sequences_that_the_one_before_it_has_not(
    system: ta.System, device: ta.Device
) -> None:
    async with (
        open_model(device, TINY, LOADED.weights, pages=8, size=4, forward="numpy") as model,
        open_generation(system, model, LOADED, positions=70, ahead=True) as made,
    ):
        before = _Made([], 192, np.array([7], np.int32))
        tokens, sources = np.array([5, 0]), np.array([-1, 192])
        made._check(before, tokens, sources, checksum(np.array([5, 7])))
        with pytest.raises(WrongTokensError):
            made._check(before, tokens, sources, checksum(np.array([5, 8])))


@pytest.mark.parametrize("forward", FORWARDS)
async def test_a_step_in_advance_after_a_newer_step_of_other_sequences(
    system: ta.System, device: ta.Device, forward: str
) -> None:
    """With several models, a step of other sequences may begin between two steps of a sequence."""
    async with (
        open_model(device, TINY, LOADED.weights, pages=60, size=4, forward=forward) as model,
        open_generation(system, model, LOADED, positions=70, ahead=True) as made,
    ):
        expected = await alone(model)
        first, second, third = (
            RunningSequence[Prompt, int](
                Prompt(tokens=PROMPTS[number], most=MOST[number], sampling=SAMPLINGS[number]),
                length=len(PROMPTS[number]),
                chunk=len(PROMPTS[number]),
            )
            for number in (0, 2, 4)
        )

        async def step(*sequences: RunningSequence[Prompt, int]) -> list[Any]:
            return await made.step(list(sequences))

        def give(sequence: RunningSequence[Prompt, int], tokens: Any) -> None:
            sequence.done, sequence.chunk, sequence.steps_ahead = sequence.done + sequence.chunk, 1, 0
            sequence.parts.extend(tokens)

        for sequence in (first, second, third):
            give(sequence, *await step(sequence))
        [own] = await step(first)
        for sequence in (second, third):
            give(sequence, *await step(sequence))
        # The batcher has not given the token of the first sequence yet.
        first.steps_ahead = 1
        others, [last] = (await step(second, first, third)), await step(third)
        # The step of the third sequence is newer, and the first sequence has no token of it.
        assert [*own, *others[1]] == list(expected[0][1:3])
        assert [*second.parts, *others[0]] == list(expected[2][:3])
        assert [*third.parts, *others[2]] == list(expected[4][:3])
        assert last == others[2]
        # A step that nobody has called has chosen no token.
        second.steps_ahead = third.steps_ahead = 1
        made._lanes[model].steps.clear()
        made._lanes[model].steps.append(_Made([second], 0))
        with pytest.raises(WrongTokensError, match="before the step that chooses"):
            await step(second, first, third)
        for sequence in (first, second, third):
            made.leave(sequence)


async def test_draws_of_a_repeated_step(system: ta.System, device: ta.Device) -> None:
    """Its company may have been made by the step before it."""
    async with (
        open_model(device, TINY, LOADED.weights, pages=40, size=4, forward="numpy") as model,
        open_generation(system, model, LOADED, positions=70, ahead=True) as made,
    ):
        sequence = RunningSequence[Prompt, int](Prompt(tokens=[5], most=90, sampling=HOT), length=1)
        sequence.state = made.pages.open([5])
        company = _Company([sequence], 4)
        for start in (50, 49, 80, 3):
            found = company.sampling(np.array([start]))
            assert found is not None
            assert found[2, 0] == HOT.draw(start + 1)
        sequence.state.close()


def test_draws_of_many_positions_match_single_draws() -> None:
    for position in (0, 1, 63, 1 << 40):
        found = HOT.draws(position, 70)
        assert found.tolist() == [HOT.draw(position + place) for place in range(70)]
        key = np.array([HOT.seed, 0], np.uint64)
        generator = np.random.Generator(np.random.Philox(counter=position, key=key))
        assert generator.random(dtype=np.float32) == found[0]
