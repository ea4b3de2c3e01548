"""``demo recover``: the BLAS actor is crashed under load; every request has a fate, every result is right."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.cli._results import Bench, Check, StepResult
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


@attrs.define(kw_only=True, eq=False)
class _Load:
    """The running load."""

    bench: Bench
    total: int
    faults: int
    injected: int = 0
    fates: list[Fate] = attrs.field(factory=list[Fate])

    def settle(self, client: int, request: int, error: float | None, failure: Exception | None) -> None:
        cause = None if failure is None else failure.__cause__ or failure
        self.fates.append(
            Fate(
                client=client,
                request=request,
                outcome="completed" if failure is None else type(failure).__name__,
                cause=None if cause is None else f"{type(cause).__name__}: {cause}",
                incarnation=_blas(self.bench).incarnation,
                error=error,
            )
        )
        settled = len(self.fates)
        self.bench.progress.update(settled, self.total, f"{settled} of {self.total} requests settled")
        # The faults are spread evenly: each meets an actor with requests in its mailbox and in flight.
        if settled * (self.faults + 1) >= (self.injected + 1) * self.total and self.injected < self.faults:
            self.injected += 1
            ta.testing.inject_fault(self.bench.device, ta.linalg.Matmul, fail=RuntimeError(_FAULT), count=1)


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
    requests: int = 15
    in_flight: int = 4
    faults: int = 3
    size: int = 192

    async def prepare(self) -> None:
        """Nothing to read."""
        await trio.lowlevel.checkpoint()

    async def run(self, bench: Bench) -> StepResult:
        """Ask, crash, ask on; then count."""
        generator = np.random.default_rng(20250101)
        shape = (self.size, self.size)
        lefts = [generator.standard_normal(shape, np.float32) for _ in range(self.clients * self.requests)]
        right = generator.standard_normal(shape, np.float32)
        device_right = await bench.device.put(right)
        # The first product starts the actor, so that the tree shows it before anything fails.
        (await ta.linalg.matmul(lefts[0], device_right)).release()
        before = bench.system.tree()
        restarts = _blas(bench).restarts
        load = _Load(bench=bench, total=len(lefts), faults=self.faults)
        async with trio.open_nursery() as nursery:
            for client in range(self.clients):
                own = lefts[client * self.requests : (client + 1) * self.requests]
                nursery.start_soon(self._client, load, client + 1, own, right, device_right)
        await bench.device.synchronize()
        device_right.release()
        data = RecoverData(
            clients=self.clients,
            size=self.size,
            requests=load.total,
            faults=self.faults,
            restarts=_blas(bench).restarts - restarts,
            completed=sum(fate.outcome == "completed" for fate in load.fates),
            failed=dict(
                Counter(f"{fate.outcome}: {fate.cause}" for fate in load.fates if fate.cause is not None)
            ),
            tree_before=str(before),
            tree_after=str(bench.system.tree()),
            fates=load.fates,
        )
        lost = data.requests - len(data.fates)
        return StepResult(
            name=self.name,
            summary=f"{data.restarts} crashes under {data.requests} products for {data.clients} clients: "
            f"{data.completed} completed, {sum(data.failed.values())} failed, {lost or 'none'} lost",
            checks=_checks(data),
            data=data,
        )

    async def _client(
        self,
        load: _Load,
        client: int,
        lefts: Sequence[NDArray[np.float32]],
        right: NDArray[np.float32],
        device_right: ta.AccelRef,
    ) -> None:
        room = trio.CapacityLimiter(self.in_flight)

        async def ask(request: int, left: NDArray[np.float32]) -> None:
            async with room:
                try:
                    product = await ta.linalg.matmul(left, device_right)
                    host = await product.to_host()
                    product.release()
                except (ta.ActorError, ta.AccelError) as failure:
                    load.settle(client, request, None, failure)
                else:
                    load.settle(client, request, await in_thread(_relative_error, left, right, host), None)

        async with trio.open_nursery() as nursery:
            for request, left in enumerate(lefts, 1):
                nursery.start_soon(ask, request, left)


def _checks(data: RecoverData) -> list[Check]:
    errors = [
        math.nan if fate.error is None else fate.error for fate in data.fates if fate.outcome == "completed"
    ]
    strange = [fate for fate in data.fates if fate.cause is not None and _FAULT not in fate.cause]
    return [
        Check(name="requests without a fate", value=abs(data.requests - len(data.fates)), limit=0),
        Check(
            name="faults that did not crash the actor exactly once",
            value=abs(data.faults - data.restarts),
            limit=0,
        ),
        Check(name="requests failed for another reason", value=len(strange), limit=0),
        Check(
            name="relative error of every result",
            value=max(errors, default=math.nan),
            limit=_TOLERANCE * math.sqrt(data.size),
        ),
    ]


def _relative_error(
    left: NDArray[np.float32], right: NDArray[np.float32], product: NDArray[np.generic]
) -> float:
    reference = left.astype(np.float64) @ right.astype(np.float64)
    return float(np.linalg.norm(np.asarray(product, np.float64) - reference) / np.linalg.norm(reference))


def _blas(bench: Bench) -> ta.ActorSnapshot:
    """The actor that serves ``ta.linalg`` on the bench's device."""
    return next(node for node in bench.system.tree().walk() if node.name == "blas")
