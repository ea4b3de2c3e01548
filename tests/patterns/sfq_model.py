"""Start-time fair queueing as in the paper, with tags at arrival: the reference for `FairQueue`.

Goyal, Vin, Cheng: Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet Switching
Networks, SIGCOMM 1996, section 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from fractions import Fraction

import attrs


@attrs.define
class Sfq:
    """The paper's rules 1 to 3. `arrive`, then `serve` whenever the server is free."""

    weights: Mapping[str, float]
    virtual: Fraction = Fraction(0)
    # Finish tags for the last request of each flow, and for the served request.
    finish: dict[str, Fraction] = attrs.field(factory=dict[str, Fraction])
    last_served: Fraction = Fraction(0)
    heap: list[tuple[Fraction, int, Fraction]] = attrs.field(factory=list[tuple[Fraction, int, Fraction]])

    def arrive(self, number: int, flow: str, cost: float) -> None:
        start = max(self.virtual, self.finish.get(flow, Fraction(0)))
        # Nothing is rounded but the quotient.
        self.finish[flow] = start + Fraction(cost / self.weights[flow])
        heapq.heappush(self.heap, (start, number, self.finish[flow]))

    def serve(self) -> int | None:
        if not self.heap:
            return None
        start, number, finish = heapq.heappop(self.heap)
        self.virtual = start
        self.last_served = max(self.last_served, finish)
        return number

    def idle(self) -> None:
        """The end of a busy period."""
        self.virtual = self.last_served


@attrs.frozen
class Arrival:
    time: float
    flow: str
    cost: float


def order_of(arrivals: Iterable[Arrival], weights: Mapping[str, float]) -> list[tuple[int, float]]:
    """Serve arrivals one by one, each for `cost` seconds: their numbers in order, and when each began."""
    sfq, now, served = Sfq(weights), 0.0, list[tuple[int, float]]()
    coming = sorted(enumerate(arrivals), key=lambda pair: pair[1].time)
    costs = {number: arrival.cost for number, arrival in coming}
    while coming or sfq.heap:
        if not sfq.heap and coming[0][1].time > now:
            sfq.idle()
            now = coming[0][1].time
        while coming and coming[0][1].time <= now:
            number, arrival = coming.pop(0)
            sfq.arrive(number, arrival.flow, arrival.cost)
        chosen = sfq.serve()
        assert chosen is not None
        served.append((chosen, now))
        now += costs[chosen]
    return served
