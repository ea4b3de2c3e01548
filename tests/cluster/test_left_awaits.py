"""A task may leave each kind of await at each of its suspension points, and nobody is the worse for it.

Contexts with tasks of their own, such as `open_world`, are no awaits: Trio's nurseries cannot be left either.
"""

from __future__ import annotations

import gc
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from cluster_entities import Account, Add, Counter

import trio_accel as ta
from trio_accel import agents, cluster, collectives, patterns

# The stand-in lacks libraries that some kinds need, and a sample of the kinds is not worth its time.
pytestmark = pytest.mark.any_backend

MAX_POINTS = 60
ONES = np.ones((4, 4))


def close(waiting: Any) -> None:
    waiting.close()


def throw(waiting: Any) -> None:
    with suppress(KeyError):
        waiting.throw(KeyError("by hand"))


def drop(waiting: Any) -> None:
    """The last reference is the caller's."""


LEAVES = [close, throw, drop]


@types.coroutine
def left_at(awaitable: Awaitable[Any], point: int, leave: Callable[[Any], None]) -> Generator[Any, Any, bool]:
    """Await up to a suspension point, and leave there; return whether the await has reached it."""
    waiting: Any = awaitable.__await__()
    answer: Any = None
    for number in range(point + 1):
        try:
            trap = waiting.send(answer)
        except StopIteration:
            return False
        if number < point:
            answer = yield trap
    leave(waiting)
    return True


@attrs.frozen
class Double(ta.Request["Doubler", float]):
    x: float


class Doubler(ta.Actor):
    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None]:
        await trio.lowlevel.checkpoint()
        yield

    @ta.handles(Double)
    async def double(self, message: Double) -> float:
        await trio.lowlevel.checkpoint()
        return 2 * message.x


Ask: TypeAlias = Callable[[], Awaitable[Any]]


@attrs.frozen
class Kind:
    """A kind of await.

    Attributes:
        ask: Starts one.
        check: Asks again, and checks the values.
    """

    ask: Ask
    check: Ask


@attrs.define
class There:
    """What the kinds of awaits are made from."""

    system: ta.System
    devices: list[ta.Device]
    folder: Path
    stack: AsyncExitStack
    x: ta.AccelRef
    y: ta.AccelRef

    @property
    def device(self) -> ta.Device:
        return self.devices[0]


def equal(make: Ask, *expected: Any) -> Kind:
    """A kind whose results are always the same arrays."""

    async def check() -> None:
        result = await make()
        results = result if isinstance(result, (list, tuple)) else [result]
        hosts = [await one.to_host() if isinstance(one, ta.AccelRef) else one for one in results]
        assert len(hosts) == len(expected)
        for host, wanted in zip(hosts, expected, strict=True):
            np.testing.assert_array_equal(host, wanted)

    return Kind(make, check)


async def _calls(there: There) -> Kind:
    return equal(lambda: there.x @ there.x, 4 * ONES)


async def _copies(there: There) -> Kind:
    large = np.arange(3 << 20, dtype=np.float64)
    array = await there.device.put(large)
    return equal(lambda: array.copy_to(there.devices[1]), large)


async def _puts(there: There) -> Kind:
    large = np.arange(1 << 17, dtype=np.float64)
    return equal(lambda: there.device.put(large), large)


async def _reads(there: There) -> Kind:
    large = np.arange(1 << 17, dtype=np.float64)
    array = await there.device.put(large)
    return equal(array.to_host, large)


async def _gather(there: There) -> Kind:
    return equal(lambda: ta.gather(there.x @ there.x, there.y + 1.0), 4 * ONES, 2 * ONES)


async def _statistics(there: There) -> Kind:
    async def check() -> None:
        statistics = await there.device.statistics()
        assert statistics.launched >= statistics.completed > 0

    return Kind(there.device.statistics, check)


async def _synchronize(there: There) -> Kind:
    return equal(there.device.synchronize, None)


async def _windows(there: There) -> Kind:
    signal = await there.device.put(np.zeros(64))
    return equal(lambda: ta.signal.welch(signal, window="hann", nperseg=16), np.arange(9) / 16, np.zeros(9))


async def _random(there: There) -> Kind:
    generator = ta.random.Generator(there.device, seed=1)
    mean, covariance = np.zeros(2), np.diag([1.0, 4.0])

    async def check() -> None:
        assert (await generator.multivariate_normal(mean, covariance, 3)).shape == (3, 2)

    return Kind(lambda: generator.multivariate_normal(mean, covariance, 3), check)


async def _weights(there: There) -> Kind:
    path = there.folder / "x.safetensors"

    async def save_and_load() -> Any:
        await ta.weights.save(path, {"x": there.x})
        assert "x" in (await ta.weights.inspect(path)).tensors
        return (await ta.weights.load(there.device, path))["x"]

    return equal(save_and_load, ONES)


async def _leases(there: There) -> Kind:
    async def leased() -> Any:
        async with there.x.lease() as memory:
            await trio.lowlevel.checkpoint()
            return np.array(memory)

    return equal(leased, ONES)


async def _streams(there: There) -> Kind:
    batches = await there.stack.enter_async_context(ta.stream(there.device, lambda: ONES, depth=2))
    return equal(batches.__anext__, ONES)


async def _world(there: There) -> Any:
    return await there.stack.enter_async_context(ta.open_world(there.devices))


async def _all_reduce(there: There) -> Kind:
    world = await _world(there)
    return equal(lambda: world.all_reduce([there.x, there.y]), 2 * ONES, 2 * ONES)


async def _all_gather(there: There) -> Kind:
    world, both = await _world(there), np.ones((8, 4))
    return equal(lambda: world.all_gather([there.x, there.y]), both, both)


async def _ranks(there: There) -> Kind:
    """The other rank asks for the same collective, and gets an error if the first one has left."""
    world = await _world(there)
    nursery = await there.stack.enter_async_context(trio.open_nursery())
    first, second = world.ranks

    async def reduce() -> Any:
        async def other() -> None:
            with suppress(collectives.RankFailedError):
                np.testing.assert_array_equal(await (await second.all_reduce(there.y)).to_host(), 2 * ONES)
            done.set()

        done = trio.Event()
        nursery.start_soon(other)
        try:
            return await first.all_reduce(there.x)
        finally:
            others_done.append(done)

    others_done: list[trio.Event] = []

    async def check() -> None:
        while others_done:
            await others_done.pop().wait()
        world.realign()
        np.testing.assert_array_equal(await (await reduce()).to_host(), 2 * ONES)

    return Kind(reduce, check)


async def _caches(there: There) -> Kind:
    async def square(n: int) -> ta.AccelRef:
        return await (there.x @ there.x)

    cache = agents.Cache(square, max_entries=1)
    items = iter(range(1 << 20))
    return equal(lambda: cache(next(items)), 4 * ONES)


async def _shared(there: There) -> Kind:
    shared = agents.Shared(0)

    async def check() -> None:
        version = shared.read().number
        assert (await shared.replace(7, version=version)).number == version + 1
        assert (await shared.wait_newer(version)).value == 7

    return Kind(lambda: shared.replace(7, version=shared.read().number), check)


async def _index(there: There) -> Kind:
    index = agents.VectorIndex(there.device, 4)
    await index.add([1, 2], np.eye(4)[:2])

    async def check() -> None:
        found = await index.search(np.eye(4)[1], 1)
        assert [*np.ravel(found.ids)] == [2]

    ids = iter(range(3, 1 << 20))

    async def change() -> None:
        await index.add([next(ids)], -np.eye(4)[:1])
        await index.search(np.eye(4)[0], 1)

    return Kind(change, check)


async def _batcher(there: There) -> Kind:
    async def model(items: Any) -> list[Any]:
        return [await (there.x @ there.x) for _ in items]

    batcher = await there.system.spawn(patterns.Batcher[int, Any], model, name="batcher")
    return equal(lambda: batcher.ask(patterns.Submit(1)), 4 * ONES)


async def _actors(there: There) -> Kind:
    async def spawn_ask_and_stop() -> float:
        ref = await there.system.spawn(Doubler)
        reply = await ref.ask(Double(2.0))
        await ref.stop()
        return reply

    return equal(spawn_ask_and_stop, 4.0)


async def _store(there: There) -> Any:
    store = cluster.SqliteStore(there.folder / "store.db")
    await store.open()
    there.stack.push_async_callback(store.aclose)
    return store


async def _writes(there: There) -> Kind:
    store = await _store(there)
    epoch = await store.next_epoch()
    await store.take("a", epoch)
    numbers = iter(range(1, 1 << 20))

    async def write() -> None:
        number = (await store.take("a", epoch)).number + 1
        await store.write("a", epoch, cluster.Entry(number, f"id {next(numbers)}", b"message", b"reply"))

    async def check() -> None:
        before = (await store.take("a", epoch)).number
        await write()
        journal = await store.take("a", epoch)
        assert journal.number == before + 1 == len(journal.entries)

    return Kind(write, check)


async def _workflows(there: There) -> Kind:
    store, flow = await _store(there), agents.Workflow("squares")

    @flow.step()
    async def square(n: int) -> float:
        return float((await (there.x @ there.x).to_host())[0, 0]) * n

    @flow.step()
    async def both(square: float, n: int) -> float:
        return square + n

    async def check() -> None:
        # A run that was left unwinds first.
        while flow.runs:  # noqa: ASYNC110  # nobody tells
            await trio.lowlevel.checkpoint()
        for key in range(begun):
            result = await flow.run(store=store, key=f"{key}", n=2)
            assert result.results == {"square": 8.0, "both": 10.0}

    begun = 0

    async def ask() -> None:
        nonlocal begun
        begun += 1
        await flow.run(store=store, key=f"{begun - 1}", n=2)

    return Kind(ask, check)


async def _entities(there: There, cls: Any) -> Kind:
    group = await there.stack.enter_async_context(
        there.system.open_devices([BACKEND], options=ta.DeviceOptions(isolation="inline"))
    )
    store = cluster.SqliteStore(there.folder / "entities.db")
    entities = await there.stack.enter_async_context(cluster.open_entities(there.system, group, store))
    return _adding(entities.entity(cls, "a"))


def _adding(ref: Any) -> Kind:
    begun = 0.0

    async def add() -> float:
        nonlocal begun
        begun += 1.0
        return float(await ref.ask(Add(1.0)))

    async def check() -> None:
        first, second = await add(), await add()
        assert second == first + 1.0 <= begun

    return Kind(add, check)


async def _durable(there: There) -> Kind:
    return await _entities(there, Account)


async def _volatile(there: There) -> Kind:
    return await _entities(there, Counter)


async def _cluster(there: There) -> Kind:
    options = cluster.ClusterOptions(devices=(BACKEND,), device=ta.DeviceOptions(isolation="inline"))
    made = await there.stack.enter_async_context(
        cluster.open_cluster(there.system, cluster.LocalNodes(1), options=options)
    )
    return _adding(made.entity(Counter, "a"))


KINDS: dict[str, Callable[[There], Awaitable[Kind]]] = {
    name.lstrip("_"): value
    for name, value in {
        function.__name__: function
        for function in (
            *(
                _calls,
                _copies,
                _puts,
                _reads,
                _gather,
                _statistics,
                _synchronize,
                _windows,
                _random,
                _weights,
            ),
            *(
                _leases,
                _streams,
                _all_reduce,
                _all_gather,
                _ranks,
                _caches,
                _shared,
                _index,
                _batcher,
                _actors,
            ),
            *(_writes, _workflows, _durable, _volatile, _cluster),
        )
    }.items()
}


@asynccontextmanager
async def opened(folder: Path, isolation: ta.Isolation) -> AsyncGenerator[There, None]:
    options = ta.DeviceOptions(isolation=isolation)
    async with (
        ta.open_system("test") as system,
        system.open_device(BACKEND, options=options, name="first") as first,
        system.open_device(BACKEND, options=options, name="second") as second,
        AsyncExitStack() as stack,
    ):
        x, y = await first.put(ONES), await second.put(ONES)
        yield There(system, [first, second], folder, stack, x, y)


async def others(there: There, values: list[float], *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Ask both devices until cancelled."""
    x, y = await there.device.put(ONES), await there.devices[1].put(ONES)
    task_status.started()
    while True:
        for array in (x, y):
            values.append(float((await (array @ array).to_host())[0, 0]))
            values.append(float((await (array + 3.0).to_host())[0, 0]))


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("name", KINDS)
async def test_an_await_left_at_any_point(name: str, isolation: ta.Isolation, tmp_path: Path) -> None:
    values: list[float] = []
    with trio.fail_after(60):
        async with opened(tmp_path, isolation) as there:
            kind = await KINDS[name](there)
            await kind.check()
            generations = [device.generation for device in there.devices]
            async with trio.open_nursery() as nursery:
                await nursery.start(others, there, values)
                for leave in LEAVES:
                    for point in range(MAX_POINTS):
                        reached = await left_at(kind.ask(), point, leave)
                        await trio.lowlevel.checkpoint()
                        if point % 3 == 0 or not reached:
                            await kind.check()
                        if not reached:
                            break
                gc.collect()
                await kind.check()
                # The other task has gone on all the time.
                count = len(values)
                while len(values) < count + 4:  # noqa: ASYNC110  # nobody tells
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert generations == [device.generation for device in there.devices]
            await there.stack.aclose()
    assert {*values} == {4.0}
