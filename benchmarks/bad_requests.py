"""A device whose contexts are lost all the time.

``python -m benchmarks.bad_requests [SECONDS [EVERY [BACKEND [HOW]]]]``, such as ``60 1 cuda assert``.

Clients ask without a pause and check every result, while another one asks for something that loses the
context, once a second, and again if it runs again. The device is that of a service: worker processes,
``retry=1`` and ``spares=1``. So each bad request is to cost one loss and one error, its own.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.devices import Operation

__all__ = ["BadRequests", "Report", "main"]

ResultT = TypeVar("ResultT")

SLOT = 0.05
"""Seconds within which an answer counts as available, and length of a slot of time."""

_ROWS = 32
# The second is that of a library which has seen the context's end before the context.
_FAILURES = (ta.AccelError, ta.ActorFailedError)


@attrs.frozen(kw_only=True)
class Report:
    """What came of it.

    Attributes:
        seconds: How long it took.
        bad: Bad requests that were answered, by their errors.
        losses: Contexts that were lost.
        begun: Requests of the clients.
        outcomes: Their outcomes: ``"right"``, ``"wrong"`` or the class of the error.
        kept: Whether an array that lay on the device all the time is as it was.
        waits: Seconds from each loss to the first result of the next context.
        slots: Slots of 50 ms.
        answered: Slots in which a request was begun that got its right result within 50 ms.
    """

    seconds: float
    bad: Mapping[str, int]
    losses: int
    begun: int
    outcomes: Mapping[str, int]
    kept: bool
    waits: tuple[float, ...]
    slots: int
    answered: int

    @property
    def availability(self) -> float:
        """Share of the time in which a request is answered within 50 ms."""
        return self.answered / max(1, self.slots)

    def __str__(self) -> str:
        right, waits = self.outcomes["right"], self.waits or (0.0,)
        others = ", ".join(f"{count} {name}" for name, count in self.outcomes.items() if name != "right")
        lost = self.begun - sum(self.outcomes.values())
        share = right / max(1, self.begun)
        errors = sum(count for name, count in self.bad.items() if name != "answered")
        kept = "as it was" if self.kept else "CHANGED OR LOST"
        return f"""\
{self.seconds:.1f} s, {self.losses} contexts lost over {sum(self.bad.values())} bad requests with \
{errors} errors
the others' requests: {self.begun}, of which {right} right, {others or "no other"}, {lost} without an outcome
available: {self.availability:.1%} of the time (a right answer within 50 ms), {share:.2%} of the requests
wait for the first result after a loss: median {statistics.median(waits):.3f} s, longest {max(waits):.3f} s
array on the device all the time: {kept}"""


@attrs.define(eq=False)
class BadRequests:
    """The clients of one device, good and bad.

    Attributes:
        device: The device.
        seconds: How long they ask.
        every: Seconds from one bad request to the next, at least; 0 for one after the other.
        clients: How many of the good ones there are.
        faults: What the bad ones do, in turn: arguments of `inject_fault`.
        how: Which of several such faults of a GPU, as `inject_fault` takes it.
        asks: The operation of the bad ones; the good ones are products, of BLAS.
    """

    device: ta.Device
    seconds: float
    every: float = 1.0
    clients: int = 24
    faults: Sequence[str] = ("poison",)
    how: Any = None
    asks: Callable[..., Operation[Any, Any]] = ta.linalg.Nrm2
    _begun: int = attrs.field(default=0, init=False)
    _outcomes: Counter[str] = attrs.field(factory=Counter[str], init=False)
    _bad: Counter[str] = attrs.field(factory=Counter[str], init=False)
    _answered: set[int] = attrs.field(factory=set[int], init=False)
    _waits: list[float] = attrs.field(factory=list[float], init=False)
    # The generation that was lost last, and when.
    _lost: tuple[int, float] | None = attrs.field(default=None, init=False)
    _start: float = attrs.field(default=0.0, init=False)

    async def run(self) -> Report:
        """Ask for so long; every request that was begun has its outcome when this returns.

        Raises:
            DeviceLostError: The device was given up.
        """
        device = self.device
        host = np.arange(_ROWS * _ROWS, dtype=np.float64).reshape(_ROWS, _ROWS)
        lying = await device.put(host)
        self._start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_badly)
            for number in range(self.clients):
                nursery.start_soon(self._ask, np.random.default_rng(number))
        seconds = trio.current_time() - self._start
        slots = int(seconds / SLOT)
        kept = np.array_equal(await lying.to_host(), host)
        return Report(
            seconds=seconds,
            bad=self._bad,
            losses=(await device.statistics()).losses,
            begun=self._begun,
            outcomes=self._outcomes,
            kept=kept,
            waits=tuple(self._waits),
            slots=slots,
            # The last one is cut off by the end.
            answered=sum(slot < slots for slot in self._answered),
        )

    @property
    def _is_on(self) -> bool:
        return trio.current_time() < self._start + self.seconds

    async def _ask_badly(self) -> None:
        device, faults = self.device, itertools.cycle(self.faults)
        for number in itertools.count(1):
            await trio.sleep_until(self._start + number * self.every)
            if not self._is_on:
                return
            generation = device.generation
            fault: dict[str, Any] = {next(faults): True}
            ta.testing.inject_fault(device, self.asks, repeat=True, how=self.how, **fault)
            try:
                await device.ask(self.asks(np.ones(4)))
            except ta.DeviceLostError:
                raise
            except _FAILURES as error:
                self._bad[type(error).__name__] += 1
                self._lost = generation, trio.current_time()
            else:
                self._bad["answered"] += 1

    async def _ask(self, source: np.random.Generator) -> None:
        while self._is_on:
            # Small whole numbers: their product is exact.
            a, b = source.integers(-8, 9, (2, _ROWS, _ROWS)).astype(np.float64)
            try:
                there = await self._one(self.device.put(a))
                product = await self._one(ta.linalg.matmul(there, b))
                result = await self._one(product.to_host())
            except ta.DeviceLostError:
                raise
            except _FAILURES:
                continue
            if not np.array_equal(result, a @ b):
                self._outcomes.update(right=-1, wrong=1)

    async def _one(self, request: Awaitable[ResultT]) -> ResultT:
        """One request of a client, and its outcome."""
        self._begun += 1
        begun = trio.current_time()
        try:
            result = await request
        except _FAILURES as error:
            self._outcomes[type(error).__name__] += 1
            raise
        now = trio.current_time()
        self._outcomes["right"] += 1
        if now - begun <= SLOT:
            self._answered.add(int((begun - self._start) / SLOT))
        if self._lost is not None and self.device.generation > self._lost[0]:
            self._waits.append(now - self._lost[1])
            self._lost = None
        return result


async def main(seconds: float, every: float = 1.0, backend: str = "cpu", how: Any = None) -> Report:
    """Open a device as a service does, and ask it for so many seconds."""
    options = ta.DeviceOptions(isolation="process", retry=1, spares=1)
    async with (
        ta.open_system("bad-requests") as system,
        system.open_device(backend, options=options) as device,
    ):
        return await BadRequests(device, seconds, every, how=how).run()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    times = (*map(float, sys.argv[1:3]), *(600.0, 1.0)[len(sys.argv[1:3]) :])
    given: Any = [*times, *sys.argv[3:]]
    sys.stdout.write(f"{trio.run(main, *given)}\n")
