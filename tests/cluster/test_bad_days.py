"""Bad days of clusters: callers give up, networks lose one direction, clocks jump, versions differ."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import trio
from cluster_entities import Account, Add, Counter, Echo, Held, Stubborn, Where, Write, until

import trio_accel as ta
from trio_accel import cluster, patterns
from trio_accel.cluster import _link as links

INLINE = ta.DeviceOptions(isolation="inline")
KEYS = [f"key {number}" for number in range(12)]


@asynccontextmanager
async def opened(
    nodes: cluster.LocalNodes, store: Any = None, **options: Any
) -> AsyncGenerator[tuple[ta.System, cluster.Cluster], None]:
    # A busy machine may be silent for long.
    options.setdefault("heartbeat_timeout", 60.0)
    chosen = cluster.ClusterOptions(device=INLINE, backoff=ta.Backoff(base=0.05), **options)
    with trio.fail_after(200):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, store=store, options=chosen) as made,
        ):
            yield system, made


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_ten_thousand_askers_that_give_up_hold_nothing() -> None:
    async with opened(cluster.LocalNodes(1)) as (_, made):
        ref = made.entity(Counter, "a")
        assert await ref.ask(Add(1.0)) == 1.0
        [link] = made._links.values()
        before, late = resident_bytes(), 0

        async def give_up(number: int) -> None:
            nonlocal late
            with trio.move_on_after(0.2 + number % 100 / 200) as scope:
                await ref.ask(Echo(None, 60.0))
            late += scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            for _ in range(5000):
                nursery.start_soon(ref.ask, Echo(None, 60.0))
            for number in range(5000):
                nursery.start_soon(give_up, number)
            await until(lambda: late == 5000)
            assert link._window.borrowed_tokens == 64
            nursery.cancel_scope.cancel()
        await until(lambda: not (link._replies or link._outcomes or link._window.borrowed_tokens))
        # The request that asks is one of them.
        while await ref.ask(Held()) > 1:  # noqa: ASYNC110  # nobody is told
            await trio.lowlevel.checkpoint()
        assert await ref.ask(Add(1.0)) == 2.0
        # The allocator keeps memory of 10 000 tasks: 70 MiB with Python 3.14.
        assert resident_bytes() - before < 96 << 20


async def test_ten_thousand_askers_of_a_slow_entity_wait() -> None:
    async with opened(cluster.LocalNodes(1)) as (_, made):
        ref, total = made.entity(Counter, "a"), 0.0
        [link] = made._links.values()
        most = 0

        async def ask() -> None:
            nonlocal total
            total = max(total, await ref.ask(Add(1.0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ref.ask, Echo(None, 1.0))
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(10_000):
                nursery.start_soon(ask)
            while total < 10_000:
                most = max(most, len(link._replies))
                await trio.sleep(0.01)
        # A heartbeat does not count for the window.
        assert 64 <= most <= 65
        assert total == 10_000.0


async def test_an_entity_is_a_model_for_patterns() -> None:
    nodes = cluster.LocalNodes(3)
    async with opened(nodes) as (system, made):
        replicas = made.replicas(Counter)
        pool = await system.spawn(patterns.ReplicaPool, replicas, hedge=patterns.Hedge(after=0.2, share=1.0))
        limit = patterns.RateLimit(1e6)
        breaker = patterns.CircuitBreaker()
        limited = breaker.wrap(limit.wrap(made.entity(Counter, "limited")))
        assert [await limited(Add(1.0)) for _ in range(3)] == [1.0, 2.0, 3.0]

        lost = 0

        async def ask(number: int) -> None:
            nonlocal lost
            try:
                assert await pool.ask(patterns.Submit(Echo(number, 0.01))) == number
            except cluster.NodeLostError:
                lost += 1

        # A departed node gets nothing more; its requests in flight are lost, as they may have been executed.
        dead = min(replicas)
        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(ask, number)
                if number == 30:
                    os.kill(nodes.pid(dead), signal.SIGKILL)
                    nodes.remove(dead)
                # clock: any moment will do
                await trio.sleep(0.005)
        assert lost <= 3
        with trio.fail_after(60):
            await until(lambda: not replicas[dead].is_available)
        statistics = await pool.ask(patterns.GetStatistics())
        assert {one.name: one.is_available for one in statistics.replicas}[dead] is False
        asked = Counts({one.name: one.answered for one in statistics.replicas})
        for number in range(6):
            await ask(number)
        again = Counts(
            {one.name: one.answered for one in (await pool.ask(patterns.GetStatistics())).replicas}
        )
        assert (again - asked)[dead] == 0
        assert sum((again - asked).values()) >= 6
        assert lost <= 3


async def test_entities_are_stages() -> None:
    async with opened(cluster.LocalNodes(3)) as (system, made):
        # A cascade asks the next entity where the first one is not sure, and a pipeline hands on.
        first, second = made.entity(Counter, "first"), made.entity(Counter, "second")
        cascade = await system.spawn(
            patterns.Cascade,
            [
                patterns.Stage("first", first, confidence=float, threshold=2.5),
                patterns.Stage("second", second),
            ],
        )
        answers = [await cascade.ask(patterns.Submit(Add(1.0))) for _ in range(3)]
        assert [one.stage for one in answers] == ["second", "second", "first"]
        assert [one.result for one in answers] == [1.0, 2.0, 3.0]

        async def doubled(total: float) -> Add:
            return Add(2 * total)

        pipeline = await system.spawn(
            patterns.Pipeline, made.entity(Counter, "p"), doubled, made.entity(Counter, "q")
        )
        assert [await pipeline.ask(patterns.Submit(Add(1.0))) for _ in range(3)] == [2.0, 6.0, 12.0]
        router = await system.spawn(
            patterns.Router, made.replicas(Counter), by=patterns.ByKey(lambda request: str(request.value))
        )
        nodes_of = {await router.ask(patterns.Submit(Echo(number))) for number in range(10)}
        assert nodes_of == set(range(10))


async def test_keys_of_other_types_with_the_same_text_differ(tmp_path: Path) -> None:
    store = cluster.SqliteStore(tmp_path / "store.db")
    keys: list[Any] = [1, "b'1'", "'1'", "1.0", b"b'1'"]
    async with opened(cluster.LocalNodes(2), store) as (_, made):
        for cls in (Counter, Account):
            for number, key in enumerate(keys, 1):
                assert await made.entity(cls, key).ask(Add(float(number))) == number
            for number, key in enumerate(keys, 1):
                assert await made.entity(cls, key).ask(Add(0.0)) == number
            # These are taken for a mistake.
            for key in ("1", b"1"):
                with pytest.raises(TypeError, match="use keys of one type"):
                    made.entity(cls, key)


async def test_a_node_returning_with_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = cluster.LocalNodes(2)
    async with opened(nodes) as (_, made):
        for key in KEYS:
            await made.entity(Counter, key).ask(Add(1.0))
        real = links.VERSION
        # The program's version differs from its next agent's.
        monkeypatch.setattr(links, "VERSION", "trio_accel 0.0.1, Python 3.99")
        os.kill(nodes.pid("node-0"), signal.SIGKILL)
        await until(lambda: "it has " in caplog.text)
        assert f"it has {real}, and this is trio_accel 0.0.1, Python 3.99" in caplog.text
        assert [one.name for one in made.members] == ["node-1"]
        for key in KEYS:
            assert (await made.entity(Counter, key).ask(Where()))[0] == "node-1"
        monkeypatch.setattr(links, "VERSION", real)
        await until(lambda: len(made.members) == 2)
        assert {(await made.entity(Counter, key).ask(Where()))[0] for key in KEYS} == {"node-0", "node-1"}


JUMPS = """
import itertools, time
real, jumps = time.time, itertools.cycle((0.0, 86_400.0, -86_400.0, 1e9, -1e9))
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""


class JumpyStore(cluster.SqliteStore):
    """A store on a database with a clock that jumps by ten hours."""

    words: ClassVar[Mapping[str, str]] = {
        **cluster.SqliteStore.words,
        "NOW": f"({cluster.SqliteStore.words['NOW']} + (random() % 3) * 36000)",
    }


async def test_clocks_that_jump_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPS, "ascii")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    real, jumps = time.time, itertools.cycle((0.0, 86_400.0, -86_400.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    store = JumpyStore(tmp_path / "store.db")
    async with opened(cluster.LocalNodes(2), store, heartbeat_timeout=1.0) as (_, made):
        epoch, sums = made.epoch, dict.fromkeys(KEYS, 0.0)
        for _ in range(10):
            for key in KEYS:
                account = made.entity(Account, key)
                first = await account.ask(Add(1.0), id=f"{key} {sums[key]}")
                # The same message again is not executed again.
                assert await account.ask(Add(1.0), id=f"{key} {sums[key]}") == first
                sums[key] += 1.0
                assert first == sums[key]
        with trio.move_on_after(0.3) as scope:
            await made.entity(Counter, "slow").ask(Echo(None, 1000.0))
        assert scope.cancelled_caught
        assert made.epoch == epoch


@attrs.define(eq=False)
class Proxy:
    """A network in front of an agent, which may lose the frames of one direction.

    Lost frames come through when the network is back, as TCP sends them again.
    """

    there: links.Address
    is_open: dict[str, trio.Event] = attrs.field(factory=dict[str, trio.Event])

    def __attrs_post_init__(self) -> None:
        for direction in ("there", "back"):
            self.is_open[direction] = trio.Event()
            self.is_open[direction].set()

    def lose(self, direction: str) -> None:
        self.is_open[direction] = trio.Event()

    def heal(self) -> None:
        for event in self.is_open.values():
            event.set()

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(OSError):
            async with (
                await trio.open_tcp_stream(self.there.host, self.there.port) as other,
                stream,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._forward, "there", stream, other, nursery)
                nursery.start_soon(self._forward, "back", other, stream, nursery)

    async def _forward(
        self, direction: str, source: trio.SocketStream, target: trio.SocketStream, nursery: trio.Nursery
    ) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some():
                await self.is_open[direction].wait()
                await target.send_all(data)
        await self.is_open[direction].wait()
        nursery.cancel_scope.cancel()


class ProxiedNodes(cluster.LocalNodes):
    """Nodes behind proxies. A node cut off by the network is not killed: it ends its entities on its own."""

    def __init__(self, names: int, nursery: trio.Nursery) -> None:
        super().__init__(names)
        self.proxies: dict[str, Proxy] = {}
        self.cut_off, self.kept = set[str](), list[trio.Process]()
        self._nursery = nursery

    async def start(self, config: Any) -> Any:
        self.alone_after = config.options.alone_after
        started = await super().start(config)
        proxy = self.proxies[config.node] = Proxy(started.address)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._nursery.start_soon(trio.serve_listeners, proxy.serve, [listener])
        port = listener.socket.getsockname()[1]
        return attrs.evolve(started, address=attrs.evolve(started.address, port=port))

    async def end(self, node: str) -> None:
        if node in self.cut_off:
            self.cut_off.remove(node)
            self.kept.append(self._processes.pop(node))
            # clock: any moment will do
            await trio.sleep(self.alone_after)
        await super().end(node)

    async def end_kept(self) -> None:
        for process in self.kept:
            process.kill()
            await process.wait()
            assert process.stdin is not None
            await process.stdin.aclose()


@pytest.mark.parametrize("direction", ["there", "back", "both"])
async def test_a_network_that_loses_a_direction(direction: str, tmp_path: Path) -> None:
    file = str(tmp_path / "served")
    async with trio.open_nursery() as nursery:
        nodes = ProxiedNodes(2, nursery)
        async with opened(nodes, heartbeat_timeout=1.0, hand_off=2.0) as (_, made):
            answered, lost = Counts[str](), 0

            async def ask(key: str) -> None:
                nonlocal lost
                while not is_over:
                    try:
                        # No ask hangs: silence, the wait of the end, and a start are over by then.
                        with trio.fail_after(60):
                            await made.entity(Counter, key).ask(Write(file, 0.05))
                        answered[key] += 1
                    except cluster.NodeLostError:
                        lost += 1

            is_over = False
            async with trio.open_nursery() as askers:
                for key in KEYS:
                    askers.start_soon(ask, key)
                await until(lambda: all(answered[key] for key in KEYS))
                nodes.cut_off.add("node-0")
                for one in ("there", "back") if direction == "both" else (direction,):
                    nodes.proxies["node-0"].lose(one)
                cut = nodes.proxies["node-0"]
                await until(lambda: "node-0" not in [one.name for one in made.members])
                before = Counts(answered)
                await until(lambda: all(answered[key] > before[key] for key in KEYS))
                # Frames on their way come through, and the old agent is there.
                cut.heal()
                await until(lambda: len(made.members) == 2)
                before = Counts(answered)
                await until(lambda: all(answered[key] > before[key] for key in KEYS))
                is_over = True
            assert lost > 0
        await nodes.end_kept()
        nursery.cancel_scope.cancel()
    check_served(file)


async def test_an_entity_given_up_has_no_second_home(tmp_path: Path) -> None:
    file, over, nodes = str(tmp_path / "served"), tmp_path / "over", cluster.LocalNodes(1)
    given_up = list[str]()
    async with opened(nodes) as (_, made), trio.open_nursery() as nursery:

        async def ask(key: str, until: str | None = None) -> None:
            try:
                await made.entity(Stubborn, key).ask(Write(file, 0.0, until))
            except (ta.ActorFailedError, ta.ActorStoppedError):
                given_up.append(key)

        for key in KEYS:
            nursery.start_soon(ask, key, str(over))
        await until(lambda: all(Path(f"{file} {key}").exists() for key in KEYS))
        nodes.add("node-9")
        # The actors of the keys that move are given up, and continue.
        await until(lambda: given_up)
        homes = list[str]()

        async def find(key: str) -> None:
            homes.append((await made.entity(Counter, key).ask(Where()))[0])

        async with trio.open_nursery() as others:
            for key in KEYS:
                others.start_soon(ask, key)
                others.start_soon(find, key)
            # Keys that stay answer, and none has a home on the new node yet.
            await until(lambda: len(homes) >= 2)
            assert {*homes} == {"node-0"}
            over.touch()
        assert len(made.members) == 2
        assert {*homes} == {"node-0", "node-9"}
    check_served(file)


async def test_an_unreachable_store_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, store = cluster.LocalNodes(2), cluster.SqliteStore(tmp_path / "store.db")
    async with opened(nodes, store):

        async def away(*_: object, **__: object) -> int:
            await trio.lowlevel.checkpoint()
            raise cluster.StoreError("it is away")

        monkeypatch.setattr(cluster.SqliteStore, "next_epoch", away)
        os.kill(nodes.pid("node-0"), signal.SIGKILL)
        await until(lambda: "waits for the store: it is away" in caplog.text)
        began = trio.current_time()
    # Whoever waited for the store would wait until `opened` fails.
    assert trio.current_time() - began < 100.0


def check_served(file: str) -> None:
    served = defaultdict[str, list[tuple[float, float, int]]](list)
    for line in Path(file).read_text().splitlines():
        key, began, ended, pid = line.rsplit(" ", 3)
        served[key].append((float(began), float(ended), int(pid)))
    assert {*served} == {*KEYS}
    for key, times in served.items():
        # No two processes serve a key at one time, and no older one serves after a newer one.
        for (_, ended, first), (began, _, then) in itertools.pairwise(sorted(times)):
            assert first == then or ended <= began, key
        order = [pid for pid, _ in itertools.groupby(pid for _, _, pid in sorted(times))]
        assert len(order) == len({*order}), key
