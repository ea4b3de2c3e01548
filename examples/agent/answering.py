"""The agent: a workflow that finds passages for a question, and answers from them token by token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import trio
from documentation import Passage, Passages, embedding
from encoder import Encoder
from generation import Generation, Prompt
from model import GREEDY
from text import Shown

from trio_accel.agents import Cache, VectorIndex, Workflow, current_step
from trio_accel.patterns import PartStream, open_parts

__all__ = ["Agent", "Answer", "workflow"]

FOUND, SOURCES, QUOTED = 24, 3, 400
SYSTEM = "You answer questions about the Python library trio_accel in one or two sentences, from its pages."


@attrs.frozen
class Answer:
    """The text of an answer, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class Agent:
    """The models and the index. An answer has at most `most` tokens."""

    encoder: Encoder
    index: VectorIndex
    passages: Passages
    generation: Generation
    most: int

    def prompt(self, question: str, sources: list[Passage]) -> list[int]:
        """Return the tokens of a prompt: the two best sources, the best one last, and the question."""
        quoted = "\n\n".join(f"{one.title}: {one.text[:QUOTED]}" for one in reversed(sources[:2]))
        messages: list[Mapping[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{quoted}\n\nQuestion: {question}"},
        ]
        return self.generation.loaded.text.chat(messages)


def workflow(agent: Agent) -> Workflow:
    """Return the workflow of an agent."""
    flow = Workflow("answers")
    embed = Cache(partial(embedding, agent.encoder), max_entries=10_000)

    @flow.step(attempts=3)
    async def found(question: str) -> list[tuple[int, float]]:
        ids, scores = await agent.index.search(await embed(question), FOUND)
        return list(zip(ids.tolist(), scores.tolist(), strict=True))

    @flow.step()
    async def sources(question: str, found: list[tuple[int, float]]) -> list[Passage]:
        return agent.passages.ranked(question, found, SOURCES)

    @flow.step()
    async def answer(question: str, sources: list[Passage]) -> Answer:
        step, shown, tokens = current_step(), Shown(agent.generation.loaded.text), list[int]()
        prompt = await trio.to_thread.run_sync(agent.prompt, question, sources)
        streams = list[PartStream[int]]()
        async with AsyncExitStack() as stack:

            async def next_token() -> int | None:
                if not streams:
                    # After a restart of the program, append the stored tokens to the prompt.
                    rest = agent.most - len(tokens)
                    asked = Prompt(tokens=[*prompt, *tokens], most=rest, sampling=GREEDY)
                    opening = open_parts(agent.generation.batcher, asked)
                    streams.append(await stack.enter_async_context(opening))
                return await anext(streams[0], None)

            text = ""
            while len(tokens) < agent.most:
                token = await step.once(f"token {len(tokens)}", next_token)
                if token is None:
                    break
                tokens.append(token)
                text += (part := shown.push(token))
                await step.tell(part)
            text += (part := shown.finish())
            await step.tell(part)
        return Answer(text, tuple(tokens))

    return flow
