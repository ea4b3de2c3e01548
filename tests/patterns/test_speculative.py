"""Speculative decoding: the text is the verifier's, whatever the draft proposes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import trio
from hypothesis import given, settings
from language_models import Chain, Model, Remembering, Rows, batcher_of, random_chain, step_of, tokens_of
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import DecodingStatistics, Generate, ModelOutputError, Score, Submit, _checks


def likelihood(tables: Chain, texts: Sequence[tuple[int, ...]], length: int) -> float:
    """The p-value of texts that should have come from a chain, by Pearson's chi-square."""
    counted = Counter(texts)
    chances = {
        text: tables.chance(0, text) for text in itertools.product(range(len(tables.table)), repeat=length)
    }
    assert sum(chances.values()) == pytest.approx(1)
    if any(chances[text] == 0 for text in counted):
        return 0.0
    expected = [chance * len(texts) for chance in chances.values()]
    observed = [counted[text] for text in chances]
    large = [index for index, number in enumerate(expected) if number >= 5]
    rest = [index for index, number in enumerate(expected) if number < 5]
    f_observed = [*(observed[index] for index in large), sum(observed[index] for index in rest)]
    f_expected = [*(expected[index] for index in large), sum(expected[index] for index in rest)]
    if not f_expected[-1]:
        f_observed, f_expected = f_observed[:-1], f_expected[:-1]
    return float(scipy.stats.chisquare(f_observed, f_expected, sum_check=False).pvalue)


def texts_of(draft: Chain, verifier: Chain, many: int, **options: Any) -> list[tuple[int, ...]]:
    """Texts of one batcher, with seeds from 0."""
    lookahead = options.pop("lookahead", 2)

    async def main() -> list[tuple[int, ...]]:
        async with ta.open_system("test") as system:
            step = step_of(draft, verifier, lookahead=lookahead)
            batcher = await batcher_of(system, step, capacity=None)
            return await tokens_of(batcher, [Generate((0,), seed=seed, **options) for seed in range(many)])

    return trio.run(main)


@pytest.mark.slow
@pytest.mark.parametrize(("lookahead", "temperature"), [(1, 1.0), (2, 1.0), (4, 1.0), (2, 0.6), (2, 1.7)])
def test_texts_have_only_the_distribution_of_the_verifier(lookahead: int, temperature: float) -> None:
    draft, verifier = random_chain(1, 4, zeros=1), random_chain(2, 4, zeros=1)
    texts = texts_of(draft, verifier, 1500, max_tokens=4, lookahead=lookahead, temperature=temperature)
    powers = verifier.table ** (1 / temperature)
    assert likelihood(Chain(powers / powers.sum(axis=1, keepdims=True)), texts, 4) > 0.01
    assert likelihood(draft, texts, 4) < 1e-9


def test_the_test_sees_a_slightly_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_residual(p: Rows, q: Rows) -> Rows:
        return p

    monkeypatch.setattr(_checks, "_residual", no_residual)
    draft, verifier = random_chain(1, 4), random_chain(2, 4)
    assert likelihood(verifier, texts_of(draft, verifier, 1500, max_tokens=3), 3) < 1e-6


def test_acceptance_and_tokens_per_round_match_the_paper() -> None:
    """Leviathan et al. 2023: theorem 3.5 and equation 1, for tokens that do not depend on each other."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])
    accepted, lookahead, rounds = np.minimum(p, q).sum(), 3, 4000
    rng = np.random.default_rng(3)
    sampler = _checks.Sampler(rng=rng, temperature=1.0)
    lengths: list[int] = []
    for _ in range(rounds):
        proposed = rng.choice(4, size=lookahead, p=q)
        verified = np.tile(p, (lookahead + 1, 1))
        lengths.append(len(sampler.accepted(proposed.tolist(), [q] * lookahead, verified)))
    expected = (1 - accepted ** (lookahead + 1)) / (1 - accepted)
    assert np.mean(lengths) == pytest.approx(expected, abs=4 * float(np.std(lengths)) / math.sqrt(rounds))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    alike=st.floats(0, 1),
    lookahead=st.integers(1, 6),
    limit=st.integers(1, 12),
    stop=st.frozensets(st.integers(0, 4), max_size=2),
    prompt=st.lists(st.integers(0, 4), max_size=3),
)
def test_a_greedy_text_is_the_verifiers_own(
    seed: int, alike: float, lookahead: int, limit: int, stop: frozenset[int], prompt: list[int]
) -> None:
    verifier = Remembering(seed, 5)
    draft = Remembering(seed + 1, 5, near=verifier, alike=alike)

    step = step_of(draft, verifier, lookahead=lookahead)

    async def main() -> list[tuple[int, ...]]:
        async with ta.open_system("test") as system:
            request = Generate(prompt, temperature=0, max_tokens=limit, stop=stop)
            return await tokens_of(await batcher_of(system, step), [request])

    alone: list[int] = []
    while len(alone) < limit and not stop.intersection(alone):
        alone.append(int(verifier.row((*prompt, *alone)).argmax()))
    assert trio.run(main) == [tuple(alone)]
    statistics = step.statistics
    assert statistics.tokens == len(alone)
    assert statistics.rounds == verifier.calls
    assert statistics.proposed == draft.calls
    assert statistics.tokens <= statistics.accepted + statistics.rounds


async def tokens_by(
    system: ta.System, draft: Model, verifier: Model, request: Generate, **options: Any
) -> tuple[int, ...]:
    """The tokens of a request to a batcher of its own."""
    [tokens] = await tokens_of(await batcher_of(system, step_of(draft, verifier, **options)), [request])
    return tokens


async def test_a_correct_draft_saves_calls_of_the_verifier(system: ta.System) -> None:
    draft, verifier = random_chain(2, 6), random_chain(2, 6)
    step = step_of(draft, verifier, lookahead=4)
    batcher = await batcher_of(system, step)
    await batcher.ask(Submit(Generate((0,), max_tokens=12, temperature=0)))
    # Five tokens a round, and no proposal that could not be used.
    assert [score.count for score in verifier.calls] == [5, 5, 2]
    assert [len(score.tokens) for score in verifier.calls] == [5, 10, 12]
    first = DecodingStatistics(tokens=12, rounds=3, proposed=9, accepted=9)
    assert step.statistics == first
    assert step.statistics.acceptance_rate == 1
    assert step.statistics.tokens_per_round == 4
    await batcher.ask(Submit(Generate((0,), max_tokens=2, temperature=0)))
    assert step.statistics == first + DecodingStatistics(tokens=2, rounds=1, proposed=1, accepted=1)


def test_without_rounds_there_are_no_rates() -> None:
    assert math.isnan(DecodingStatistics().acceptance_rate)
    assert math.isnan(DecodingStatistics().tokens_per_round)


async def test_a_seed_determines_the_text_under_any_concurrency(system: ta.System) -> None:
    batcher = await batcher_of(system, step_of(random_chain(1, 8), random_chain(2, 8)))
    five, six = (Generate((0,), seed=seed, max_tokens=30) for seed in (5, 6))
    alone = [await batcher.ask(Submit(request)) for request in (five, six)]
    assert alone[0] != alone[1]
    assert await tokens_of(batcher, [five, six, five, six]) == alone * 2
    without = await tokens_of(batcher, [Generate((0,), max_tokens=30)] * 2)
    assert without[0] != without[1]


async def test_logits_match_the_same_probabilities(system: ta.System) -> None:
    draft, verifier = random_chain(1, 6, zeros=2), random_chain(2, 6, zeros=2)
    with np.errstate(divide="ignore"):
        draft_logits, logits = (Chain(np.log(model.table) + 3) for model in (draft, verifier))
    request = Generate((0,), seed=1, max_tokens=50)
    tokens = await tokens_by(system, draft, verifier, request)
    assert await tokens_by(system, draft_logits, logits, request, logits=True) == tokens


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
async def test_short_floating_numbers_will_do(system: ta.System, dtype: Any) -> None:
    draft, verifier = (Chain(random_chain(seed, 200).table.astype(dtype)) for seed in (1, 2))
    assert len(await tokens_by(system, draft, verifier, Generate((0,), seed=1, max_tokens=50))) == 50


async def test_models_may_return_arrays_of_a_device(system: ta.System, device: ta.Device) -> None:
    chains = random_chain(1, 6), random_chain(2, 6)

    def on_device(table: ta.AccelRef) -> Model:
        async def model(score: Score) -> ta.AccelRef:
            chosen = np.eye(6)[list(score.tokens[-score.count :])]
            return await ta.linalg.matmul(await device.put(chosen), table)

        return model

    draft, verifier = [on_device(await device.put(chain.table)) for chain in chains]
    request = Generate((0,), seed=7, max_tokens=40)
    tokens = await tokens_by(system, draft, verifier, request)
    assert tokens == await tokens_by(system, *chains, request)


GOOD = [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([0.5, 0.5, math.nan], "NaN or infinity in distribution 0"),
        ([0.5, 0.5, math.inf], "NaN or infinity in distribution 0"),
        ([0.5, math.inf, -math.inf], "NaN or infinity in distribution 0"),
        ([1e308, 1e308, 1e308], "NaN or infinity in distribution 0"),
        ([1.5, -0.5, 0.0], "negative probability in distribution 0"),
        ([0.5, 0.5, 0.5], "sum is 1.5, not 1; if they are logits"),
        ([0.0, 0.0, 0.0], "sum is 0, not 1"),
        ([], "must return an array of shape"),
        ([0.5, 0.5], "share a vocabulary"),
        ([0.5j, 0.5, 0.5], "real numbers, not complex128"),
        (["a", "b", "c"], "array of numbers"),
    ],
)
@pytest.mark.parametrize("who", ["draft", "verifier"])
async def test_an_invalid_distribution_is_refused(
    system: ta.System, row: list[Any], text: str, who: str
) -> None:
    def model(good: bool) -> Any:
        async def returning(score: Score) -> Any:
            await trio.lowlevel.checkpoint()
            return [GOOD if good else row] * score.count

        return returning

    # If the vocabularies differ, the verifier is called last.
    blamed = "verifier" if text == "share a vocabulary" else who
    step = step_of(model(who != "draft"), model(who != "verifier"))
    batcher = await batcher_of(system, step, name="batcher")
    with pytest.raises(ModelOutputError, match=f"the {blamed} .*{text}"):
        await batcher.ask(Submit(Generate((0,), seed=0)))
    assert system.tree().find("test/batcher").restarts == 0


@pytest.mark.parametrize("shape", [(3,), (3, 3), (1, 3), (2, 2, 3), (0, 3)])
async def test_too_few_or_too_many_distributions_are_refused(
    system: ta.System, shape: tuple[int, ...]
) -> None:
    async def verifier(score: Score) -> Any:
        return np.full(shape, 1 / 3)

    async def draft(score: Score) -> Any:
        return [GOOD]

    batcher = await batcher_of(system, step_of(draft, verifier, lookahead=1))
    with pytest.raises(ModelOutputError, match=r"the verifier must return an array of shape \(2, size of"):
        await batcher.ask(Submit(Generate((0,))))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_bad_logits_are_refused(system: ta.System, bad: float) -> None:
    async def model(score: Score) -> Any:
        return [[0.0, bad]]

    batcher = await batcher_of(system, step_of(model, model, logits=True))
    with pytest.raises(ModelOutputError, match="the draft returned NaN, infinity"):
        await batcher.ask(Submit(Generate((0,))))


async def test_logits_and_temperatures_at_the_ends_of_floats(system: ta.System) -> None:
    async def model(score: Score) -> Any:
        return [[-1e308, 1e308, 0.0]] * score.count

    batcher = await batcher_of(system, step_of(model, model, logits=True))
    for temperature in (1.0, 1e-300):
        request = Generate((0,), max_tokens=3, temperature=temperature, seed=0)
        assert await batcher.ask(Submit(request)) == (1, 1, 1)


async def test_a_prompt_beyond_the_vocabulary_is_refused(system: ta.System) -> None:
    async def model(score: Score) -> Any:
        return [GOOD] * score.count

    batcher = await batcher_of(system, step_of(model, model))
    with pytest.raises(ValueError, match="the prompt has the token 3, and the vocabulary ends at 2"):
        await batcher.ask(Submit(Generate((0, 3))))


async def test_a_failing_draft_is_an_error_or_costs_only_rounds(system: ta.System) -> None:
    calls = itertools.count()

    async def draft(score: Score) -> Rows:
        if next(calls) % 3 == 2:
            raise OSError("gone")
        return await right(score)

    right, verifier = random_chain(2, 6), random_chain(2, 6)
    strict = await batcher_of(system, step_of(draft, verifier))
    with pytest.raises(OSError, match="gone"):
        await strict.ask(Submit(Generate((0,))))
    step = step_of(draft, verifier, draft_may_fail=True)
    lenient = await batcher_of(system, step)
    wanted = Generate((0,), max_tokens=30, temperature=0)
    assert await lenient.ask(Submit(wanted)) == await tokens_by(system, right, verifier, wanted)
    assert step.statistics.draft_failures == step.statistics.rounds - 1
    assert step.statistics.tokens_per_round > 2


async def test_a_failing_verifier_is_the_askers_error(system: ta.System) -> None:
    error = OSError("gone")

    async def verifier(score: Score) -> Rows:
        raise error

    batcher = await batcher_of(system, step_of(random_chain(1, 6), verifier, draft_may_fail=True))
    with pytest.raises(OSError, match="gone") as caught:
        await batcher.ask(Submit(Generate((0,))))
    assert caught.value is error


async def test_a_cancelled_asker_ends_the_call_of_the_model(system: ta.System) -> None:
    ended: list[str] = []

    async def hangs(score: Score) -> Rows:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("hangs")
        raise AssertionError

    batcher = await batcher_of(system, step_of(random_chain(1, 6), hangs))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(batcher.ask, Submit(Generate((0,))))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await wait_all_tasks_blocked()
    assert ended == ["hangs"]


def request(prompt: Any = (0,), **options: Any) -> Generate:
    return Generate(prompt, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": (-1,)},
        {"stop": {-2}},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"seed": -1},
        {"seed": "a"},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Generate: "):
        request(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": (0.5,)},
        {"temprature": 1.0},
        {"max_tokens": True},
        {"max_tokens": 1.5},
        {"temperature": "hot"},
    ],
)
def test_a_request_of_wrong_types_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        request(**options)


@pytest.mark.parametrize("lookahead", [0, -1, True, 2.0])
def test_a_lookahead_that_makes_no_sense_is_refused(lookahead: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="SpeculativeStep: lookahead"):
        step_of(random_chain(1, 3), random_chain(2, 3), lookahead=lookahead)
