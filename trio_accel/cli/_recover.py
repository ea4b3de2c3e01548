"""``demo recover``: faults under load, the fate of every request, and what becomes of arrays."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import attrs
import numpy as np
import trio
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, count_of, grid, relative_error, worst_of
from trio_accel.cli._run import Isolation, in_thread, isolation_of

# The tolerance of one float32 product and sum; it grows with the root of the number of terms.
TOLERANCE = 1e-5
# Arrays of 16 MiB each.
_ARRAYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("float32", (2048, 2048)),
    ("float64", (2097152,)),
    ("complex64", (1024, 2048)),
    ("int8", (256, 256, 256)),
)


@attrs.frozen(kw_only=True)
class Fate:
    """The fate of one request.

    Attributes:
        client: Number of the client that asked, from 1.
        request: Number of the client's request, from 1.
        begun: When it was asked, in seconds of Trio's clock from the start of the load.
        ended: When its fate was known.
        after: The fault injected last at that time, ``None`` before the first.
        generation: Generation of the device at that time.
        outcome: ``"completed"`` or the class of the error that the asker got.
        cause: The error and what caused it, ``None`` for a completed request.
        error: Relative error against NumPy in float64, ``None`` if there was no result.
    """

    client: int
    request: int
    begun: float
    ended: float
    after: str | None
    generation: int
    outcome: str
    cause: str | None
    error: float | None

    @property
    def is_completed(self) -> bool:
        """Whether the asker got a product, right or wrong."""
        return self.cause is None


@attrs.frozen(kw_only=True)
class Products:
    """The products to ask for: left operands on the host, one right operand on the device.

    Attributes:
        lefts: Left operands, float32.
        right: Right operand of all.
        references: The products in float64.
    """

    lefts: NDArray[np.float32] = attrs.field(eq=False)
    right: NDArray[np.float32] = attrs.field(eq=False)
    references: NDArray[np.float64] = attrs.field(eq=False)

    @classmethod
    def random(cls, number: int, size: int) -> Products:
        """Make as many of square operands. Blocking."""
        generator = np.random.default_rng(20250101)
        lefts = generator.standard_normal((number, size, size), np.float32)
        right = generator.standard_normal((size, size), np.float32)
        references = lefts.astype(np.float64) @ right.astype(np.float64)
        return cls(lefts=lefts, right=right, references=references)

    @property
    def limit(self) -> float:
        """The largest relative error that is right."""
        return TOLERANCE * math.sqrt(self.right.shape[0])


@attrs.define(kw_only=True, eq=False)
class Load:
    """Clients that ask all the time, several requests each.

    Attributes:
        device: The device that they ask.
        products: The products that they ask for.
        clients: Clients that ask at once.
        in_flight: Requests that a client has under way at once.
        after: Name of the fault injected last; it goes into the fates.
        asked: Requests so far.
        fates: Requests that have ended, in the order of their ends.
    """

    device: ta.Device
    products: Products
    clients: int
    in_flight: int
    after: str | None = attrs.field(default=None, init=False)
    asked: int = attrs.field(default=0, init=False)
    fates: list[Fate] = attrs.field(factory=list[Fate], init=False)
    _right: ta.AccelRef = attrs.field(init=False)
    _renewing: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _start: float = attrs.field(factory=trio.current_time, init=False)
    _lost: ta.DeviceLostError | None = attrs.field(default=None, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def start(self, nursery: trio.Nursery) -> None:
        """Put the right operand; then the clients ask, as tasks of ``nursery``, until they are stopped."""
        self._right = await self.device.put(self.products.right)
        # The first product starts the library's actor, so that the tree shows it before anything fails.
        (await ta.linalg.matmul(self.products.lefts[0], self._right)).release()
        for client in range(1, self.clients + 1):
            numbers = count(1)
            for _ in range(self.in_flight):
                nursery.start_soon(self._ask_on, client, numbers)

    def stop(self) -> None:
        """Ask for nothing new; what is under way ends by itself."""
        self._is_over = True

    async def wait_settled(self, more: int) -> None:
        """Wait until so many more requests have their fates.

        Raises:
            DeviceLostError: The device was given up.
        """
        wanted = len(self.fates) + more
        while len(self.fates) < wanted:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until another request has its fate.

        Raises:
            DeviceLostError: That is its fate.
        """
        await self._changed.park()
        if self._lost is not None:
            raise self._lost

    async def _ask_on(self, client: int, numbers: Iterator[int]) -> None:
        while not self._is_over:
            await self._ask(client, next(numbers))

    async def _ask(self, client: int, request: int) -> None:
        self.asked += 1
        begun, right = self._now(), self._right
        index = (client + request) % len(self.products.lefts)
        failure: Exception | None = None
        error: float | None = None
        try:
            product = await ta.linalg.matmul(self.products.lefts[index], right)
            host = await product.to_host()
            product.release()
            error = relative_error(host, self.products.references[index])
        except (ta.ActorError, ta.AccelError) as caught:
            failure = caught
            if isinstance(failure, ta.DeviceLostError):
                self._lost, self._is_over = failure, True
        fate = Fate(
            client=client,
            request=request,
            begun=begun,
            ended=self._now(),
            after=self.after,
            generation=self.device.generation,
            outcome="completed" if failure is None else type(failure).__name__,
            cause=None if failure is None else _describe(failure),
            error=error,
        )
        self.fates.append(fate)
        self._changed.unpark_all()
        if isinstance(failure, ta.StaleRefError):
            await self._renew(right)

    async def _renew(self, stale: ta.AccelRef) -> None:
        """Put the right operand again if it is the one that was lost; a product that was lost is not."""
        async with self._renewing:
            if self._right is not stale:
                return
            # An error here comes again with the next request.
            with suppress(ta.AccelError, ta.ActorError):
                try:
                    await stale.to_host()
                except ta.StaleRefError:
                    self._right = await self.device.put(self.products.right)

    def _now(self) -> float:
        return trio.current_time() - self._start


def _describe(failure: Exception) -> str:
    cause = failure.__cause__
    text = f"{type(failure).__name__}: {failure}"
    return text if cause is None else f"{text}; from {type(cause).__name__}: {cause}"


@attrs.frozen(kw_only=True)
class ArrayReport:
    """An array, before the first fault and after the last one.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        nbytes: Its size in bytes.
        sha256_before: Hash of its elements before the first fault, copied to the host.
        sha256_after: The same at the end.
        lost_with: Generation that it was lost with, and it has been put again since; ``None`` if it is
            still the same array.
    """

    dtype: str
    shape: Sequence[int]
    nbytes: int
    sha256_before: str
    sha256_after: str
    lost_with: int | None

    @property
    def is_identical(self) -> bool:
        """Whether its elements are as they were."""
        return self.sha256_before == self.sha256_after


@attrs.define(kw_only=True, eq=False)
class Witnesses:
    """Arrays that no operation uses.

    Attributes:
        device: Where they are.
    """

    device: ta.Device
    _refs: list[ta.AccelRef] = attrs.field(init=False)
    _before: list[str] = attrs.field(init=False)

    async def put(self) -> None:
        """Put them, and note what they hold."""
        self._refs = [await self._put(index) for index in range(len(_ARRAYS))]
        self._before = [await _hash(ref) for ref in self._refs]

    async def compare(self) -> list[ArrayReport]:
        """See what they hold now; one that is lost is put again."""
        return [await self._compare(index) for index in range(len(_ARRAYS))]

    def release(self) -> None:
        """Give their memory back."""
        for ref in self._refs:
            ref.release()

    async def _compare(self, index: int) -> ArrayReport:
        ref, lost_with = self._refs[index], None
        try:
            after = await _hash(ref)
        except ta.StaleRefError:
            lost_with = ref.generation
            self._refs[index] = ref = await self._put(index)
            after = await _hash(ref)
        dtype, shape = _ARRAYS[index]
        return ArrayReport(
            dtype=dtype,
            shape=shape,
            nbytes=ref.nbytes,
            sha256_before=self._before[index],
            sha256_after=after,
            lost_with=lost_with,
        )

    async def _put(self, index: int) -> ta.AccelRef:
        return await self.device.put(await in_thread(_elements, index))


def _elements(index: int) -> NDArray[Any]:
    """Random bytes, the same each time: any pattern of bits must come through. Blocking."""
    name, shape = _ARRAYS[index]
    dtype = np.dtype(name)
    content = np.random.default_rng(index).bytes(math.prod(shape) * dtype.itemsize)
    elements: NDArray[Any] = np.frombuffer(content, dtype)
    return elements.reshape(shape)


async def _hash(ref: ta.AccelRef) -> str:
    host = await ref.to_host()
    return await in_thread(lambda: hashlib.sha256(host.data).hexdigest())


# The failures that a request may have: over a crash, with its context, hung, and inline for want of an array
# that is gone.
_FAILURES: dict[Isolation, frozenset[str]] = {
    "inline": frozenset({"ActorFailedError", "ContextLostError", "ContextPoisonedError", "StaleRefError"}),
    "process": frozenset(
        {"ActorFailedError", "ContextLostError", "ContextPoisonedError", "CompletionTimeoutError"}
    ),
}
_REASON = "injected"
# A fault that has not been felt, or not been recovered from, after so many requests never will be.
_PATIENCE = 500
# The digits of a hash that are shown.
_DIGITS = 12


@attrs.frozen
class Fault:
    """A fault to inject.

    Attributes:
        name: Its short name.
        text: The failing part, in words.
        losses: Contexts that it costs.
        inject: Makes it happen.
    """

    name: str
    text: str
    losses: int
    inject: Callable[[ta.Device], object] = attrs.field(eq=False)


@attrs.frozen(kw_only=True)
class FaultReport:
    """The effect of a fault.

    Attributes:
        fault: Its name.
        text: The part that was made to fail, in words.
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
    """Return the faults that a device in this isolation can survive, the mildest first."""
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
    while not (has_recovered := _has_recovered(load, first)) and len(load.fates) < first + _PATIENCE:
        await load.wait_change()
    seconds = trio.current_time() - start
    return FaultReport(
        fault=fault.name,
        text=fault.text,
        losses=fault.losses,
        generation_before=generation,
        generation_after=load.device.generation,
        failed=sum(not fate.is_completed for fate in load.fates[first:]),
        recovery_ms=seconds * 1e3 if has_recovered else None,
    )


def _has_recovered(load: Load, first: int) -> bool:
    """Tell whether a request shows the end of a fault: begun after it had been felt, and right.

    Requests that are made after the first failure are served by the next incarnation, or context.
    """
    fates = load.fates[first:]
    felt = next((fate.ended for fate in fates if not fate.is_completed), None)
    return felt is not None and any(
        fate.begun >= felt and fate.error is not None and fate.error <= load.products.limit for fate in fates
    )


@attrs.frozen(kw_only=True)
class RecoverData:
    """The faults and their effects.

    Attributes:
        isolation: Where the device's context lives.
        clients: Clients that asked at once.
        size: Rows and columns of the operands.
        requests: Requests of all clients.
        completed: Requests that got a result.
        failed: Requests that got an error, counted by its class.
        rounds: How often each fault was injected.
        faults: The effect of each, in order.
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

    def figures(self) -> RenderableType:
        """See `StepData`: trees, faults, arrays and fates."""
        faults = f"after {count_of(len(self.faults), 'fault')}, {self.clients} clients asking all the time"
        tables = (
            _one_round(self.faults) if self.rounds == 1 else _rounds(self.faults),
            _fates(self.fates),
            _arrays(self.arrays),
        )
        parts: list[RenderableType] = [
            Text("before", style="dim"),
            _tree(self.tree_before),
            Text(faults, style="dim"),
            _tree(self.tree_after),
            *(Padding(table, (1, 0, 0, 0)) for table in tables),
            Text(),
        ]
        if any(array.lost_with is not None for array in self.arrays) and self.isolation == "inline":
            hint = "Inline, arrays are lost with their context. In a worker process they outlive it."
            parts += [Text(hint), Text()]
        return Group(*parts)


@attrs.frozen(kw_only=True)
class RecoverStep(Step):
    """The step, with its options.

    Attributes:
        clients: Clients that ask at once.
        in_flight: Requests that a client has under way at once.
        between: Requests with fates before the first fault, between two, and after the last one.
        size: Rows and columns of the operands.
        rounds: How often all faults are injected, one round after the other.
    """

    name: ClassVar[str] = "recover"
    clients: int = 4
    in_flight: int = 4
    between: int = 25
    size: int = 64
    rounds: int = 1

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
        return StepResult(summary=_summarize(data), checks=_checks(data, products.limit), data=data)

    async def _break_all(
        self, bench: Bench, load: Load, faults: Sequence[Fault]
    ) -> tuple[str, list[FaultReport]]:
        """Draw the tree before the first fault, and each fault's effect; ends when every request has."""
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
    """Return a line of the moment."""
    if report.recovery_ms is None:
        return f"  {report.text}: {report.failed} failed, and no product was right again"
    return f"  {report.text}: {report.failed} failed, right again after {report.recovery_ms:.0f} ms"


def _summarize(data: RecoverData) -> str:
    lost = data.requests - len(data.fates)
    is_kept = all(array.is_identical and array.lost_with is None for array in data.arrays)
    otherwise = "arrays lost" if data.isolation == "process" else "arrays put again"
    arrays = "arrays unchanged" if is_kept else otherwise
    return (
        f"{count_of(len(data.faults), 'fault')}, {data.requests} requests: {data.completed} completed, "
        f"{sum(data.failed.values())} failed, {lost or 'none'} lost; {arrays}"
    )


def _checks(data: RecoverData, limit: float) -> list[Check]:
    """Everything that must hold; see `Check`."""
    lost = abs(data.requests - len(data.fates))
    unfelt = sum(report.recovery_ms is None for report in data.faults)
    wrong = sum(
        abs(report.generation_after - report.generation_before - report.losses) for report in data.faults
    )
    errors = [math.nan if fate.error is None else fate.error for fate in data.fates if fate.is_completed]
    return [
        Check(name="requests lost: neither result nor error", value=lost, limit=0),
        Check(name="requests failed for another reason", value=_strange(data), limit=0),
        Check(name="faults not felt, or not recovered from", value=unfelt, limit=0),
        Check(name="generations more or less than contexts lost", value=wrong, limit=0),
        _arrays_check(data),
        Check(name="relative error of every result", value=worst_of(errors), limit=limit),
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
    # Inline there is no memory that outlives the context: what was lost has been put again.
    is_kept = data.isolation == "process"
    name = "arrays lost or changed" if is_kept else "arrays that differ, those put again included"
    lost = sum(not one.is_identical or (is_kept and one.lost_with is not None) for one in data.arrays)
    return Check(name=name, value=lost, limit=0)


def _tree(lines: str) -> RenderableType:
    """Return a tree whose lines end where the terminal does: one that went on below would break it."""
    return Padding(Text(lines, no_wrap=True, overflow="ellipsis"), (0, 0, 0, 2))


def _one_round(faults: Sequence[FaultReport]) -> Table:
    """Describe the broken part, and how long that was felt."""
    table = grid("fault", "generation", ">failed", ">next right product")
    for report in faults:
        recovery = "never" if report.recovery_ms is None else f"after {report.recovery_ms:.1f} ms"
        generations = f"{report.generation_before} → {report.generation_after}"
        table.add_row(report.text, generations, str(report.failed), recovery)
    return table


def _rounds(faults: Sequence[FaultReport]) -> Table:
    """Return the same of several rounds: each fault in all of them, with medians and the longest times."""
    table = grid("fault", ">times", ">failed", ">right after", ">at most")
    for text in dict.fromkeys(report.text for report in faults):
        ours = [report for report in faults if report.text == text]
        times = [report.recovery_ms for report in ours if report.recovery_ms is not None]
        took = (statistics.median(times), max(times)) if len(times) == len(ours) else ()
        table.add_row(
            text,
            str(len(ours)),
            str(sum(report.failed for report in ours)),
            *([f"{milliseconds:.1f} ms" for milliseconds in took] or ("never", "never")),
        )
    return table


def _fates(fates: Sequence[Fate]) -> Table:
    """Tell how many requests ended how, by the fault injected last at that time."""
    # With all faults of a GPU it is just as wide as a terminal.
    phases = list(dict.fromkeys(fate.after for fate in fates))
    table = grid("requests by last fault", *(f">{phase or 'none'}" for phase in phases), ">all")
    table.collapse_padding, table.columns[0].no_wrap = True, True
    outcomes = sorted({fate.outcome for fate in fates}, key=lambda outcome: (outcome != "completed", outcome))
    for outcome in outcomes:
        ours = Counter(fate.after for fate in fates if fate.outcome == outcome)
        table.add_row(escape(outcome), *(str(ours[phase]) for phase in phases), str(ours.total()))
    table.add_section()
    sums = Counter(fate.after for fate in fates)
    table.add_row("together", *(str(sums[phase]) for phase in phases), str(sums.total()), style="bold")
    return table


def _arrays(arrays: Sequence[ArrayReport]) -> Table:
    """Describe the contents of the arrays before and after."""
    table = grid("array", ">MiB", "SHA-256 before", "SHA-256 after", "fate")
    for array in arrays:
        table.add_row(
            f"{array.dtype} {'×'.join(map(str, array.shape))}",
            f"{array.nbytes / 2**20:.0f}",
            array.sha256_before[:_DIGITS],
            array.sha256_after[:_DIGITS],
            _what_became(array),
        )
    return table


def _what_became(array: ArrayReport) -> str:
    if array.lost_with is not None:
        text = "lost, put again"
        return f"[yellow]{text}[/]" if array.is_identical else f"[bold red]{text}, different[/]"
    return "[green]identical[/]" if array.is_identical else "[bold red]changed[/]"
