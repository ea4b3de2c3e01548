"""The helpers for tests of programs that use actors."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

import trio_accel as ta
from trio_accel.testing import FixedRandom, open_probe, wait_until_idle

pytest_plugins = ["pytester"]


@attrs.frozen
class Price(ta.Request["Shop", int]):
    item: str


@attrs.frozen
class Note(ta.Message["Shop"]):
    text: str


@attrs.frozen
class Buy(ta.Request["Customer", int]):
    item: str


class Customer(ta.Actor):
    def __init__(self, shop: ta.Ref[Shop]) -> None:
        self.shop = shop

    @ta.handles(Buy)
    async def buy(self, message: Buy) -> int:
        price = await self.shop.ask(Price(message.item))
        await self.shop.tell(Note(f"paid {price}"))
        return price


class Shop(ta.Actor):
    pass


async def test_a_probe_replaces_an_actor_and_records_its_messages() -> None:
    async with ta.open_system("s") as system:
        probe = await open_probe(system, Price, Note, replies={Price: 3})
        customer = await system.spawn(Customer, probe.ref)
        assert await customer.ask(Buy("apple")) == 3
        assert await probe.receive() == Price("apple")
        assert await probe.receive() == Note("paid 3")
        with pytest.raises(trio.WouldBlock):
            probe.receive_nowait()
        assert probe.messages == [Price("apple"), Note("paid 3")]


async def test_a_probe_answers_with_functions_and_errors() -> None:
    async with ta.open_system("s") as system:
        probe = await open_probe(system, Price, replies={Price: lambda message: len(message.item)})
        assert await probe.ref.ask(Price("fig")) == 3
        probe.replies[Price] = LookupError("no figs")
        with pytest.raises(ta.ActorFailedError) as caught:
            await probe.ref.ask(Price("fig"))
        assert isinstance(caught.value.__cause__, LookupError)


async def test_a_probe_takes_the_messages_of_one_actor_only() -> None:
    async with ta.open_system("s") as system:
        with pytest.raises(ValueError, match="declared for one actor, got Customer, Shop"):
            await open_probe(system, Price, Buy)
        with pytest.raises(ValueError, match="got none"):
            await open_probe(system)


@attrs.frozen
class Work(ta.Message["Worker"]):
    seconds: float


class Worker(ta.Actor):
    done = 0

    @ta.handles(Work)
    async def work(self, message: Work) -> None:
        # clock: a mock clock of the caller, or work of any duration
        await trio.sleep(message.seconds)
        type(self).done += 1


async def test_quiet_means_no_message_is_queued_or_served(
    autojump_clock: trio.testing.MockClock,
) -> None:
    Worker.done = 0
    async with ta.open_system("s") as system:
        worker = await system.spawn(Worker)
        for _ in range(3):
            await worker.tell(Work(0.1))
        await wait_until_idle(system)
        assert Worker.done == 3
        assert trio.current_time() >= 0.3


def test_fixed_jitter_draws_the_same_every_time() -> None:
    backoff = ta.Backoff(initial=1.0, jitter=0.1)
    assert backoff.delay(0, FixedRandom()) == 1.0
    assert backoff.delay(0, FixedRandom(0.0)) == pytest.approx(0.9)
    assert backoff.delay(0, FixedRandom(1.0)) == pytest.approx(1.1)
    with pytest.raises(ValueError, match=r"fraction must be from 0 to 1, got 1.5"):
        FixedRandom(1.5)


@pytest.mark.timeout(120)  # a short limit of the outer session would end the inner one
def test_the_leak_fixture_fails_a_test_that_leaves_an_actor(
    pytester: pytest.Pytester, run_pytest: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(ta.__file__).parents[1])
    pytester.makeini("[pytest]\ntrio_mode = true\n")
    pytester.makepyfile(
        textwrap.dedent(
            """
            import trio
            import trio_accel as ta

            pytest_plugins = ["trio_accel.testing.fixtures"]

            class Idle(ta.Actor):
                pass

            async def leave(started):
                async with ta.open_system("left") as system:
                    await system.spawn(Idle, name="idle")
                    started.set()
                    await trio.sleep_forever()

            async def test_leaves_an_actor(no_actors_left):
                started = trio.Event()
                trio.lowlevel.spawn_system_task(leave, started)
                await started.wait()

            async def test_leaves_tasks_to_the_nursery(nursery, no_actors_left):
                started = trio.Event()
                nursery.start_soon(leave, started)
                await started.wait()

            async def test_leaves_nothing(no_actors_left):
                async with ta.open_system("clean") as system:
                    await system.spawn(Idle)
            """
        )
    )
    result = run_pytest()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*left behind by the test: actor left/idle, task *leave*"])
