"""`examples/generate`: forwards of a small random model against float64, in batches, under faults."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND
from llama import LIKELIEST, Llama, random_weights
from llama_float64 import logits_of
from model import Batch, Run, Sampling, Token, open_model
from running import FORWARDS, TINY, generate

import trio_accel as ta

pytestmark = pytest.mark.examples

WEIGHTS = random_weights(TINY, 3)
PROMPTS = [[5], [7, 8, 9], list(range(20, 37)), [250, 1, 1, 1, 299], list(range(100, 140))]


def plain(prompt: list[int], most: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(int(logits_of(WEIGHTS, TINY, tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [plain(prompt, 6) for prompt in PROMPTS]


@pytest.fixture(params=FORWARDS)
def forward(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "torch" and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if name == "numpy" and BACKEND != "cpu":
        pytest.skip("NumPy computes on the CPU alone")
    return name


def classes() -> list[Any]:
    found: list[Any] = [Llama]
    if find_spec("torch") is not None:
        from llama_torch import TorchLlama

        found.append(TorchLlama)
    return found


@pytest.mark.parametrize("cls", classes())
def test_logits_of_a_mixed_batch_match_float64(cls: type[Llama]) -> None:
    pages, size = 12, 4
    caches = [np.zeros(TINY.cache_shape(pages, size), np.float32) for _ in range(TINY.layers)]
    program = cls(WEIGHTS, caches, config=attrs.asdict(TINY))

    def logits(*runs: Run) -> Any:
        batch = Batch.of(runs, TINY, pages, size)
        return np.asarray(program.logits(batch.rows, batch.tables, batch.ends, batch.counts))

    first, second, third = [3, 4, 5, 6, 7], [9, 8], list(range(50, 61))
    own = {"a": [7, 2], "b": [11], "c": [0, 5, 3]}
    logits(Run(tokens=first[:4], start=0, pages=own["a"]), Run(tokens=second[:1], start=0, pages=own["b"]))
    logits(Run(tokens=third[:7], start=0, pages=own["c"]))
    found = logits(
        Run(tokens=first[4:], start=4, pages=own["a"]),
        Run(tokens=third[7:], start=7, pages=own["c"]),
        Run(tokens=second[1:], start=1, pages=own["b"]),
    )
    for row, tokens in zip(found, (first, third, second), strict=True):
        np.testing.assert_allclose(row, logits_of(WEIGHTS, TINY, tokens), rtol=0, atol=2e-5)


async def test_each_sequence_matches_float64_on_its_own(
    device: ta.Device, forward: str, expected: list[list[int]]
) -> None:
    async with open_model(device, TINY, WEIGHTS, pages=40, size=4, forward=forward) as model:
        for number, prompt in enumerate(PROMPTS):
            assert await generate(model, [prompt], 6, seed=number) == [expected[number]]
        for chunk, late in ((10_000, 0), (3, 0), (7, 2), (1, 1)):
            assert await generate(model, PROMPTS, 6, chunk=chunk, late=late, seed=chunk) == expected


async def test_draws_depend_only_on_seed_and_position(device: ta.Device, forward: str) -> None:
    hot = [Sampling(temperature=0.8, top_p=0.9, seed=number) for number in range(3)]
    samplings = [*hot, Sampling(), hot[0]]
    async with open_model(device, TINY, WEIGHTS, pages=40, size=4, forward=forward) as model:
        together = await generate(model, PROMPTS, 6, samplings=samplings)
        for number, prompt in enumerate(PROMPTS):
            alone = await generate(model, [prompt], 6, samplings=[samplings[number]], seed=9)
            assert alone == [together[number]]
        assert together[3] == plain(PROMPTS[3], 6)
        other = [attrs.evolve(how, seed=how.seed + 100) for how in samplings]
        assert await generate(model, PROMPTS, 6, samplings=other) != together


async def test_tokens_are_drawn_as_often_as_they_are_likely(device: ta.Device, forward: str) -> None:
    temperature, top_p, draws = 0.7, 0.6, 600
    scores = logits_of(WEIGHTS, TINY, [7, 8, 9]) / temperature
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = order[: np.searchsorted(np.cumsum(shares[order]), top_p) + 1]
    wanted = np.zeros(TINY.words)
    wanted[kept] = shares[kept] / shares[kept].sum()
    counts = np.zeros(TINY.words)
    async with open_model(device, TINY, WEIGHTS, pages=60, size=4, forward=forward) as model:
        for first in range(0, draws, 60):
            runs = [
                Run(
                    tokens=[7, 8, 9],
                    start=0,
                    pages=[page],
                    sampling=Sampling(temperature=temperature, top_p=top_p, seed=first + page),
                )
                for page in range(60)
            ]
            np.add.at(counts, await model.step(runs), 1)
    assert set(np.flatnonzero(counts)) <= set(kept.tolist())
    # The sum of squares of `len(kept) - 1` degrees of freedom; six deviations.
    squares = ((counts - draws * wanted)[kept] ** 2 / (draws * wanted[kept])).sum()
    assert squares < len(kept) - 1 + 6 * (2 * (len(kept) - 1)) ** 0.5


@pytest.mark.parametrize("top_p", [1e-9, 1.0])
async def test_the_ends_of_top_p(device: ta.Device, forward: str, top_p: float) -> None:
    hot = Sampling(temperature=1.0 if top_p < 1 else 1e-4, top_p=top_p, seed=4)
    async with open_model(device, TINY, WEIGHTS, pages=10, forward=forward) as model:
        assert await generate(model, [[7, 8, 9]], 4, samplings=[hot]) == [plain([7, 8, 9], 4)]


def logarithms(prompt: list[int]) -> Any:
    """Logarithms of the next token's probabilities, by float64."""
    scores = logits_of(WEIGHTS, TINY, prompt)
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())


def mask_of(allowed: list[int]) -> Any:
    bits = np.zeros(320, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


async def test_masks_and_logarithms_of_probabilities(device: ta.Device, forward: str) -> None:
    hot = Sampling(temperature=5.0, seed=4)
    async with open_model(device, TINY, WEIGHTS, pages=60, size=4, forward=forward) as model:
        # First the prompts without their last tokens; then these, each on its own in its sequence.
        pages = [list(range(11 * number, 11 * number + 11)) for number in range(len(PROMPTS))]
        whole = [Run(tokens=prompt, start=0, pages=own) for prompt, own in zip(PROMPTS, pages, strict=True)]
        last = [
            Run(tokens=prompt[-1:], start=len(prompt) - 1, pages=own)
            for prompt, own in zip(PROMPTS, pages, strict=True)
        ]
        free = await model.step(whole)
        for runs in (whole, last):
            for how in (Sampling(), hot):
                given = [
                    attrs.evolve(
                        run,
                        sampling=how,
                        mask=mask_of([3, 40, 299]) if number % 2 else None,
                        is_asked=number != 2,
                    )
                    for number, run in enumerate(runs)
                ]
                tokens = await model.step(given)
                for number, (token, prompt) in enumerate(zip(tokens, PROMPTS, strict=True)):
                    expected = logarithms(prompt)
                    if number % 2:
                        assert token in {3, 40, 299}
                    if number % 2 and how is not hot:
                        assert token == max((3, 40, 299), key=lambda one: expected[one])
                    elif how is not hot:
                        assert token == free[number]
                    assert isinstance(token, Token) is (number != 2)
                    if isinstance(token, Token):
                        likely = token.likely
                        assert abs(likely.own - expected[token]) < 2e-5
                        assert len(likely.others) == LIKELIEST
                        others, values = zip(*likely.others, strict=True)
                        np.testing.assert_allclose(values, np.sort(expected)[::-1][:LIKELIEST], atol=2e-5)
                        np.testing.assert_allclose(values, expected[list(others)], atol=2e-5)


@pytest.mark.parametrize("isolation", ["process"])
async def test_a_kill_in_any_step_changes_no_token(
    system: ta.System, isolation: str, forward: str, expected: list[list[int]]
) -> None:
    options = ta.DeviceOptions(
        isolation="process",
        retry=1,
        retry_suspects=True,
        intensity=ta.Intensity(100, 60.0),
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    )
    async with (
        system.open_device(BACKEND, options=options) as device,
        open_model(device, TINY, WEIGHTS, pages=40, size=4, forward=forward) as model,
    ):
        fault = ta.testing.inject_fault(device, model.operation, kill=True, count=3)
        assert await generate(model, PROMPTS, 6, chunk=11) == expected
        assert fault.hit == 3
        assert device.generation == 4


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Run(tokens=[], start=0, pages=[1]), "1 to 4 tokens after 0 .* got 0"),
        (Run(tokens=[1] * 5, start=0, pages=[1]), "1 to 4 tokens after 0 .* got 5"),
        (Run(tokens=[1], start=4, pages=[1]), "1 to 0 tokens after 4 .* got 1"),
        (Run(tokens=[1], start=-1, pages=[1]), "after -1"),
        (Run(tokens=[1], start=128, pages=range(40)), "at most 128 tokens"),
        (Run(tokens=[1, 300], start=0, pages=[1]), "tokens must be 0 to 299, got 1 to 300"),
        (Run(tokens=[-1], start=0, pages=[1]), "tokens must be 0 to 299, got -1 to -1"),
        (Run(tokens=[1], start=0, pages=[40]), "pages must be 0 to 39, got 40 to 40"),
    ],
)
def test_runs_that_cannot_be(run: Run, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Batch.of([run], TINY, 40, 4)


async def test_a_step_of_nobody(device: ta.Device) -> None:
    async with open_model(device, TINY, WEIGHTS, pages=4, forward="operations") as model:
        with pytest.raises(ValueError, match="a step must have at least one sequence"):
            await model.step([])
