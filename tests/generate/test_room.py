"""`examples/generate` with a full cache: texts equal those of a run with space for all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from chosen import BACKEND
from generation import Generation, Prompt, open_generation
from model import GREEDY, Sampling, open_model
from running import TINY, generate
from text import load_random

import trio_accel as ta
from trio_accel.patterns import ContinuousStatistics, GetStatistics, Submit, open_parts

pytestmark = pytest.mark.examples
pytest.importorskip("tokenizers", reason="pip install '.[generate]'")
pytest.importorskip("jinja2", reason="pip install '.[generate]'")
if BACKEND != "cpu":
    pytest.skip("these programs compute on the CPU here", allow_module_level=True)

LOADED = load_random(TINY, 3)
HOT = Sampling(temperature=0.8, top_p=0.9, seed=5)
PROMPTS = [[5], [7, 8, 9], list(range(20, 37)), [250, 1, 1, 1, 299], list(range(100, 140)), [3] * 10]
SAMPLINGS = [GREEDY, HOT, GREEDY, attrs.evolve(HOT, seed=6), GREEDY, HOT]
MOST = [60, 30, 45, 20, 40, 50]
# Pages of four tokens: the longest text needs 21 of them, and all together 79.
PAGES, SIZE = 30, 4
SURVIVES = ta.DeviceOptions(
    isolation="process",
    retry=0,
    intensity=ta.Intensity(1000, 60.0),
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)


async def alone(device: ta.Device) -> list[tuple[int, ...]]:
    async with open_model(device, TINY, LOADED.weights, pages=200, size=SIZE, forward="numpy") as model:
        found = await generate(model, PROMPTS, max(MOST), samplings=SAMPLINGS)
    return [tuple(tokens[:most]) for tokens, most in zip(found, MOST, strict=True)]


@asynccontextmanager
async def opened(device: ta.Device, system: ta.System, **options: Any) -> AsyncGenerator[Generation, None]:
    opening = open_model(device, TINY, LOADED.weights, pages=PAGES, size=SIZE, forward="numpy")
    async with opening as model, open_generation(system, model, LOADED, positions=70, **options) as made:
        yield made
        await made.batcher.stop(drain=True)
        assert (made.pages.used, made.pages.statistics().spilled) == (0, 0)


async def together(made: Generation, tenants: str = "xxxxxx") -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in PROMPTS]

    async def read(number: int) -> None:
        item = Prompt(
            tokens=PROMPTS[number], most=MOST[number], sampling=SAMPLINGS[number], tenant=tenants[number]
        )
        async with open_parts(made.batcher, item) as stream:
            async for token in stream:
                found[number].append(token)

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(read, number)
    return list(map(tuple, found))


async def count(made: Generation) -> ContinuousStatistics:
    seen: ContinuousStatistics = await made.batcher.ask(GetStatistics())
    return seen


# Copied to the host; computed again, without space; or both. And only copied.
WAYS = [{"host": 1000}, {}, {"host": 12}, {"host": 1000, "recompute": False}]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_texts_match_a_run_with_room(
    system: ta.System, device: ta.Device, way: dict[str, Any], ahead: bool
) -> None:
    expected = await alone(device)
    async with opened(device, system, ahead=ahead, **way) as made:
        for tenants in ("xxxxxx", "xyxyxy"):
            before = (await count(made)).set_aside
            assert await together(made, tenants) == expected
            assert (await count(made)).set_aside > before


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("way", WAYS[:3], ids=str)
async def test_kills_change_no_token_while_sequences_are_set_aside(
    system: ta.System, way: dict[str, Any], ahead: bool
) -> None:
    async with system.open_device("cpu", options=SURVIVES) as device:
        expected = await alone(device)
        async with opened(device, system, ahead=ahead, **way) as made:
            # And while pages go to the host, and come back.
            hit = [made.model.operation, *(["devices.ToHost", "devices.Assign"] if way else [])]
            faults = [ta.testing.inject_fault(device, one, kill=True, count=3) for one in hit]
            assert await together(made) == expected
            assert {fault.hit for fault in faults} == {3}
            assert (await count(made)).set_aside > 0


@pytest.mark.parametrize("fits", [0, 1, 2])
async def test_texts_are_computed_again_if_pinned_memory_is_full(
    system: ta.System, device: ta.Device, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """The machine has less than `host`, which only the spill finds out."""
    expected = await alone(device)
    host_empty, made = type(device).host_empty, 0

    def full(self: ta.Device, *given: Any) -> Any:
        nonlocal made
        made += 1
        if made > fits:
            raise MemoryError
        return host_empty(self, *given)

    monkeypatch.setattr(type(device), "host_empty", full)
    async with opened(device, system, host=1000) as made_by:
        assert await together(made_by) == expected
        assert (await count(made_by)).set_aside > 0
    assert made > fits


async def test_a_client_that_leaves_while_it_is_set_aside(system: ta.System, device: ta.Device) -> None:
    async with opened(device, system, host=1000) as made:
        texts: list[tuple[int, ...]] = []

        async def ask(number: int) -> None:
            prompt = Prompt(tokens=PROMPTS[4][number:], most=60, sampling=GREEDY)
            texts.append(await made.batcher.ask(Submit(prompt)))

        async with trio.open_nursery() as nursery, trio.open_nursery() as leaving:
            nursery.start_soon(ask, 0)
            for number in (1, 2, 3):
                leaving.start_soon(ask, number)
            while not (await count(made)).aside:  # noqa: ASYNC110  # nobody tells of it
                await trio.lowlevel.checkpoint()
            leaving.cancel_scope.cancel()
        assert len(texts) == 1
        assert made.pages.statistics().spilled == 0


async def test_a_short_text_next_to_two_of_the_longest(system: ta.System, device: ta.Device) -> None:
    """Each long one may need all but two of the pages."""
    async with opened(device, system, host=1000) as made:
        model, steps = made.model, 0

        async def forward(batch: Any) -> Any:
            nonlocal steps
            steps += 1
            return await model.forward(batch)

        made.model = attrs.evolve(model, forward=forward)
        firsts: list[int] = []

        async def write(number: int) -> None:
            await made.batcher.ask(Submit(Prompt(tokens=[number], most=110, sampling=GREEDY)))

        async with trio.open_nursery() as nursery:
            for number in (5, 6):
                nursery.start_soon(write, number)
            for number in range(12):
                # clock: any moment will do
                await trio.sleep(0.02)
                before = steps
                short = Prompt(tokens=[7, number], most=5, sampling=GREEDY)
                async with open_parts(made.batcher, short) as stream:
                    await anext(stream)
                    firsts.append(steps - before)
                    assert [token async for token in stream]
        assert max(firsts) <= 3
        assert (await count(made)).set_aside > 0


async def test_tenants_share_no_pages_unless_so_configured(system: ta.System, device: ta.Device) -> None:
    for shares in (False, True):
        async with ta.open_system(f"{shares}") as other, opened(device, other, shares=shares) as made:
            for tenant in ("one", "two"):
                prompt = Prompt(tokens=PROMPTS[4], most=3, sampling=GREEDY, tenant=tenant)
                await made.batcher.ask(Submit(prompt))
            assert made.pages.statistics().shared_tokens == (36 if shares else 0)


async def test_a_text_that_needs_more_than_all_pages_ends_with_an_error(
    system: ta.System, device: ta.Device
) -> None:
    opening = open_model(device, TINY, LOADED.weights, pages=8, size=SIZE, forward="numpy")
    async with opening as model, open_generation(system, model, LOADED, positions=70) as made:
        tokens: list[int] = []
        with pytest.raises(ta.patterns.PagesFullError, match="pages on the device: 1 requested, and 0 free"):
            async with open_parts(made.batcher, Prompt(tokens=[5], most=99, sampling=GREEDY)) as stream:
                tokens += [token async for token in stream]
        assert made.pages.used == 0
        with pytest.raises(ValueError, match="wants 9 to begin, and there are 8 in all"):
            await made.batcher.ask(Submit(Prompt(tokens=[5] * 32, most=1, sampling=GREEDY)))
        prompt = Prompt(tokens=[5] * 31, most=1, sampling=GREEDY)
        assert len(await made.batcher.ask(Submit(prompt))) == 1
