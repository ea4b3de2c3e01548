"""`examples/generate`, exact: a sequence has the same bits in any company, and however often it is lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from generation import Generation, Prompt, open_generation
from hypothesis import given, settings
from hypothesis import strategies as st
from llama import Llama, random_weights
from llama_float64 import logits_of
from model import GREEDY, Batch, Model, Run, Sampling, open_model
from running import TINY
from text import load_random

import trio_accel as ta
from trio_accel.patterns import GetStatistics, Submit

pytestmark = pytest.mark.examples
for package in ("tokenizers", "jinja2", "llguidance"):
    pytest.importorskip(package, reason="pip install '.[generate]'")

# Pages of four tokens, and parts of an attention shorter than the sequences.
SIZE, PAGES = 4, 460
WEIGHTS = random_weights(TINY, 3)


def classes() -> list[Any]:
    found: list[Any] = [Llama]
    if find_spec("torch") is not None:
        from llama_torch import TorchLlama

        found.append(TorchLlama)
    return found


@pytest.fixture(autouse=True, scope="module")
def short_parts() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama.KEYS", 16)
        yield


def program_of(cls: type[Llama]) -> Llama:
    caches = [np.zeros(TINY.cache_shape(PAGES, SIZE), np.float32) for _ in range(TINY.layers)]
    return cls(WEIGHTS, caches, config=attrs.asdict(TINY), exact=8)


@attrs.define(eq=False)
class Text:
    """A sequence with its tokens in chunks, in pages of its own."""

    tokens: list[int]
    pages: list[int]
    done: int = 0

    def run(self, count: int) -> Run:
        chunk = self.tokens[self.done : self.done + count]
        return Run(tokens=chunk, start=self.done, pages=self.pages)


def logits(program: Llama, runs: Sequence[Run]) -> Any:
    batch = Batch.of(runs, TINY, PAGES, SIZE)
    return np.asarray(program.logits(batch.rows, batch.tables, batch.ends, batch.counts))


def alone(cls: type[Llama], tokens: Sequence[int]) -> Any:
    """Logits after each token of a sequence computed token by token, without others."""
    program, found = program_of(cls), list[Any]()
    for number in range(len(tokens)):
        run = Run(tokens=[tokens[number]], start=number, pages=list(range(-(-len(tokens) // SIZE))))
        found.append(logits(program, [run])[0])
    return np.array(found)


TEXTS = [
    np.random.default_rng(number).integers(0, TINY.words, length).tolist()
    for number, length in enumerate((40, 33, 17, 5, 1))
]


@pytest.mark.parametrize("cls", classes())
def test_it_matches_float64(cls: type[Llama]) -> None:
    for tokens in TEXTS:
        np.testing.assert_allclose(
            alone(cls, tokens)[-1], logits_of(WEIGHTS, TINY, tokens), rtol=0, atol=2e-5
        )


@lru_cache
def expected(cls: type[Llama]) -> list[Any]:
    return [alone(cls, tokens) for tokens in TEXTS]


@pytest.mark.parametrize("cls", classes())
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_company_chunks_and_pages_change_no_bit(cls: type[Llama], data: st.DataObject) -> None:
    free = data.draw(st.permutations(range(PAGES)))
    texts = [Text(tokens, [free.pop() for _ in range(-(-len(tokens) // SIZE))]) for tokens in TEXTS]
    company = [Text([7] * 20, [free.pop() for _ in range(5)]) for _ in range(data.draw(st.integers(0, 70)))]
    program = program_of(cls)
    while any(text.done < len(text.tokens) for text in texts):
        going = [text for text in (*texts, *company) if text.done < len(text.tokens)]
        chosen = data.draw(st.lists(st.sampled_from(going), min_size=1, max_size=len(going), unique_by=id))
        most = data.draw(st.sampled_from([1, 3, 40]))
        runs = [text.run(most) for text in chosen]
        for text, run, found in zip(chosen, runs, logits(program, runs), strict=True):
            text.done += len(run.tokens)
            if text in texts:
                np.testing.assert_array_equal(found, expected(cls)[texts.index(text)][text.done - 1])


LOADED = load_random(TINY, 3)
HOT = Sampling(temperature=0.9, top_p=0.95, seed=5)
PROMPTS = [Prompt(tokens=tokens, most=12, sampling=how) for tokens in TEXTS for how in (GREEDY, HOT)]
OPTIONS = ta.DeviceOptions(
    isolation="process",
    retry=1,
    retry_suspects=True,
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)


@asynccontextmanager
async def opened(model: Model, **options: Any) -> AsyncGenerator[Generation]:
    """The batcher of a model, in a system of its own."""
    async with ta.open_system("exact") as system, open_generation(system, model, LOADED, **options) as made:
        yield made
        await made.batcher.stop(drain=True)
        assert made.pages.used == 0


async def answers(made: Generation) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}

    async def ask(number: int) -> None:
        found[number] = await made.batcher.ask(Submit(PROMPTS[number]))

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(ask, number)
    return found


@pytest.mark.parametrize("isolation", ["process"])
async def test_texts_are_the_same_in_any_company_and_under_kills(system: ta.System, isolation: str) -> None:
    async with (
        system.open_device(BACKEND, options=OPTIONS) as device,
        open_model(device, TINY, LOADED.weights, pages=100, size=SIZE, exact=8) as model,
    ):
        async with opened(model, sequences=1, positions=3) as made:
            alone = await answers(made)
        # Draws are not greedy.
        assert alone[0] != alone[1]
        for ahead, sequences, positions in ((False, 10, 512), (True, 4, 7), (False, 7, 70)):
            async with opened(model, sequences=sequences, positions=positions, ahead=ahead) as made:
                fault = ta.testing.inject_fault(device, model.operation, kill=True, count=3)
                assert await answers(made) == alone
                assert fault.hit == 3


@pytest.mark.parametrize("host", [0, 12])
async def test_texts_set_aside_are_the_same(system: ta.System, device: ta.Device, host: int) -> None:
    opening = partial(open_model, device, TINY, LOADED.weights, size=SIZE, exact=8)
    async with opening(pages=100) as model, opened(model, sequences=1, positions=3) as made:
        alone = await answers(made)
    # Two of the longest do not fit together, and the host has space for one or for none.
    async with opening(pages=20) as model, opened(model, sequences=10, positions=20, host=host) as made:
        assert await answers(made) == alone
        assert (await made.batcher.ask(GetStatistics())).set_aside > 0


async def test_functions_of_the_package_are_not_exact(device: ta.Device) -> None:
    with pytest.raises(ta.NotSupportedError, match="exact: the package's functions"):
        async with open_model(device, TINY, WEIGHTS, pages=9, forward="operations", exact=8):
            pass


@pytest.mark.skipif(BACKEND != "cpu", reason="NumPy computes on the CPU alone")
async def test_a_device_is_refused_if_its_rows_depend_on_their_positions(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dense(self: Llama, name: str, x: Any) -> Any:
        made = x @ self.weights[name].T
        made[3] *= np.float32(1 + 1e-7)
        return made

    monkeypatch.setattr(Llama, "_dense", dense)
    with pytest.raises(ta.NotSupportedError, match="depend on the other rows or its index"):
        async with open_model(device, TINY, WEIGHTS, pages=99, forward="numpy", exact=8):
            pass
