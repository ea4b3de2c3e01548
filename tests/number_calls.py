"""Calls of parameters with numbers outside functions of arrays: options, patterns, telemetry, messages."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel import (
    actors,
    agents,
    cluster,
    devices,
    expressions,
    graphs,
    http,
    jit,
    patterns,
    telemetry,
    testing,
    train,
)

R, P, T = ta.random, patterns, telemetry
Given: TypeAlias = dict[str, Any]
"""The argument that is tried, by its name."""


@attrs.frozen(kw_only=True)
class Place:
    """The requirements of calls: a system with a device, and arrays there."""

    system: ta.System
    device: ta.Device
    vector: ta.AccelRef
    plane: ta.AccelRef
    matrix: Any
    world: Any
    folder: Any


def over(samples: Given, given: Given) -> Given:
    """Put what is tried in place of samples."""
    return samples | given


async def model(item: Any) -> Any:
    """Serve every pattern."""
    await trio.lowlevel.checkpoint()
    return item


async def of_many(items: list[Any]) -> list[Any]:
    """Serve batches."""
    await trio.lowlevel.checkpoint()
    return items


async def rows(score: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return np.full((score.count, 4), 0.25)


async def gate(tokens: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return np.ones((len(tokens), 2)) / 2


class Still(ta.Actor):
    """Does nothing."""


@attrs.frozen
class Tick(ta.Message["Clock"]):
    """Comes later."""


@attrs.frozen
class Wait(ta.Request["Clock", None]):
    """Asks for one of the ways to wait."""

    seconds: Any
    way: str


class Clock(ta.Actor):
    """Sends to itself."""

    @ta.handles(Tick)
    async def tick(self, message: Tick) -> None:
        """Take it."""

    @ta.handles(Wait)
    async def wait(self, message: Wait) -> None:
        if message.way == "part":
            with self.context.part("part", queue_time=message.seconds):
                return
        if message.way == "pid":
            self.context.show_process(message.seconds)
            return
        # This task is the caller.
        with suppress(ValueError):
            getattr(self.context, message.way)(message.seconds, Tick()).cancel()


async def opened(at: Place, given: Given) -> None:
    options = ta.DeviceOptions(**over({"isolation": "process"}, given))
    async with at.system.open_device(BACKEND, options=options) as device:
        await (await ta.arrays.add(await device.zeros(3), 1.0)).to_host()


async def streams(at: Place, strategy: Any) -> None:
    options = ta.DeviceOptions(isolation="inline", streams=strategy)
    async with at.system.open_device(BACKEND, options=options) as device:
        await ta.linalg.matmul(np.eye(3), await device.zeros((3, 3)))


async def completing(at: Place, completion: Any) -> None:
    options = ta.DeviceOptions(isolation="inline", completion=completion)
    async with at.system.open_device(BACKEND, options=options) as device:
        await ta.linalg.matmul(np.eye(3), await device.zeros((3, 3)))


async def asked(at: Place, pattern: Any, item: Any, *args: Any, **given: Any) -> Any:
    ref = await at.system.spawn(pattern, *args, **given)
    try:
        return await ref.ask(patterns.Submit(item))
    finally:
        await ref.stop()  # noqa: ASYNC102  # the system ends it too


async def backed_off(at: Place, given: Given) -> Any:
    backoff = ta.Backoff(**given)
    return [backoff.delay(attempt, random.Random(1)) for attempt in range(4)]


async def clocked(at: Place, way: str, seconds: Any) -> None:
    ref = await at.system.spawn(Clock)
    try:
        await ref.ask(Wait(seconds, way))
    finally:
        await ref.stop()  # noqa: ASYNC102  # the system ends it too


async def spawned(at: Place, **options: Any) -> None:
    ref = await at.system.spawn(Still, **options)
    await ref.stop()


def kernel(**given: Any) -> jit.Kernel:
    parameters = {"n": jit.scalar("int64"), "x": jit.updates("float64")}
    return jit.Kernel(
        "k",
        'extern "C" __global__ void k(long long n, double* x) {}',
        **over({"parameters": parameters, "grid": 1, "block": 32, "cpu": "number_calls:nothing"}, given),
    )


def nothing(*_: Any) -> None:
    """Stand for a kernel on the CPU."""


async def launched(at: Place, n: Any = 3, **given: Any) -> Any:
    return await kernel(**given)(n, at.vector)


async def while_(at: Place, limit: Any) -> None:
    go = await at.device.put(np.array(False))
    x = await at.device.zeros(3)

    async def step() -> Any:
        async def body(x: Any) -> Any:
            await x.fill(1.0)

        return await graphs.while_(go, body, x, limit=limit)

    graph = await graphs.capture(at.device, step)
    await graph.replay()


async def recorded(at: Place, use: Callable[[Any], Any]) -> None:
    with telemetry.record(at.system) as recorder:
        use(recorder)
        str(recorder.system)


async def failed_once(at: Place, given: Given) -> None:
    fault = testing.inject_fault(at.device, "arrays.Add", **over({"delay": 0.0}, given))
    try:
        await ta.arrays.add(at.vector, 1.0)
    finally:
        fault.remove()


async def entered(manager: Any) -> None:
    async with manager:
        await trio.lowlevel.checkpoint()


async def entered_now(manager: Any) -> None:
    with manager:
        await trio.lowlevel.checkpoint()


def squared(x: Any) -> Any:
    return ta.arrays.sum(x * x)


async def tracked(total: Any) -> None:
    with ta.track_progress("work", total=total) as report:
        report(1)
    await trio.lowlevel.checkpoint()


async def cancel_graced(at: Place, seconds: Any) -> None:
    with ta.cancel_grace(seconds), trio.move_on_after(0):
        await ta.arrays.add(at.vector, 1.0)


async def indexed(at: Place, given: Given, **search: Any) -> Any:
    index = agents.VectorIndex(at.device, **over({"width": 2}, given))
    await index.add([1], [[1.0, 2.0]])
    await index.search([1.0, 2.0], **over({"k": 1}, search))


async def written(lease: Any) -> None:
    with trio.move_on_after(0.01):
        await entered(agents.Shared(1).write(lease=lease))


async def awaited_version(version: Any) -> None:
    with trio.move_on_after(0.01):
        await agents.Shared(1).wait_newer(version)


async def circuit(at: Place, given: Given) -> Any:
    breaker = patterns.CircuitBreaker(**given)
    return await breaker.wrap(model)(1)


async def limited_rate(at: Place, given: Given, **cost: Any) -> Any:
    limit = patterns.RateLimit(**over({"rate": 1e9}, given))
    for key in ("a", "b"):
        with trio.move_on_after(0.01):
            await limit.acquire(key, **cost)


async def retried(at: Place, given: Given) -> Any:
    budget = patterns.RetryBudget(**given)
    return await patterns.retry(model, budget=budget)(1)


async def attempted(at: Place, given: Given) -> Any:
    await patterns.retry(model, budget=patterns.RetryBudget(), **given)(1)


async def swapped(at: Place, given: Given) -> Any:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[Any, None]:
        yield model

    return await asked(at, patterns.HotSwap, 1, patterns.Deployment(opening), **given)


async def results(at: Place, limit: Any) -> Any:
    async with patterns.open_results(model, [1, 2, 3], limit=limit) as stream:
        return [each async for each in stream]


async def generated(at: Place, given: Given, **options: Any) -> Any:
    given = {"max_tokens": 3, "seed": 1, **given}
    with trio.move_on_after(0.2):
        return await asked(
            at,
            patterns.ContinuousBatcher,
            patterns.Generate(**over({"prompt": (0,)}, given)),
            patterns.SpeculativeStep(rows, rows, **options),
        )


async def pooled(at: Place, size: Any) -> None:
    ref = await at.system.spawn(patterns.Pool, Still, size)
    await ref.stop()


async def pushed(at: Place, given: Given, **options: Any) -> Any:
    state = await patterns.ParameterState.put(at.device, {"w": np.ones(2)})
    item = patterns.Push(**over({"gradients": {"w": np.ones(2)}, "version": 0}, given))
    return await asked(at, patterns.ParameterServer, item, state, lambda p, g, _: ta.nn.sgd(p, g), **options)


async def wrote(at: Place, token: Any) -> None:
    with patterns.Pages(at.plane).open() as table:
        await table.reserve(1)
        table.wrote([token])


async def padded(at: Place, pad: Any) -> Any:
    async def function(x: Any, lengths: Any) -> Any:
        return x

    return await patterns.padded(function, at.device, pad=pad)([np.ones(2), np.ones(3)])


async def tried(at: Place, deadline: Any) -> None:
    with deadline.scope() if hasattr(deadline, "scope") else trio.CancelScope():
        await trio.lowlevel.checkpoint()
    str(deadline)


async def world_opened(at: Place, given: Given) -> None:
    async with ta.open_world([at.device], **given) as world:
        await world.all_reduce([at.vector])


async def ranked(at: Place, method: str, *args: Any, **given: Any) -> Any:
    rank = at.world.ranks[0]
    return await getattr(rank, method)(*args, **given)


async def held(at: Place, way: str, count: Any) -> None:
    manual = testing.ManualCompletion()
    with trio.move_on_after(0.01):
        found = getattr(manual, way)(count)
        if way == "wait_held":
            await found


async def streamed(at: Place, depth: Any) -> Any:
    async with ta.stream(at.device, [np.ones(2)] * 3, depth=depth) as arrays:
        return [each async for each in arrays]


def matrix_of(at: Place, name: str, number: Any) -> Any:
    m = at.matrix
    fields = {"indptr": m.indptr, "indices": m.indices, "data": m.data}
    if name == "CooMatrix":
        fields = {"row": m.indices, "col": m.indices, "data": m.data}
    if name == "BsrMatrix":
        fields["data"] = m.data.reshape(-1, 1, 1)
    cls = getattr(ta.sparse, name)
    return cls((number, 4), *fields.values())


async def batched(at: Place, given: Given) -> Any:
    if "cost" in given:
        value = given["cost"]
        given = {"cost": lambda _: value, "max_cost": 5.0}
    elif "max_cost" in given:
        given = {"cost": lambda _: 1.0, **given}
    return await asked(at, P.Batcher, 1, of_many, **given)


async def stepped(at: Place, given: Given) -> Any:
    async def ending(batch: list[Any]) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [P.Last([1]) for _ in batch]

    name, value = next(iter(given.items()))
    if name in {"length", "cost", "priority"}:
        given = {name: lambda _: value}
    if name in {"cost", "max_cost"}:
        given = {"cost": lambda _: 1.0, "max_cost": 5.0, **given}
    return await asked(at, P.ContinuousBatcher, 1, ending, **given)


async def asked_fair(at: Place, given: Given) -> Any:
    ref = await at.system.spawn(P.FairScheduler, model)
    try:
        return await ref.ask(P.FairSubmit(1, tenant="a", **given))
    finally:
        await ref.stop()  # noqa: ASYNC102  # the system ends it too


async def drawn_after(at: Place, kind: Any, words: Any) -> Any:
    generator = R.Generator(at.device, kind, seed=1)
    generator.advance(words)
    return await generator.bits(3)


async def measured(at: Place, given: Given) -> None:
    # As many copies as are asked for are made, until it is cancelled.
    with trio.move_on_after(0):
        await ta.measure_bandwidth(at.device, at.device, **over({"nbytes": 8}, given))


async def placed(at: Place, given: Given) -> None:
    async with at.system.open_devices([BACKEND]) as group:
        with suppress(ta.PlacementError, ValueError, TypeError):
            group.place(**given)


Use: TypeAlias = Callable[[Place, Given], Any]
_ROWS = expressions.Reduction("y = x / sum(x)", precision="float64", operation="rows")
KEY = {"seed": 1, "row": 0, "shape": (3,)}


def each(call: Callable[[str, Place, Given], Any], of: str, *names: str) -> dict[str, Use]:
    """Make the same call of several names."""
    return {f"{of}.{name}": partial(call, name) for name in names}


def drawn(message: Any, **more: Any) -> Use:
    return lambda at, given: at.device.ask(message(**KEY | more | given))


async def replayed(at: Place, replay: Callable[[ta.replay.RecordingJournal], Awaitable[object]]) -> object:
    """Replay a journal of one operation."""
    journal = ta.replay.MemoryJournal()
    async with ta.replay.record(at.device, journal):
        await (at.vector * 2.0).to_host()
    return await replay(journal)


async def in_lockstep(at: Place, given: Mapping[str, Any]) -> object:
    """Replay a journal on two devices."""
    async with at.system.open_device(at.device.info.backend, name="other") as other:
        return await replayed(at, lambda journal: ta.replay.lockstep(journal, at.device, other, **given))


CALLS: dict[str, Use] = {
    "cluster.ClusterOptions": lambda at, given: cluster.ClusterOptions(**given),
    "cluster.LocalNodes": lambda at, given: cluster.LocalNodes(**given),
    "cluster.Store": lambda at, given: cluster.Store(**given),
    "cluster.SqliteStore": lambda at, given: cluster.SqliteStore(at.folder / "s", **given),
    "cluster.PostgresStore": lambda at, given: cluster.PostgresStore("", **given),
    "train.adamw": lambda at, given: train.adamw(**given).rate_of(1),
    "train.sgd": lambda at, given: train.sgd(**given).rate_of(1),
    "train.adafactor": lambda at, given: train.adafactor(**given).rate_of(1),
    "train.lion": lambda at, given: train.lion(**given).rate_of(1),
    "train.nadam": lambda at, given: train.nadam(**given).rate_of(1),
    "train.torch_optimizer": lambda at, given: train.torch_optimizer(
        "torch.optim:RAdam", **over({"lr": 0.1}, given)
    ).rate_of(1),
    "train.ParameterGroup": lambda at, given: train.ParameterGroup(bool, **given),
    "train.Lora": lambda at, given: train.Lora(["up"], **over({"rank": 2}, given)),
    "Workflow.step": lambda at, given: agents.Workflow("numbers").step(**given)(model),
    "train.constant": lambda at, given: train.adamw(train.constant(**given)).rate_of(1),
    "train.warmup_cosine": lambda at, given: train.warmup_cosine(
        **over({"rate": 1e-3, "warmup": 2, "total": 9}, given)
    )(1),
    "train.Parallel": lambda at, given: train.Parallel(**given).meshes(2),
    "train.Precision": lambda at, given: train.Precision(**given),
    "train.Checkpoint": lambda at, given: train.Checkpoint(at.folder, **given),
    "train.Config": lambda at, given: train.Config(optimizer=train.adamw(), **given),
    "train.Mesh": lambda at, given: train.Mesh(**given).part(np.ones(4)),
    "Mesh.part": lambda at, given: train.Mesh(tensor=2).part(np.ones(4), **given),
    "AccelRef.assign": lambda at, given: at.vector.assign(**given),
    "AccelRef.fill": lambda at, given: at.vector.fill(**given),
    "Call.fill": lambda at, given: (at.vector + 1).fill(**given),
    "Call.reshape": lambda at, given: (at.vector + 1).reshape(*given.values(), 1),
    "Call.transpose": lambda at, given: (at.vector + 1).transpose(*given.values(), 0),
    "ActorContext.after": lambda at, given: clocked(at, "after", given["seconds"]),
    "ActorContext.every": lambda at, given: clocked(at, "every", given["seconds"]),
    "ActorContext.part": lambda at, given: clocked(at, "part", given["queue_time"]),
    "ActorContext.show_process": lambda at, given: clocked(at, "pid", given["pid"]),
    "devices.AdaptiveCompletion": lambda at, given: completing(at, ta.AdaptiveCompletion(**given)),
    "actors.Backoff": backed_off,
    "Backoff.delay": lambda at, given: ta.Backoff().delay(**given, source=random.Random(1)),
    "Device.full": lambda at, given: at.device.full(**over({"shape": 3, "value": 1.0}, given)),
    "DeviceGroup.place": placed,
    "devices.DeviceOptions": opened,
    "actors.Intensity": lambda at, given: spawned(at, policy=ta.Policy(intensity=ta.Intensity(**given))),
    "actors.MailboxOptions": lambda at, given: spawned(at, mailbox=ta.MailboxOptions(**given)),
    "devices.PerActorStreams": lambda at, given: streams(
        at, ta.PerActorStreams(priorities={"linalg": given["priorities"]})
    ),
    "actors.Policy": lambda at, given: spawned(at, policy=ta.Policy(**given)),
    "devices.PolledCompletion": lambda at, given: completing(at, ta.PolledCompletion(**given)),
    "devices.StreamPool": lambda at, given: streams(at, ta.StreamPool(**given)),
    "devices.cancel_grace": lambda at, given: cancel_graced(at, **given),
    "actors.handles": lambda at, given: ta.handles(Wait, group="a", **given),
    "devices.measure_bandwidth": measured,
    "gradients.flat_grad_and_value": lambda at, given: ta.gradients.flat_grad_and_value(squared, **given)(
        at.vector
    ),
    "gradients.grad": lambda at, given: ta.grad(squared, **given)(at.vector),
    "gradients.value_and_grad": lambda at, given: ta.value_and_grad(squared, **given)(at.vector),
    "devices.track_progress": lambda at, given: tracked(**given),
    "http.Check": lambda at, given: http.Check("disk", trio.sleep_forever, **given),
    "http.Limits": lambda at, given: http.Limits(**given),
    "http.serve": lambda at, given: http.serve(None, signals=(), **given),  # type: ignore[arg-type]
    "telemetry.open_dashboard": lambda at, given: entered(ta.open_dashboard(at.system, **given)),
    "collectives.open_world": world_opened,
    "devices.stream": lambda at, given: streamed(at, **given),
    "actors.Buckets": lambda at, given: actors.Buckets([given["bounds"]]),
    "Buckets.add": lambda at, given: actors.Buckets([1.0]).add(**given),
    **each(
        lambda name, at, given: getattr(at.world, name)([at.vector], **given), "World", "gather", "reduce"
    ),
    "World.broadcast": lambda at, given: at.world.broadcast(at.vector, **given),
    "World.scatter": lambda at, given: at.world.scatter(at.plane, **given),
    "World.send": lambda at, given: at.world.send(at.vector, **over({"to": 0}, given)),
    "World.all_to_all": lambda at, given: at.world.all_to_all([at.vector], splits=[[given["splits"]]]),
    **each(
        lambda name, at, given: ranked(at, name, at.vector, **given),
        "Rank",
        "broadcast",
        "gather",
        "reduce",
        "send",
    ),
    "Rank.scatter": lambda at, given: ranked(at, "scatter", at.plane, **given),
    "Rank.recv": lambda at, given: ranked(at, "recv", **given),
    "Rank.all_to_all": lambda at, given: ranked(at, "all_to_all", at.vector, splits=[given["splits"]]),
    "devices.Assign": lambda at, given: at.device.ask(devices.Assign(at.vector, **given)),
    "devices.Empty": lambda at, given: at.device.ask(
        devices.Empty(
            **{"shape": (3,), "dtype": ta.DType.float64}
            | ({"shape": (given["shape"],)} if "shape" in given else given)
        )
    ),
    "devices.Fill": lambda at, given: at.device.ask(devices.Fill(at.vector, **given)),
    "devices.Stack": lambda at, given: at.device.ask(devices.Stack([np.ones(2), np.ones(3)], **given)),
    "graphs.while_": lambda at, given: while_(at, **given),
    "jit.CompileOptions": lambda at, given: launched(
        at,
        options=jit.CompileOptions(
            **({"diag_suppress": [given["diag_suppress"]]} if "diag_suppress" in given else given)
        ),
    ),
    "jit.cdiv": lambda at, given: jit.cdiv(**over({"a": 5, "b": 2}, given)),
    "jit.Kernel": lambda at, given: launched(at, **given),
    "Kernel.launch": lambda at, given: launched(at, given.get("arguments", given.get("named"))),
    "Kernel.occupancy": lambda at, given: kernel().occupancy(at.device, **given),
    **each(
        lambda name, at, given: launched(
            at, parameters={"n": jit.scalar("int64"), "x": getattr(jit, name)("float64", **given)}
        ),
        "jit",
        "reads",
        "updates",
        "writes",
    ),
    "jit.TensorMap": lambda at, given: jit.TensorMap(
        **{"box": (4, 4)} | {name: (number, number) for name, number in given.items()}
    ),
    "jit.reduction": lambda at, given: jit.reduction("x * x", "a + b", **given)(at.vector),
    "signal.lfilter": lambda at, given: ta.signal.lfilter([1.0], [1.0, 0.5], at.vector, **given),
    "signal.sosfilt": lambda at, given: ta.signal.sosfilt([1.0, 0, 0, 1, 0.5, 0], at.vector, **given),
    **each(lambda name, at, given: getattr(ta.signal, name)(at.vector, **given), "signal", "stft", "welch"),
    "signal.resample": lambda at, given: ta.signal.resample(at.vector, **over({"num": 5}, given)),
    "signal.cubic_spline": lambda at, given: ta.signal.cubic_spline([0, 1, 2], at.vector, **given),
    "signal.evaluate_spline": lambda at, given: ta.signal.evaluate_spline(
        ta.signal.CubicSpline(np.arange(4.0), at.plane), np.ones(3), **given
    ),
    "patterns.Batcher": batched,
    "patterns.ContinuousBatcher": stepped,
    "patterns.ByLoad": lambda at, given: P.ByLoad(**given),
    "patterns.CircuitBreaker": circuit,
    "agents.Cache": lambda at, given: agents.Cache(model, **over({"max_entries": 1}, given))(1),
    "agents.VectorIndex": indexed,
    "VectorIndex.search": lambda at, given: indexed(at, {}, **given),
    "Shared.write": lambda at, given: written(**given),
    "Shared.wait_newer": lambda at, given: awaited_version(**given),
    "patterns.RateLimit": limited_rate,
    "RateLimit.acquire": lambda at, given: limited_rate(at, {}, **given),
    "RateLimit.delay": lambda at, given: P.RateLimit(1.0).delay("a", **given),
    "RateLimit.try_acquire": lambda at, given: P.RateLimit(1.0).try_acquire("a", **given),
    "RateLimit.wrap": lambda at, given: P.RateLimit(1e9).wrap(model, cost=lambda _: given["cost"])(1),
    "patterns.Stage": lambda at, given: asked(
        at,
        P.Cascade,
        1,
        [P.Stage("a", model, **over({"threshold": 0.5, "confidence": float}, given)), P.Stage("b", model)],
    ),
    "Deadline.after": lambda at, given: tried(at, P.Deadline.after(**given)),
    "Deadline.from_header": lambda at, given: tried(at, P.Deadline.from_header("5", **given)),
    "patterns.FairSubmit": asked_fair,
    "patterns.FairScheduler": lambda at, given: asked(
        at,
        P.FairScheduler,
        1,
        model,
        **(
            {"weights": {"a": given["weights"]}}
            if "weights" in given
            else {"cost_of": lambda _: given["cost_of"]}
            if "cost_of" in given
            else given
        ),
    ),
    "patterns.Weights": lambda at, given: (
        P.Weights({"a": given["weights"]}) if "weights" in given else P.Weights(**given)
    ),
    "patterns.HotSwap": swapped,
    "patterns.MoeRouter": lambda at, given: asked(
        at, P.MoeRouter, np.ones((4, 2)), gate, [model, model], **given
    ),
    "ParameterState.put": lambda at, given: P.ParameterState.put(at.device, {"w": np.ones(2)}, **given),
    "patterns.ParameterServer": lambda at, given: pushed(at, {}, **given),
    "patterns.Push": pushed,
    "patterns.PipelineStage": lambda at, given: asked(at, P.Pipeline, 1, [P.PipelineStage(model, **given)]),
    "patterns.Hedge": lambda at, given: asked(
        at, P.ReplicaPool, 1, [model, model], hedge=P.Hedge(**over({"after": 0.1}, given))
    ),
    "patterns.Pool": lambda at, given: pooled(at, **given),
    "patterns.Pages": lambda at, given: P.Pages(at.plane, **given),
    "Pages.open": lambda at, given: P.Pages(at.plane).open([given["tokens"]]),
    "Pages.demand": lambda at, given: P.Pages(at.plane).demand([given["tokens"]]),
    "RunningSequence.begin_again": lambda at, given: P.RunningSequence(0, 1).begin_again(**given),
    "PageTable.reserve": lambda at, given: P.Pages(at.plane).open().reserve(**given),
    "PageTable.wrote": lambda at, given: wrote(at, given["tokens"]),
    "patterns.ReplicaPool": lambda at, given: asked(at, P.ReplicaPool, 1, [model, model], **given),
    "patterns.open_results": lambda at, given: results(at, **given),
    "patterns.RetryBudget": retried,
    "patterns.RetryPolicy": lambda at, given: P.RetryPolicy(budget=P.RetryBudget(), **given),
    "patterns.retry": attempted,
    "patterns.Generate": lambda at, given: generated(
        at, {name: (value,) if name in ("prompt", "stop") else value for name, value in given.items()}
    ),
    "patterns.PromptLookup": lambda _, given: P.PromptLookup(**over({"vocabulary": 3}, given)),
    "patterns.SpeculativeStep": lambda at, given: generated(at, {}, **given),
    "programs.method": lambda _, given: ta.programs.method(**given),
    "patterns.padded": lambda at, given: padded(at, **given),
    "random.Generator": lambda at, given: R.Generator(at.device, **given).uniform(3),
    "Generator.advance": lambda at, given: R.Generator(at.device, seed=1).advance(**given),
    "Generator.jumped": lambda at, given: R.Generator(at.device, seed=1).jumped(**given).uniform(3),
    "Generator.advance of mrg32k3a": lambda at, given: drawn_after(at, "mrg32k3a", given["words"]),
    "Generator.advance of xorwow": lambda at, given: drawn_after(at, "xorwow", given["words"]),
    "Generator.integers": lambda at, given: R.Generator(at.device).integers(
        **over({"shape": 3, "low": 0, "high": 5}, given)
    ),
    **each(
        lambda name, at, given: getattr(R.Generator(at.device), name)(**over({"shape": 3}, given)),
        "Generator",
        "uniform",
        "normal",
        "lognormal",
        "exponential",
    ),
    "random.Sobol": lambda at, given: R.Sobol(at.device, **over({"d": 2}, given)).random(2),
    "random.Bits": drawn(R.Bits),
    "random.Exponential": drawn(R.Exponential),
    "random.Integers": drawn(R.Integers, low=0, high=5),
    "random.Lognormal": drawn(R.Lognormal),
    "random.Normal": drawn(R.Normal),
    "random.Uniform": drawn(R.Uniform),
    "random.Rejected": drawn(R.Rejected, distribution="gamma", dtype=ta.DType.float64, a=np.array(2.0)),
    "random.SequenceBits": lambda at, given: at.device.ask(
        R.SequenceBits(
            **{"sequence": "xorwow", "state": (1, 2, 3, 4, 5, 6), "shape": (3,)}
            | ({"state": (given["state"],) * 6} if "state" in given else given)
        )
    ),
    "random.SobolPoints": lambda at, given: at.device.ask(
        R.SobolPoints(
            **over(
                {
                    "first": 0,
                    "count": 3,
                    "directions": np.ones((2, 2), np.uint32),
                    "shift": np.ones(2, np.uint32),
                },
                given,
            )
        )
    ),
    "sparse.CsrToBsr": lambda at, given: at.device.ask(
        ta.sparse.CsrToBsr(
            **{"matrix": at.matrix, "blocksize": (2, 2)}
            | ({"blocksize": (given["blocksize"], 2)} if "blocksize" in given else given)
        )
    ),
    "sparse.TakeRows": lambda at, given: at.device.ask(
        ta.sparse.TakeRows(at.matrix, np.array([0, 1]), **given)
    ),
    "sparse.Spgemm": lambda at, given: at.device.ask(ta.sparse.Spgemm(at.matrix, at.matrix, **given)),
    "sparse.Spmm": lambda at, given: at.device.ask(ta.sparse.Spmm(at.matrix, at.plane, **given)),
    "sparse.LeastResidual": lambda at, given: at.device.ask(
        ta.sparse.LeastResidual(
            **over({"h": np.eye(3), "sizes": np.ones(3), "size": 2, "step_count": 1, "tolerance": 1}, given)
        )
    ),
    **each(
        lambda name, at, given: at.device.ask(ta.sparse.ToDense(matrix_of(at, name, given["shape"]))),
        "sparse",
        "BsrMatrix",
        "CooMatrix",
        "CscMatrix",
        "CsrMatrix",
    ),
    "tables.HashMap": lambda at, given: ta.tables.HashMap(at.device, **given).erase(np.arange(3)),
    "HashMap.rehash": lambda at, given: ta.tables.HashMap(at.device, 3).rehash(**given),
    "HashMap.lookup": lambda at, given: ta.tables.HashMap(at.device, 3).lookup(np.arange(3), **given),
    "spatial.cell_list": lambda at, given: ta.spatial.cell_list(
        at.plane[:, :2], **over({"size": 1.0} | ({"low": 0, "shape": 2} if "box" not in given else {}), given)
    ),
    "spatial.neighbours": lambda at, given: ta.spatial.neighbours(
        at.plane[:, :2], **over({"radius": 1.0}, given)
    ),
    "CustomCounter.add": lambda at, given: recorded(
        at, lambda recorder: recorder.counter("a", "b").add(**given)
    ),
    "CustomGauge.set": lambda at, given: recorded(at, lambda recorder: recorder.gauge("a", "b").set(**given)),
    "CustomHistogram.observe": lambda at, given: recorded(
        at, lambda recorder: recorder.histogram("a", "b").observe(**given)
    ),
    "Recorder.histogram": lambda at, given: recorded(
        at, lambda recorder: recorder.histogram("a", "b", bounds=[given["bounds"]])
    ),
    "replay.replay": lambda at, given: replayed(
        at, lambda journal: ta.replay.replay(journal, at.device, **given)
    ),
    "replay.lockstep": in_lockstep,
    "replay.Tolerance": lambda at, given: replayed(
        at,
        lambda journal: ta.replay.replay(journal, at.device, tolerance=ta.replay.Tolerance(**given)),
    ),
    "telemetry.record": lambda at, given: entered_now(T.record(at.system, **given)),
    "testing.inject_fault": failed_once,
    "ManualCompletion.release": lambda at, given: held(at, "release", **given),
    "ManualCompletion.wait_held": lambda at, given: held(at, "wait_held", **given),
    "testing.FixedRandom": lambda at, given: testing.FixedRandom(**given).random(),
    "Elementwise.compute": lambda at, given: jit.elementwise("x + i(0)")(at.vector, **given),
    "Elementwise of numbers": lambda at, given: jit.elementwise("x + n")(at.vector, given["n"]),
    "Elementwise of indices": lambda at, given: jit.elementwise("i(0) + i(1) * 1.0")(
        device=at.device, shape=(3, given["shape"])
    ),
    "Reduction.compute": lambda at, given: at.device.ask(_ROWS.compute(at.plane, **given)),
}

# Numbers of parameters without a number in their annotation: messages, and arguments behind an alias.
UNSAID: dict[str, tuple[str, ...]] = {
    "patterns.ContinuousBatcher": (
        *("length", "cost", "max_cost", "priority", "max_sequences", "max_positions", "buffer"),
        *("capacity", "retry", "splits"),
    ),
    "AccelRef.assign": ("value",),
    "random.Bits": ("seed", "row"),
    "random.Exponential": ("seed", "row", "scale"),
    "random.Integers": ("seed", "row", "low", "high"),
    "random.Lognormal": ("seed", "row", "mean", "sigma"),
    "random.Normal": ("seed", "row", "loc", "scale"),
    "random.Uniform": ("seed", "row", "low", "high"),
    "random.Rejected": ("seed", "row"),
    "random.SequenceBits": ("state",),
    "random.SobolPoints": ("first", "count"),
    "spatial.cell_list": ("size", "low", "shape", "box"),
    "spatial.neighbours": ("radius", "box"),
    "sparse.CsrToBsr": ("blocksize", "size"),
    "sparse.TakeRows": ("size",),
    "sparse.Spgemm": ("size",),
    "sparse.Spmm": ("alpha", "beta"),
    "sparse.LeastResidual": ("step_count", "tolerance"),
    "jit.Kernel": ("grid", "block", "shared", "cluster"),
    "jit.TensorMap": ("box", "element_strides"),
    "Elementwise of numbers": ("n",),
    "Elementwise of indices": ("shape",),
    "Generator.advance of mrg32k3a": ("words",),
    "Generator.advance of xorwow": ("words",),
}

_REASONS: dict[str, str] = {
    "the package makes it, of what it has seen": (
        "actors.ActorEvent actors.ActorRestarted actors.ActorSnapshot actors.ActorStarted "
        "actors.ActorTerminated actors.MessageCancelled actors.MessageCompleted actors.MessageDropped "
        "actors.MessageEvent actors.MessageFailed actors.MessageStarted actors.MessageWithdrawn "
        "agents.HitStatistics agents.RunStep agents.RunningStep agents.Version agents.WorkflowResult "
        "cluster.AgentConfig cluster.Entry "
        "cluster.Home cluster.Journal cluster.Member cluster.Started cluster.Table "
        "PostgresStore.take PostgresStore.write SqliteStore.take SqliteStore.write Store.take Store.write "
        "PostgresStore.save PostgresStore.check SqliteStore.save SqliteStore.check Store.save Store.check "
        "actors.LoopHolds actors.Reading actors.RestartInfo "
        "actors.SupervisorFailed actors.Timer collectives.Rank "
        "collectives.World Optimizer.rate_of train.Step train.Steps "
        "devices.CacheStatistics devices.DeviceLoad devices.DeviceStatistics devices.ProgressEvent "
        "devices.KeptStatistics devices.LibraryStatistics devices.ProcessStatistics ProcessStatistics.of "
        "devices.ProgramCost devices.QueueStatistics devices.RecoveryCost "
        "jit.Occupancy linalg.LstsqResult patterns.BatcherStatistics patterns.CallStatistics "
        "patterns.ContinuousStatistics patterns.RunningSequence "
        "patterns.CascadeAnswer patterns.CascadeStatistics "
        "patterns.DecodingStatistics patterns.FairStatistics "
        "patterns.HotSwapStatistics patterns.MoeStatistics patterns.PageTable patterns.PagesStatistics "
        "patterns.ParameterServerStatistics patterns.ParameterState patterns.Parameters "
        "patterns.PartStream patterns.DeclinedStage patterns.WaitingStatistics "
        "patterns.PipelineStageStatistics patterns.PipelineStatistics patterns.ReplicaPoolStatistics "
        "patterns.ReplicaStatistics patterns.Routed patterns.RouterStatistics patterns.RoutingStatistics "
        "patterns.Score patterns.StageStatistics patterns.Swapped "
        "RoutingStatistics.zeros ndimage.LabelResult sparse.Factors sparse.Preconditioner "
        "sparse.SolveResult replay.Report replay.Failure replay.Difference replay.Skipped "
        "spatial.CellList "
        "tensor.ContractionPath telemetry.ActorMemoryRow telemetry.ActorRow "
        "telemetry.DeviceRow telemetry.FailureRow telemetry.Histogram telemetry.KeptRow telemetry.LibraryRow "
        "telemetry.OperationRow telemetry.ProcessRow ProcessRow.of "
        "telemetry.CustomHistogram telemetry.Recorder telemetry.SystemSnapshot "
        "weights.TensorInfo"
    ),
    "plans of operations call it, with shapes of arrays": (
        "Contracting.sum Elementwise.take Expression.take Kernel.plan "
        "Reduction.take Scatter.take "
        "Planner.status Planner.memory devices.in_range "
        "expressions.axes_of expressions.contraction_path "
        "expressions.diagonal_of expressions.permuted expressions.reduced "
    ),
    "a function of the package asks for it, with numbers of its own": (
        "sparse.CgSteps sparse.ExtendBasis sparse.Factor sparse.SolveFactored"
    ),
    "a worker asks for it, with what the user's class has defined": "Module.output_shape Module.start",
    "it compares the number alone": "Shared.replace Trainer.steps Cluster.wait_epoch EntityRouter.wait_epoch",
    "nodes call it, with the time of their own options": "Cluster.settle EntityRouter.settle",
    "test_options.py tries its types": "actors.SystemOptions",
    "a trainer calls it with its own numbers": (
        "Logger.log CsvLogger.log RecorderLogger.log TensorBoardLogger.log"
    ),
    "it is the checksum of a model": "Lora.load Lora.save",
    "it counts devices that are open": "Parallel.meshes",
    "a method or a function that is tried makes it": (
        "expressions.Compute expressions.Contract expressions.Reduction fft.ComputeFused graphs.While "
        "jit.Compute jit.LaunchKernel jit.Parameter jit.QueryOccupancy jit.Reduction tensor.Contract"
    ),
    "what it takes is not a number": (
        "devices.Copy devices.Operation devices.Put devices.ToHost graphs.If graphs.Replay graphs.Switch "
        "linalg.CheckDiagonal linalg.LuSolve linalg.SolveBanded linalg.SolveToeplitz linalg.SolveTriangular "
        "sparse.BsrToCsr sparse.CheckStructure sparse.CooToCsr sparse.CsrToCsc sparse.FindRows sparse.Ic0 "
        "sparse.Ilu0 sparse.SumOfTwo"
    ),
    "Ray has its own bounds": "cluster.RayNodes",
    "it is called where ranks meet": "ProgramRank.broadcast ProgramRank.recv ProgramRank.send",
    "it takes a program of each rank": "World.call",
}
MADE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""What is not tried, with the reason."""
