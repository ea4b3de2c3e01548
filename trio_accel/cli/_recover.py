"""``demo recover``: the BLAS actor is crashed under load; every request has a fate, every result is right."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.cli._results import Bench, Check, StepResult, count_of
from trio_accel.cli._run import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Fate", "RecoverData", "RecoverStep"]

_TOLERANCE = 1e-5
_FAULT = "injected"


@attrs.frozen(kw_only=True)
class Fate:
    """What became of one request.

    Attributes:
        client: Number of the client that asked, from 1.
        request: Number of the request, from 1.
        outcome: ``"completed"`` or the class of the error that the asker got.
        cause: The error's cause, ``None`` for a completed request.
        incarnation: Incarnation of the BLAS actor when the fate was known, from 0.
        error: Relative error against NumPy in float64, ``None`` if there was no result.
    """

    client: int
    request: int
    outcome: str
    cause: str | None
    incarnation: int
    error: float | None


@attrs.frozen(kw_only=True)
class RecoverData:
    """The crash and what came of it.

    Attributes:
        clients: Clients that asked at once.
        size: Rows and columns of the operands.
        requests: Requests of all clients.
        faults: Faults injected.
        restarts: Restarts of the BLAS actor that they caused.
        completed: Requests that got a result.
        failed: Requests that got an error, counted by ``"error: cause"``.
        tree_before: The actors before the first fault.
        tree_after: The actors after the last request.
        fates: Every request, in the order of their ends.
    """

    clients: int
    size: int
    requests: int
    faults: int
    restarts: int
    completed: int
    failed: dict[str, int]
    tree_before: str
    tree_after: str
    fates: Sequence[Fate]


@attrs.frozen(kw_only=True)
class _Settled:
    """A request with its fate, before its product is compared."""

    number: int
    product: NDArray[np.float32] | None
    failure: Exception | None
    incarnation: int


@attrs.define(kw_only=True, eq=False)
class _Load:
    """Products asked for while faults are injected.

    Attributes:
        bench: Where.
        lefts: Left operands, one per request; each client has its equal share of neighbours.
        right: Right operand of all.
        clients: Clients that ask at once.
        in_flight: Requests that a client has under way at once.
        faults: Faults to inject.
        settled: Requests with their fates, in the order of their ends.
    """

    bench: Bench
    lefts: NDArray[np.float32]
    right: ta.AccelRef
    clients: int
    in_flight: int
    faults: int
    settled: list[_Settled] = attrs.field(factory=list[_Settled], init=False)
    _injected: int = attrs.field(default=0, init=False)

    async def run(self) -> None:
        """Ends when every request has its fate."""
        each = len(self.lefts) // self.clients
        async with trio.open_nursery() as nursery:
            for client in range(self.clients):
                room = trio.CapacityLimiter(self.in_flight)
                for number in range(client * each, (client + 1) * each):
                    nursery.start_soon(self._ask, number, room)

    async def _ask(self, number: int, room: trio.CapacityLimiter) -> None:
        async with room:
            try:
                product = await ta.linalg.matmul(self.lefts[number], self.right)
                host = await product.to_host()
                product.release()
            except (ta.ActorError, ta.AccelError) as failure:
                self._settle(number, None, failure)
            else:
                self._settle(number, host, None)

    def _settle(self, number: int, product: NDArray[np.float32] | None, failure: Exception | None) -> None:
        incarnation = _blas(self.bench).incarnation
        self.settled.append(
            _Settled(number=number, product=product, failure=failure, incarnation=incarnation)
        )
        done, total = len(self.settled), len(self.lefts)
        self.bench.progress.update(done, total, f"{done} of {total} requests settled")
        # The faults are spread evenly: each meets an actor with requests in its mailbox and in flight.
        if self._injected < self.faults and done * (self.faults + 1) >= (self._injected + 1) * total:
            self._injected += 1
            ta.testing.inject_fault(self.bench.device, ta.linalg.Matmul, fail=RuntimeError(_FAULT))

    def fates(self, right: NDArray[np.float32]) -> list[Fate]:
        """Every fate, the products compared with NumPy."""
        references = self.lefts.astype(np.float64) @ right.astype(np.float64)
        each = len(self.lefts) // self.clients
        fates: list[Fate] = []
        for settled in self.settled:
            failure, error = settled.failure, None
            if settled.product is not None:
                error = _relative_error(settled.product, references[settled.number])
            cause = None if failure is None else failure.__cause__ or failure
            fates.append(
                Fate(
                    client=settled.number // each + 1,
                    request=settled.number % each + 1,
                    outcome="completed" if failure is None else type(failure).__name__,
                    cause=None if cause is None else f"{type(cause).__name__}: {cause}",
                    incarnation=settled.incarnation,
                    error=error,
                )
            )
        return fates


@attrs.frozen(kw_only=True)
class RecoverStep:
    """The step, with its options.

    Attributes:
        clients: Clients that ask at once.
        requests: Requests of each client.
        in_flight: Requests that a client has under way at once.
        faults: Faults injected while they ask.
        size: Rows and columns of the operands.
    """

    name: str = attrs.field(default="recover", init=False)
    clients: int = 4
    requests: int = 25
    in_flight: int = 4
    faults: int = 3
    size: int = 64

    async def prepare(self) -> None:
        """Nothing to read."""
        await trio.lowlevel.checkpoint()

    async def run(self, bench: Bench) -> StepResult:
        """Ask, crash, ask on; then count."""
        generator = np.random.default_rng(20250101)
        total = self.clients * self.requests
        lefts = generator.standard_normal((total, self.size, self.size), np.float32)
        right = generator.standard_normal((self.size, self.size), np.float32)
        device_right = await bench.device.put(right)
        # The first product starts the actor, so that the tree shows it before anything fails.
        (await ta.linalg.matmul(lefts[0], device_right)).release()
        before = bench.system.tree()
        restarts = _blas(bench).restarts
        load = _Load(
            bench=bench,
            lefts=lefts,
            right=device_right,
            clients=self.clients,
            in_flight=self.in_flight,
            faults=self.faults,
        )
        await load.run()
        device_right.release()
        await bench.device.synchronize()
        fates = await in_thread(load.fates, right)
        failed = Counter(f"{fate.outcome}: {fate.cause}" for fate in fates if fate.cause is not None)
        data = RecoverData(
            clients=self.clients,
            size=self.size,
            requests=total,
            faults=self.faults,
            restarts=_blas(bench).restarts - restarts,
            completed=sum(fate.outcome == "completed" for fate in fates),
            failed=dict(failed),
            tree_before=str(before),
            tree_after=str(bench.system.tree()),
            fates=fates,
        )
        return StepResult(name=self.name, summary=_summarize(data), checks=_checks(data), data=data)


def _summarize(data: RecoverData) -> str:
    lost = data.requests - len(data.fates)
    return (
        f"{count_of(data.restarts, 'crash')}, {data.requests} requests: {data.completed} completed, "
        f"{sum(data.failed.values())} failed, {lost or 'none'} lost"
    )


def _checks(data: RecoverData) -> list[Check]:
    lost = abs(data.requests - len(data.fates))
    missed = abs(data.faults - data.restarts)
    strange = sum(fate.cause is not None and _FAULT not in fate.cause for fate in data.fates)
    errors = [
        math.nan if fate.error is None else fate.error for fate in data.fates if fate.outcome == "completed"
    ]
    # `max` would pass over a NaN that does not come first.
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan)
    limit = _TOLERANCE * math.sqrt(data.size)
    return [
        Check(name="requests without a fate", value=lost, limit=0),
        Check(name="faults that did not crash the actor exactly once", value=missed, limit=0),
        Check(name="requests failed for another reason", value=strange, limit=0),
        Check(name="relative error of every result", value=worst, limit=limit),
    ]


def _relative_error(product: NDArray[np.float32], reference: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(product - reference) / np.linalg.norm(reference))


def _blas(bench: Bench) -> ta.ActorSnapshot:
    """The actor that serves ``ta.linalg`` on the bench's device."""
    return next(node for node in bench.system.tree().walk() if node.name == "blas")
