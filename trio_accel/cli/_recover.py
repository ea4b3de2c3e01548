"""``demo recover``: faults under load, the fate of every request, and what becomes of arrays."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import trio

import trio_accel as ta
from trio_accel.cli._device import isolation_of
from trio_accel.cli._load import ArrayReport, Fate, Load, Products, Witnesses, worst_error
from trio_accel.cli._results import Bench, Check, StepResult, count_of
from trio_accel.cli._run import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_accel.cli._device import Isolation

__all__ = ["FaultReport", "RecoverData", "RecoverStep"]

# How a request may fail: over a crash, with its context, hung, and inline for want of an array that is gone.
_FAILURES: dict[Isolation, frozenset[str]] = {
    "inline": frozenset({"ActorFailedError", "ContextPoisonedError", "StaleRefError"}),
    "process": frozenset({"ActorFailedError", "ContextPoisonedError", "CompletionTimeoutError"}),
}
_REASON = "injected"
# A fault that has not been felt, or not been recovered from, after so many requests never will be.
_PATIENCE = 500


@attrs.frozen
class Fault:
    """Something that is made to fail.

    Attributes:
        name: Its short name.
        text: What fails.
        losses: Contexts that it costs.
        inject: Makes it happen.
    """

    name: str
    text: str
    losses: int
    inject: Callable[[ta.Device], object] = attrs.field(eq=False)


@attrs.frozen(kw_only=True)
class FaultReport:
    """What a fault came to.

    Attributes:
        fault: Its name.
        text: What was made to fail.
        losses: Contexts that it costs.
        generation_before: Generation of the device before it.
        generation_after: The generation that served again.
        failed: Requests that failed from its injection on, until the device served again.
        recovery_ms: From its injection to the end of the next request that was begun when it had been
            felt, and got the right product; ``None`` if no request felt it or none was served after it.
    """

    fault: str
    text: str
    losses: int
    generation_before: int
    generation_after: int
    failed: int
    recovery_ms: float | None


def _inject(device: ta.Device, **how: Any) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, **how)


_CRASH = Fault("crash", "crash of the BLAS actor", 0, lambda on: _inject(on, fail=RuntimeError(_REASON)))
_POISON = Fault("poison", "poison of the context", 1, lambda on: ta.testing.poison(on, _REASON))
_TRAP = Fault("trap", "trap in a kernel", 1, lambda on: _inject(on, poison=True, how="trap"))
_ASSERT = Fault(
    "assert", "failed assertion in a kernel", 1, lambda on: _inject(on, poison=True, how="assert")
)
_KILL = Fault("kill", "SIGKILL to the worker process", 1, lambda on: _inject(on, kill=True, how="writing"))


def _faults_of(device: ta.Device, isolation: Isolation) -> Sequence[Fault]:
    """The faults that a device in this isolation can survive, the mildest first."""
    if isolation == "inline":
        # There the worker is this process.
        return _CRASH, _POISON
    # Without kernels a trap and an assertion are the same as the poison.
    of_kernels = () if device.info.backend == "cpu" else (_TRAP, _ASSERT)
    found = (_CRASH, _POISON, *of_kernels, _KILL)
    limit = device.options.stuck_after
    if limit is None:
        # A hung operation would be waited for.
        return found
    text = f"hang, given up after {limit:g} s"
    return *found, Fault("hang", text, 1, lambda on: _inject(on, hang=True, how="kernel"))


async def _break(fault: Fault, load: Load) -> FaultReport:
    """Inject a fault under load and wait until the device serves again.

    Raises:
        DeviceLostError: The device does not come back.
    """
    first, generation = len(load.fates), load.device.generation
    start = trio.current_time()
    load.after = fault.name
    fault.inject(load.device)
    while (recovered := _recovered(load, first)) is None and len(load.fates) < first + _PATIENCE:
        await load.wait_change()
    seconds = trio.current_time() - start
    return FaultReport(
        fault=fault.name,
        text=fault.text,
        losses=fault.losses,
        generation_before=generation,
        generation_after=load.device.generation,
        failed=sum(not fate.is_completed for fate in load.fates[first:]),
        recovery_ms=None if recovered is None else seconds * 1e3,
    )


def _recovered(load: Load, first: int) -> int | None:
    """The request that shows that a fault is over: begun after it had been felt, and right.

    Who asks after the first failure is served by the next incarnation, or by the next context.
    """
    fates = load.fates[first:]
    felt = next((fate.ended for fate in fates if not fate.is_completed), None)
    if felt is None:
        return None
    served = (
        number
        for number, fate in enumerate(fates)
        if fate.begun >= felt and fate.error is not None and fate.error <= load.products.limit
    )
    return next(served, None)


@attrs.frozen(kw_only=True)
class RecoverData:
    """The faults and what came of them.

    Attributes:
        isolation: Where the device's context lives.
        clients: Clients that asked at once.
        size: Rows and columns of the operands.
        requests: Requests of all clients.
        completed: Requests that got a result.
        failed: Requests that got an error, counted by its class.
        rounds: How often each fault was injected.
        faults: What came of each, in their order.
        arrays: Arrays that were on the device all the time.
        tree_before: The actors before the first fault.
        tree_after: The actors after the last request.
        fates: Every request, in the order of their ends.
    """

    isolation: Isolation
    clients: int
    size: int
    requests: int
    completed: int
    failed: dict[str, int]
    rounds: int
    faults: Sequence[FaultReport]
    arrays: Sequence[ArrayReport]
    tree_before: str
    tree_after: str
    fates: Sequence[Fate]


@attrs.frozen(kw_only=True)
class RecoverStep:
    """The step, with its options.

    Attributes:
        clients: Clients that ask at once.
        in_flight: Requests that a client has under way at once.
        between: Requests with fates before the first fault, between two, and after the last one.
        size: Rows and columns of the operands.
        rounds: How often all faults are injected, one round after the other.
    """

    name: str = attrs.field(default="recover", init=False)
    clients: int = 4
    in_flight: int = 4
    between: int = 25
    size: int = 64
    rounds: int = 1

    async def prepare(self) -> None:
        """Nothing to read."""
        await trio.lowlevel.checkpoint()

    async def run(self, bench: Bench) -> StepResult:
        """Ask, break, ask on; then count."""
        isolation = isolation_of(bench.device)
        faults = self.rounds * tuple(_faults_of(bench.device, isolation))
        parts = len(faults) + 2
        bench.progress.update(0, parts, "putting arrays")
        witnesses = Witnesses(device=bench.device)
        await witnesses.put()
        products = await in_thread(Products.random, self.between, self.size)
        load = Load(device=bench.device, products=products, clients=self.clients, in_flight=self.in_flight)
        before, reports = await self._break_all(bench, load, faults)
        bench.progress.update(parts - 1, parts, "comparing the hashes of arrays")
        arrays = await witnesses.compare()
        witnesses.release()
        await bench.device.synchronize()
        failed = Counter(fate.outcome for fate in load.fates if not fate.is_completed)
        data = RecoverData(
            isolation=isolation,
            clients=self.clients,
            size=self.size,
            requests=load.asked,
            completed=sum(fate.is_completed for fate in load.fates),
            failed=dict(failed),
            rounds=self.rounds,
            faults=reports,
            arrays=arrays,
            tree_before=before,
            tree_after=str(bench.system.tree()),
            fates=load.fates,
        )
        return StepResult(
            name=self.name, summary=_summarize(data), checks=_checks(data, products.limit), data=data
        )

    async def _break_all(
        self, bench: Bench, load: Load, faults: Sequence[Fault]
    ) -> tuple[str, list[FaultReport]]:
        """The tree before the first fault, and what each fault came to; ends when every request has."""
        reports: list[FaultReport] = []
        async with trio.open_nursery() as nursery:
            await load.start(nursery)
            before = str(bench.system.tree())
            bench.progress.watch(lambda: f"  {str(bench.system.tree()).replace(chr(10), chr(10) + '  ')}")
            for number, fault in enumerate(faults, 1):
                await load.wait_settled(self.between)
                text = f"{fault.text}, {len(load.fates)} requests"
                bench.progress.update(number, len(faults) + 2, text)
                reports.append(report := await _break(fault, load))
                bench.progress.tell(_told(report))
            await load.wait_settled(self.between)
            load.stop()
        return before, reports


def _told(report: FaultReport) -> str:
    """A line of the moment."""
    if report.recovery_ms is None:
        return f"  {report.text}: {report.failed} failed, and no product was right again"
    return f"  {report.text}: {report.failed} failed, right again after {report.recovery_ms:.0f} ms"


def _summarize(data: RecoverData) -> str:
    lost = data.requests - len(data.fates)
    is_kept = all(array.is_identical and array.lost_with is None for array in data.arrays)
    arrays = (
        "arrays unchanged"
        if is_kept
        else "arrays lost"
        if data.isolation == "process"
        else "arrays put again"
    )
    return (
        f"{count_of(len(data.faults), 'fault')}, {data.requests} requests: {data.completed} completed, "
        f"{sum(data.failed.values())} failed, {lost or 'none'} lost; {arrays}"
    )


def _checks(data: RecoverData, limit: float) -> list[Check]:
    """Everything that must hold; see `Check`."""
    unfelt = sum(report.recovery_ms is None for report in data.faults)
    wrong = sum(
        abs(report.generation_after - report.generation_before - report.losses) for report in data.faults
    )
    return [
        Check(
            name="requests lost: neither result nor error",
            value=abs(data.requests - len(data.fates)),
            limit=0,
        ),
        Check(name="requests failed for another reason", value=_strange(data), limit=0),
        Check(name="faults not felt, or not recovered from", value=unfelt, limit=0),
        Check(name="generations more or less than contexts lost", value=wrong, limit=0),
        _arrays_check(data),
        Check(name="relative error of every result", value=worst_error(data.fates), limit=limit),
    ]


def _strange(data: RecoverData) -> int:
    """Requests that failed with another class of error than the faults have, or over another crash."""
    allowed = _FAILURES[data.isolation]
    return sum(
        fate.outcome not in allowed or (fate.outcome == "ActorFailedError" and _REASON not in fate.cause)
        for fate in data.fates
        if fate.cause is not None
    )


def _arrays_check(data: RecoverData) -> Check:
    if data.isolation == "process":
        bad = sum(array.lost_with is not None or not array.is_identical for array in data.arrays)
        return Check(name="arrays lost or changed", value=bad, limit=0)
    # There is no memory that outlives the context: what was lost has been put again.
    bad = sum(not array.is_identical for array in data.arrays)
    return Check(name="arrays that differ, those put again included", value=bad, limit=0)
