"""The actors of the service: what a request passes on its way to the device and back.

A request is charged to its tenant (`RateLimit`), waits for its tenant's turn (`FairScheduler`), joins a batch
(`Batcher`), and goes to the model that serves now (`HotSwap`), which is a program on a supervised device. A
`CircuitBreaker` around all of it answers at once while the device does not work.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import trio
from search_model import SentenceModel, Vocabulary, file_of

import trio_accel as ta
from trio_accel import patterns

BATCH = MOST_TEXTS = 64
# Texts that the model works on or gathers at once: enough for a batch that runs, and the next one.
IN_FLIGHT = 2 * BATCH


@attrs.frozen
class Task:
    """What is asked of the model for one text.

    Attributes:
        kind: Whether its vector is wanted, or the nearest sentences.
        text: The text.
        count: How many sentences.
    """

    kind: Literal["embed", "similar"]
    text: str
    count: int = 0


def kind_of(task: Task) -> str:
    """Tasks of one kind go through the model together."""
    return task.kind


@attrs.frozen
class Answer:
    """The model's answer, and which model it was."""

    model: str
    value: Any


Batch = list[Task]
Answers = patterns.BatchResults[Answer]


@asynccontextmanager
async def load_model(
    device: ta.Device, folder: Path, version: str
) -> AsyncGenerator[patterns.Model[Batch, Answers], None]:
    """Load a model from its file and open it as a program; what `HotSwap` is given."""
    weights = await ta.weights.load(device, file_of(folder, version), packed=True)
    words, sentences = [json.loads(weights.metadata[name]) for name in ("words", "sentences")]
    vocabulary = Vocabulary({word: number for number, word in enumerate(words)})
    arrays = weights["table"], weights["corpus"]
    async with ta.open_program(device, SentenceModel, *arrays, name=version) as program:
        yield partial(_serve, program, vocabulary, sentences, version)


async def _serve(
    program: ta.programs.Program[SentenceModel],
    vocabulary: Vocabulary,
    sentences: Sequence[tuple[str, str]],
    version: str,
    batch: Batch,
) -> list[Answer]:
    words, shown = vocabulary.batch([task.text for task in batch])
    if batch[0].kind == "embed":
        vectors = await (await program.ask(SentenceModel.embed, words, shown)).to_host()
        return [Answer(version, vector.tolist()) for vector in vectors]
    most = min(max(task.count for task in batch), len(sentences))
    found = await program.ask(SentenceModel.similar, words, shown, most)
    numbers, cosines = [(await array.to_host()).tolist() for array in found]
    answers: list[Answer] = []
    for task, places, row in zip(batch, numbers, cosines, strict=True):
        nearest = zip(places[: task.count], row[: task.count], strict=True)
        answers.append(Answer(version, [(*sentences[place], cosine) for place, cosine in nearest]))
    return answers


async def probe(model: Any) -> None:
    """Try a model before it serves: the nearest sentence of a text is one that is near."""
    (answer,) = await model([Task("similar", "the worker process was killed", 1)])
    ((_, _, cosine),) = answer.value
    if not 0.3 < cosine <= 1.001:
        raise ValueError(f"the nearest sentence has a cosine of {cosine:.2f}")


@attrs.frozen
class Service:
    """The service, without HTTP. Made by `open_service`."""

    device: ta.Device
    folder: Path
    tenants: Mapping[str, float]
    scheduler: ta.Ref[patterns.FairScheduler[Task, Answer]]
    models: ta.Ref[patterns.HotSwap[Batch, Answers]]
    limit: patterns.RateLimit
    breaker: patterns.CircuitBreaker

    async def ask(self, tenant: str, tasks: Sequence[Task]) -> list[Answer]:
        """Have tasks of a tenant done, all or none.

        Raises:
            RateLimitError: The tenant asks too much.
            MailboxFullError: Too many requests of the tenant wait.
            CircuitOpenError: The device does not work at the moment.
        """
        tokens = len(tasks) / self.tenants[tenant]
        if not self.limit.try_acquire(tenant, cost=tokens):
            after = self.limit.delay(tenant, cost=tokens)
            raise patterns.RateLimitError(f"{tenant} asks too much", retry_after=after)
        answers: list[Answer] = [Answer("", None)] * len(tasks)

        async def do(place: int, task: Task) -> None:
            cost = float(max(1, len(task.text.split())))
            answers[place] = await self.scheduler.ask(patterns.FairCall(task, tenant=tenant, cost=cost))

        with self.breaker.attempt():
            try:
                async with trio.open_nursery() as nursery:
                    for place, task in enumerate(tasks):
                        nursery.start_soon(do, place, task)
            except ExceptionGroup as group:
                # One is enough to tell.
                raise group.exceptions[0] from None  # noqa: ASYNC123
        return answers

    async def swap(self, version: str) -> patterns.Swapped:
        """Replace the model, while requests are served."""
        opening = partial(load_model, self.device, self.folder, version)
        return await self.models.ask(patterns.Swap(opening, version))


@asynccontextmanager
async def open_service(
    system: ta.System, device: ta.Device, folder: Path, tenants: Mapping[str, float], *, rate: float
) -> AsyncGenerator[Service, None]:
    """Open the service on a device.

    Args:
        system: Where its actors live.
        device: Where the model runs.
        folder: Where the files of the models are.
        tenants: Weights by API key.
        rate: Texts per second that a tenant of weight 1 may ask for in the long run.
    """
    deployment = patterns.Deployment(partial(load_model, device, folder, "v1"), "v1")
    models = await system.spawn(
        patterns.HotSwap[Batch, Answers], deployment, probe=probe, drain_for=10.0, name="models"
    )
    batcher = await system.spawn(
        patterns.Batcher[Task, Answer], models, max_size=BATCH, max_wait=0.01, bucket=kind_of, name="batcher"
    )
    weights = patterns.Weights(tenants, default=None)
    scheduler = await system.spawn(
        patterns.FairScheduler[Task, Answer],
        batcher,
        max_in_flight=IN_FLIGHT,
        weights=weights,
        max_queued=512,
        name="scheduler",
    )
    # The largest request of any tenant fits into a full bucket.
    limit = patterns.RateLimit(rate, burst=max(rate, MOST_TEXTS / min(tenants.values())))
    breaker = patterns.CircuitBreaker(share=0.5, calls=20, within=5.0, open_for=1.0)
    try:
        yield Service(device, folder, tenants, scheduler, models, limit, breaker)
    finally:
        with trio.move_on_after(10.0, shield=True):
            for actor in (scheduler, batcher, models):
                await actor.stop(drain=True)
