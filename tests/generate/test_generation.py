"""`examples/generate`: prompts in one batch, over pages that equal beginnings share; in this process."""

from __future__ import annotations

import attrs
import pytest
import trio
from generation import Prompt, open_generation
from model import GREEDY, Sampling, open_model
from running import TINY, generate
from text import load_random

import trio_accel as ta
from trio_accel.patterns import Submit, open_parts

pytestmark = pytest.mark.examples
pytest.importorskip("tokenizers", reason="pip install '.[generate]'")
pytest.importorskip("jinja2", reason="pip install '.[generate]'")

LOADED = load_random(TINY, 3)
SYSTEM = list(range(100, 113))


def prompt(tokens: list[int], most: int = 6, sampling: Sampling = GREEDY) -> Prompt:
    return Prompt(tokens=tokens, most=most, sampling=sampling)


async def test_equal_beginnings_share_pages(system: ta.System, device: ta.Device) -> None:
    prompts = [[*SYSTEM, *more] for more in ([1], [1, 2], [7, 8, 9], [7, 8, 9, 3, 3, 3])]
    async with open_model(device, TINY, LOADED.weights, pages=40, size=4, forward="operations") as model:
        expected = [tuple(tokens) for tokens in await generate(model, prompts, 6)]
        async with open_generation(system, model, LOADED, positions=70) as made:
            found = [await made.batcher.ask(Submit(prompt(tokens))) for tokens in prompts]
            assert found == expected
            # Three pages of the system message, three times.
            assert made.pages.statistics().shared_tokens >= 3 * 12
            assert made.pages.used == 0
            together: dict[int, tuple[int, ...]] = {}

            async def ask(number: int) -> None:
                together[number] = await made.batcher.ask(Submit(prompt(prompts[number])))

            async with trio.open_nursery() as nursery:
                for number in range(len(prompts)):
                    nursery.start_soon(ask, number)
            assert [together[number] for number in range(len(prompts))] == expected
            await made.batcher.stop(drain=True)


async def test_a_token_that_ends_an_answer_is_not_part_of_it(system: ta.System, device: ta.Device) -> None:
    async with open_model(device, TINY, LOADED.weights, pages=40, size=4, forward="operations") as model:
        [tokens] = await generate(model, [SYSTEM], 6)
        end = next(token for place, token in enumerate(tokens) if token not in tokens[:place] and place > 1)
        loaded = attrs.evolve(LOADED, text=load_random(TINY, 3).text)
        loaded.text.ends = frozenset({end})
        async with open_generation(system, model, loaded, positions=70) as made:
            found = await made.batcher.ask(Submit(prompt(SYSTEM)))
            assert found == tuple(tokens[: tokens.index(end)])
            await made.batcher.stop(drain=True)


async def test_a_reader_that_leaves_gives_its_pages_back(system: ta.System, device: ta.Device) -> None:
    async with (
        open_model(device, TINY, LOADED.weights, pages=40, size=4, forward="operations") as model,
        open_generation(system, model, LOADED, positions=70) as made,
    ):
        async with open_parts(made.batcher, prompt(SYSTEM, 80)) as stream:
            await anext(stream)
            assert made.pages.used > 0
        # Another sequence gets its first token at the end of the current step.
        async with open_parts(made.batcher, prompt([1])) as stream:
            await anext(stream)
            assert made.pages.used == 1
        await made.batcher.stop(drain=True)
        assert made.pages.used == 0


async def test_the_tokens_of_a_text_show_themselves(system: ta.System, device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    async with (
        open_model(device, TINY, LOADED.weights, pages=40, size=4, forward="operations") as model,
        open_generation(system, model, LOADED, positions=70) as made,
    ):
        with ta.watch_progress(events.append):
            async with open_parts(made.batcher, prompt(SYSTEM, 4)) as stream:
                tokens = [token async for token in stream]
        await made.batcher.stop(drain=True)
    assert [event.done for event in events] == [*range(1, len(tokens) + 1), len(tokens)]
    assert {(event.name, event.unit, event.work) for event in events} == {
        ("sequence", "parts", events[0].work)
    }


async def test_a_prompt_that_needs_more_pages_than_there_are(system: ta.System, device: ta.Device) -> None:
    async with (
        open_model(device, TINY, LOADED.weights, pages=8, size=4, forward="operations") as model,
        open_generation(system, model, LOADED, positions=70) as made,
    ):
        assert made.most == 32
        with pytest.raises(ValueError, match="wants 26 to begin, and there are 8 in all"):
            await made.batcher.ask(Submit(prompt([1] * 100, 30)))
        # Three that need five pages each have to wait for one another.
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(made.batcher.ask, Submit(prompt([number] * 14)))
        assert made.pages.used == 0
        await made.batcher.stop(drain=True)
