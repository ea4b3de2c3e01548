"""The counts of the patterns, against the view of their callers."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import trio
from every_pattern import PATTERNS, Model, Spawned, torn
from hypothesis import given, settings
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import MailboxFullError
from trio_accel.patterns import GetStatistics, Submit

OF_A_CALL = ("in_flight", "answered", "failed", "cancelled")


@attrs.frozen
class Visit:
    """One asker: its arrival, the duration and end of its service, and its departure."""

    comes: float
    takes: float
    ends: str
    leaves: float


class World:
    """The visits of one run, the model that serves them, and their outcomes."""

    def __init__(self, visits: list[Visit]) -> None:
        self.visits = visits
        self.outcomes: list[str] = []

    async def model(self, number: int) -> int:
        visit = self.visits[number]
        async with trio.open_nursery() as nursery:
            if visit.ends == "is torn":
                nursery.start_soon(torn)
            await trio.sleep(visit.takes)
            if visit.ends == "fails":
                raise LookupError(number)
            nursery.cancel_scope.cancel(reason="served")
        return number

    async def visit(self, number: int, ref: ta.Ref[Any], item: object) -> None:
        visit = self.visits[number]
        await trio.sleep(visit.comes)
        with trio.move_on_after(visit.leaves):
            try:
                await ref.ask(Submit(item))
                self.outcomes.append("answered")
            except trio.Cancelled:
                self.outcomes.append("cancelled")
                raise
            except MailboxFullError:
                self.outcomes.append("refused")
            except Exception:  # noqa: BLE001  # whatever it is, it is the outcome
                self.outcomes.append("failed")


def check_law(statistics: Any) -> None:
    """Each begun call is in flight, or has ended in one way."""
    ended = sum(operator.attrgetter(*OF_A_CALL)(statistics))
    if hasattr(statistics, "requests"):
        assert statistics.requests == ended + statistics.waiting + statistics.refused, statistics
    else:
        assert statistics.begun == ended, statistics
    for part in (*getattr(statistics, "replicas", ()), *getattr(statistics, "stages", ())):
        check_law(part)


async def observe(world: World, spawn: Callable[[ta.System, Model], Awaitable[Spawned]]) -> Any:
    """Have all visits, look at the counters meanwhile, and return them at the end."""
    async with ta.open_system("test") as system:
        ref, item_of = await spawn(system, world.model)

        async def look() -> None:
            while True:
                check_law(await ref.ask(GetStatistics()))
                await trio.sleep(0.25)

        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            async with trio.open_nursery() as visitors:
                for number in range(len(world.visits)):
                    visitors.start_soon(world.visit, number, ref, item_of(number))
            # The second try of a hedged request unwinds on its own.
            await wait_all_tasks_blocked()
            looking.cancel_scope.cancel(reason="all have left")
        return await ref.ask(GetStatistics())


TENTHS = st.integers(0, 10).map(lambda tenths: tenths / 10)
VISITS = st.lists(
    st.builds(
        Visit,
        comes=TENTHS,
        takes=TENTHS,
        ends=st.sampled_from(["returns", "fails", "is torn"]),
        leaves=st.integers(1, 15).map(lambda tenths: tenths / 10),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("spawn", PATTERNS)
@settings(max_examples=80, deadline=None)
@given(visits=VISITS)
def test_their_sums_match_the_askers_outcomes(
    spawn: Callable[[ta.System, Model], Awaitable[Spawned]], visits: list[Visit]
) -> None:
    world = World(visits)
    statistics = trio.run(observe, world, spawn, clock=MockClock(autojump_threshold=0))
    check_law(statistics)
    seen = Counter(world.outcomes)
    assert statistics.in_flight == 0
    assert {name: getattr(statistics, name) for name in OF_A_CALL[1:]} == {
        name: seen[name] for name in OF_A_CALL[1:]
    }
    assert getattr(statistics, "refused", 0) == seen["refused"]
    assert sum(seen.values()) == len(visits)
