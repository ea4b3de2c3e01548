"""Shares of a fair scheduler against weighted fair queueing by ns.py, which nobody here has written."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import FairScheduler, FairSubmit

simpy: Any = pytest.importorskip("simpy")
wfq: Any = pytest.importorskip("ns.scheduler.wfq")
packet: Any = pytest.importorskip("ns.packet.packet")

WEIGHTS = {0: 3, 1: 1, 2: 2}


@attrs.frozen
class Arrival:
    time: float
    tenant: int
    cost: float


@attrs.define
class Sink:
    """The destination of packets served by ns.py's server."""

    served: list[tuple[int, float]] = attrs.field(factory=list[tuple[int, float]])

    def put(self, packet: Any) -> None:
        self.served.append((packet.flow_id, packet.size))


def served_by_ns(arrivals: Sequence[Arrival]) -> list[tuple[int, float]]:
    """Tenants and costs in the order in which a server of one byte a second serves them."""
    environment = simpy.Environment()
    server = wfq.WFQServer(environment, 8.0, WEIGHTS)
    server.out = sink = Sink()

    def source() -> Any:
        for number, arrival in enumerate(arrivals):
            yield environment.timeout(max(0.0, arrival.time - environment.now))
            server.put(packet.Packet(environment.now, arrival.cost, number, flow_id=arrival.tenant))

    environment.process(source())
    environment.run()
    return sink.served


def served_by_us(arrivals: Sequence[Arrival]) -> list[tuple[int, float]]:
    """The same by a scheduler with a model that takes `cost` seconds."""
    served: list[tuple[int, float]] = []

    async def model(item: Arrival) -> None:
        await trio.sleep(item.cost)
        served.append((item.tenant, item.cost))

    async def main() -> None:
        begun = trio.current_time()
        async with ta.open_system("test") as system, trio.open_nursery() as nursery:
            scheduler = await system.spawn(
                FairScheduler, model, max_in_flight=1, weights=WEIGHTS, max_queued=10_000
            )
            for arrival in arrivals:
                await trio.sleep_until(begun + arrival.time)
                nursery.start_soon(
                    scheduler.ask, FairSubmit(arrival, tenant=arrival.tenant, cost=arrival.cost)
                )

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return served


def backlogged(tenants: Sequence[int], count: int, at: float, costs: Sequence[float]) -> list[Arrival]:
    source = random.Random(20)
    return [
        Arrival(at + 1e-3 * number, tenant, source.choice(costs))
        for number in range(count)
        for tenant in tenants
    ]


def share(served: Sequence[tuple[int, float]], first: int, count: int) -> dict[int, float]:
    spent: Counter[int] = Counter()
    for tenant, cost in served[first : first + count]:
        spent[tenant] += cost  # type: ignore[assignment]  # costs are floats
    return {tenant: cost / spent.total() for tenant, cost in sorted(spent.items())}


@pytest.mark.parametrize("costs", [(1.0,), (0.5, 1.0, 4.0)])
def test_shares_of_1000_requests_match_ns(costs: Sequence[float]) -> None:
    arrivals = backlogged([0, 1, 2], 1000, 0.0, costs)
    ours, theirs = served_by_us(arrivals), served_by_ns(arrivals)
    assert share(ours, 0, 1000) == pytest.approx(share(theirs, 0, 1000), rel=0.05)
    assert share(ours, 0, 1000) == pytest.approx({0: 3 / 6, 1: 1 / 6, 2: 2 / 6}, rel=0.05)


@pytest.mark.parametrize("costs", [(1.0,), (0.5, 1.0, 4.0)])
def test_shares_of_1000_requests_after_idle_match_ns(costs: Sequence[float]) -> None:
    """Tenant 0 arrives when the others have had the server for 300 seconds; it gets only its share."""
    early = backlogged([1, 2], 900, 0.0, costs)
    arrivals = [*early, *backlogged([0], 1000, 300.0, costs)]
    ours, theirs = served_by_us(arrivals), served_by_ns(arrivals)

    def after_idle(served: list[tuple[int, float]]) -> dict[int, float]:
        first = next(number for number, (tenant, _) in enumerate(served) if tenant == 0)
        return share(served, first, 1000)

    assert after_idle(ours) == pytest.approx(after_idle(theirs), rel=0.05)
    assert after_idle(ours) == pytest.approx({0: 3 / 6, 1: 1 / 6, 2: 2 / 6}, rel=0.05)
