"""A request that ends its agent gets its own error, and no other request gets one."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter as Counts
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from cluster_entities import Account, Add, Counter, Die, Fragile, Hold
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links
from trio_accel.cluster import _table as tables

NAMES = ["node-0", "node-1", "node-2"]


class FakeLink:
    """A link to an agent that a request may end; its requests are executed once, by their ids."""

    def __init__(self, played: Played, member: cluster.Member) -> None:
        self.played, self.member, self.lost, self.count, self.beside = played, member, trio.Event(), 0, 0

    async def ask(self, request: tuple[Any, ...], *, at_once: bool = False) -> Any:
        _, _, _, message, number, _ = request
        if self.lost.is_set():
            raise links.LinkLostError("gone", is_begun=False)
        self.count += 1
        try:
            with trio.move_on_after(message.seconds):
                await self.lost.wait()
            if self.lost.is_set():
                raise links.LinkLostError("lost", is_begun=True, beside=self.beside)
            if message.is_lethal:
                self.beside = self.count - 1
                self.lost.set()
                self.played.losses += 1
                self.played.ends.send_nowait((self.member, self.played.has_status))
                await trio.lowlevel.checkpoint()
                raise links.LinkLostError("lost", is_begun=True, beside=self.beside)
        finally:
            self.count -= 1
        self.played.executed[number] += 1
        return message

    def close(self) -> None:
        self.lost.set()


class Played(cluster.EntityRouter):
    """A cluster of fake agents, which are back after some time."""

    def __init__(self) -> None:
        super().__init__()
        self.executed, self.losses, self.has_status = Counts[str](), 0, True
        self.ends, self.ended = trio.open_memory_channel[tuple[cluster.Member, bool]](1000)
        self._numbers = itertools.count(1)
        self.change([], NAMES)

    def change(self, without: list[cluster.Member], more: list[str]) -> None:
        epoch = next(self._numbers)
        added = [cluster.Member(name, (), epoch, None) for name in more]
        members = [one for one in self.members if one not in without] + added
        self._links.update({one: FakeLink(self, one) for one in added})  # type: ignore[misc]
        self.update(cluster.Table(epoch, tuple(sorted(members, key=lambda one: one.name))))

    async def restart(self) -> None:
        async with trio.open_nursery() as nursery:
            async for member, has_crashed in self.ended:
                nursery.start_soon(self._restart, member, has_crashed)

    async def _restart(self, member: cluster.Member, has_crashed: bool) -> None:
        await trio.sleep(0.01)
        if has_crashed:
            self._blame.note_crash(member)
        self.change([member], [])
        await trio.sleep(0.2)
        self.change([], [member.name])

    def kill(self, name: str) -> None:
        """Kill an agent as somebody else does."""
        for member, link in self._links.items():
            if member.name == name and not link.lost.is_set():
                link.lost.set()
                self.ends.send_nowait((member, False))


@attrs.frozen
class Request:
    """A request that takes some seconds, and may end its agent after them."""

    seconds: float
    is_lethal: bool = False


def play(script: Callable[[Played, trio.Nursery], Any]) -> Played:
    """Run a script in a cluster, on a clock that jumps."""
    kept: list[Played] = []

    async def run() -> None:
        kept.append(played := Played())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.restart)
            await script(played, nursery)
            nursery.cancel_scope.cancel(reason="the script has ended")

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    return kept[0]


async def ask_all(played: Played, requests: list[tuple[float, Request]]) -> list[object]:
    """Send requests at their times, each to an entity of its own, and return answers and errors."""
    found: list[object] = [None] * len(requests)

    async def ask(number: int, when: float, request: Request) -> None:
        await trio.sleep(when)
        target = tables.Target("module:Class", number, is_durable=True)
        try:
            found[number] = await played.ask(target, request, f"id {number}")
        except cluster.LethalRequestError as error:
            found[number] = error

    async with trio.open_nursery() as nursery:
        for number, (when, request) in enumerate(requests):
            nursery.start_soon(ask, number, when, request)
    return found


def check(requests: list[tuple[float, Request]], found: list[object], played: Played) -> None:
    for number, (_, request) in enumerate(requests):
        assert isinstance(found[number], cluster.LethalRequestError) == request.is_lethal, number
        assert played.executed[f"id {number}"] == (not request.is_lethal)


def test_a_lone_lethal_request_takes_two_agents() -> None:
    async def script(played: Played, _: trio.Nursery) -> None:
        requests = [(0.0, Request(0.1, is_lethal=True))]
        check(requests, await ask_all(played, requests), played)

    assert play(script).losses == 2


@pytest.mark.parametrize("seconds", [0.0, 0.01, 1.0])
def test_a_lethal_request_among_many_takes_at_most_three_agents(seconds: float) -> None:
    async def script(played: Played, _: trio.Nursery) -> None:
        requests = [(0.05 * number, Request(0.02 * (number % 7))) for number in range(200)]
        requests.append((2.0, Request(seconds, is_lethal=True)))
        requests += [(1.9, Request(4.0)), (1.95, Request(2.0))]
        check(requests, await ask_all(played, requests), played)

    assert play(script).losses <= 3


REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.builds(
            Request, st.sampled_from([0.0, 0.001, 0.05, 0.5, 3.0]), st.integers(0, 7).map(lambda n: not n)
        ),
    ),
    max_size=40,
)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([0.01, 0.1, 0.5, 2.0]),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.booleans(),
)
def test_agents_that_somebody_kills_are_nobodys_blame(
    seed: int, seconds: float, pause: float, is_regular: bool
) -> None:
    """Also where agents are killed faster than requests are served.

    A killer that rests for longer than the router waits for quiet cannot be distinguished from its request.
    """
    chosen = random.Random(seed)
    longest = min(2 * pause, 0.9 * tables._QUIET)

    async def kill(played: Played) -> None:
        while trio.current_time() < 60.0:
            await trio.sleep(pause if is_regular else chosen.uniform(0.0, longest))
            if played.members:
                played.kill(chosen.choice(played.members).name)

    async def script(played: Played, nursery: trio.Nursery) -> None:
        nursery.start_soon(kill, played)
        requests = [(chosen.uniform(0.0, 60.0), Request(seconds)) for _ in range(200)]
        check(requests, await ask_all(played, requests), played)

    play(script)


@pytest.mark.parametrize(("count", "bound"), [(1, 3), (2, 16), (5, 40)])
def test_requests_with_killed_agents_are_found(count: int, bound: int) -> None:
    async def script(played: Played, _: trio.Nursery) -> None:
        played.has_status = False
        requests = [(0.5 + number, Request(0.1, is_lethal=True)) for number in range(count)]
        requests += [(0.05 * number, Request(0.02)) for number in range(200)]
        check(requests, await ask_all(played, requests), played)

    assert play(script).losses <= bound


@pytest.mark.parametrize("has_members", [True, False])
def test_a_closed_cluster_waits_for_no_quiet(has_members: bool) -> None:
    async def script(played: Played, nursery: trio.Nursery) -> None:
        if not has_members:
            played.change([*played.members], [])

        async def close() -> None:
            await trio.sleep(1.0)
            played.close()

        began = trio.current_time()
        nursery.start_soon(close)
        assert not await played._is_quiet()
        assert trio.current_time() - began < 1.1
        assert not await played._is_quiet()

    play(script)


def test_the_error_crosses() -> None:
    error = cluster.LethalRequestError("it is over", node="node-1", epoch=7, request="Die to a")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.node, again.epoch, again.request) == ("it is over", "node-1", 7, "Die to a")


@pytest.mark.parametrize(
    "how", ["exit", "load", *[pytest.param(how, marks=pytest.mark.slow) for how in ("kill", "fault")]]
)
async def test_only_the_request_that_ends_its_process_gets_its_error(how: str, tmp_path: Path) -> None:
    nodes, ended = cluster.LocalNodes(2), set[cluster.Member]()
    options = cluster.ClusterOptions(
        device=ta.DeviceOptions(isolation="inline"), backoff=ta.Backoff(base=0.05)
    )
    totals, results = dict.fromkeys(range(4), 0.0), list[object]()
    with trio.fail_after(55):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(
                system, nodes, store=cluster.SqliteStore(tmp_path / "store.db"), options=options
            ) as made,
            trio.open_nursery() as nursery,
        ):
            first = {*made.members}

            async def watch() -> None:
                seen = first
                async for table in made.watch():
                    ended.update(seen - {*table.members})
                    seen = {*table.members}

            async def add(key: int) -> None:
                while not results:
                    totals[key] += 1.0
                    assert await made.entity(Account, f"account {key}").ask(Add(1.0)) == totals[key]
                    await trio.sleep(0.02)

            async def hold() -> None:
                assert await made.entity(Fragile, "slow").ask(Hold(0.5)) == 1

            nursery.start_soon(watch)
            async with trio.open_nursery() as clients:
                for key in totals:
                    clients.start_soon(add, key)
                clients.start_soon(hold)
                # clock: any moment will do
                await trio.sleep(0.3)
                ref: Any = made.entity(Fragile, "lethal " + how)
                with pytest.raises(
                    cluster.LethalRequestError, match=r"Die to .*Fragile/str/'lethal"
                ) as caught:
                    await ref.ask(Die(how))
                results.append(caught.value)
                assert "Die" in caught.value.request
            assert len(ended) <= 3
            # The entity is there for others, unless its very load ends its process.
            if how != "load":
                assert await ref.ask(Hold(0.0)) == 1
            assert await made.entity(Counter, "other").ask(Add(1.0)) == 1.0
            nursery.cancel_scope.cancel(reason="the test has ended")
