"""The actors of the service: what a request passes on its way to the device and back.

A request is charged to its tenant (`RateLimit`), waits for its tenant's turn (`FairScheduler`), joins a batch
(`Batcher`), and goes to the model that serves now (`HotSwap`), which is a program on a supervised device. A
`CircuitBreaker` around all of it answers at once while the device does not work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import trio
from search_model import PROBE, VERSIONS, Task, check, cost_of, kind_of, load_model

import trio_accel as ta
from trio_accel import patterns

BATCH = MOST_TASKS = 64
# Requests of a tenant at once. Those beyond it are refused before they are read.
AT_ONCE = 16
# Tasks that the model works on or gathers at once: enough for a batch that runs, and the next one.
IN_FLIGHT = 2 * BATCH


@attrs.frozen
class Answer:
    """The model's answer, and which model it was."""

    model: str
    value: Any


Batch = list[Task]
Answers = patterns.BatchResults[Answer]


@asynccontextmanager
async def open_model(
    device: ta.Device, folder: Path, version: str
) -> AsyncGenerator[patterns.Model[Batch, Answers], None]:
    """Open a model whose answers say which one it was; what `HotSwap` is given."""
    async with load_model(device, folder, version) as model:

        async def serve(batch: Batch) -> list[Answer]:
            return [Answer(version, value) for value in await model(batch)]

        yield serve


async def probe(model: Any) -> None:
    """Try a model before it serves."""
    (answer,) = await model([PROBE])
    check(answer.value)


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
            call = patterns.FairCall(task, tenant=tenant, cost=cost_of(task))
            answers[place] = await self.scheduler.ask(call)

        with self.breaker.attempt():
            try:
                async with trio.open_nursery() as nursery:
                    for place, task in enumerate(tasks):
                        nursery.start_soon(do, place, task)
            except BaseExceptionGroup as group:
                raise one_of(group) from None
        return answers

    async def swap(self, version: str) -> patterns.Swapped:
        """Replace the model, while requests are served."""
        opening = partial(open_model, self.device, self.folder, version)
        return await self.models.ask(patterns.Swap(opening, version))


def one_of(group: BaseException) -> BaseException:
    """One error of a group, which is enough to tell; the group, if it has nothing but cancellations.

    A deadline may pass just when an error is raised. Then there are both.
    """
    return next((leaf for leaf in leaves_of(group) if isinstance(leaf, Exception)), group)


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors in nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for one in group.exceptions for leaf in leaves_of(one)]


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
    first = next(iter(VERSIONS))
    deployment = patterns.Deployment(partial(open_model, device, folder, first), first)
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
        max_queued=AT_ONCE * MOST_TASKS,
        name="scheduler",
    )
    # The largest request of any tenant fits into a full bucket.
    limit = patterns.RateLimit(rate, burst=max(rate, MOST_TASKS / min(tenants.values())))
    breaker = patterns.CircuitBreaker(share=0.5, calls=20, within=5.0, open_for=1.0)
    try:
        yield Service(device, folder, tenants, scheduler, models, limit, breaker)
    finally:
        with trio.move_on_after(10.0, shield=True):
            for actor in (scheduler, batcher, models):
                await actor.stop(drain=True)
