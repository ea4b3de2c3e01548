"""``demo recover``: faults under load, the outcome of every request, and what becomes of arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import trio
from numpy.typing import NDArray
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.cli._console import as_json, can_move, count_of, make_console, print_line
from trio_accel.cli._run import InputError, in_thread, run_async, run_for_json

# The tolerance of one float32 product and sum; it grows with the root of the number of terms.
TOLERANCE = 1e-5
# Rows and columns of the operands, how many of them there are, and how many requests are under way at once.
_SIZE, _OPERANDS, _CLIENTS = 64, 25, 16
_LIMIT = TOLERANCE * math.sqrt(_SIZE)
# Requests with outcomes before the first fault, between two, and after the last one.
_BETWEEN = 25
# A fault that has not been felt, or not been recovered from, after so many requests never will be.
_PATIENCE = 500
# Seconds after which an operation counts as hung: no other one takes so long.
_STUCK_AFTER = 2.0
# Seconds that the command waits after Ctrl-C for an operation that still runs.
_CLOSE_GRACE = 0.2
# The demo loses contexts and actors on purpose; a device that does so all the time would be given up.
_INTENSITY = ta.Intensity(100, 60.0)
# It tells how soon the next one serves, and not how long a supervisor waits after several in a row.
_BACKOFF = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
_REFRESH_SECONDS = 0.08
# The digits of a hash that are shown.
_DIGITS = 12
# Dtypes of the arrays that no operation uses, and the bytes of each.
_DTYPES, _NBYTES = ("float32", "float64", "complex64", "int8"), 16 << 20
_REASON = "injected"
# The failures that a request may have: over a crash, with its context, or hung.
_FAILURES = {"ActorFailedError", "ContextLostError", "ContextPoisonedError", "CompletionTimeoutError"}


@attrs.frozen(kw_only=True)
class Fate:
    """The outcome of one request.

    Attributes:
        begun: When it was asked, in seconds of Trio's clock.
        ended: When its outcome was known.
        after: The fault injected last at that time, ``None`` before the first.
        outcome: ``"completed"`` or the class of the error that the asker got.
        cause: The error and what caused it, ``None`` for a completed request.
        error: Relative error against NumPy in float64, ``None`` if there was no result.
    """

    begun: float
    ended: float
    after: str | None
    outcome: str
    cause: str | None
    error: float | None

    @property
    def is_completed(self) -> bool:
        """Whether the asker got a product, right or wrong."""
        return self.cause is None


@attrs.define(kw_only=True, eq=False)
class Load:
    """Clients that ask for products all the time.

    Attributes:
        device: The device that they ask.
        lefts: Left operands on the host, float32.
        right: Right operand of all, on the device.
        references: The products in float64.
        after: Name of the fault injected last; it goes into the fates.
        asked: Requests so far.
        fates: Requests that have ended, in the order of their ends.
        is_over: Whether clients ask for nothing new; what is under way ends by itself.
    """

    device: ta.Device
    lefts: NDArray[np.float32]
    right: ta.AccelRef
    references: NDArray[np.float64]
    after: str | None = None
    asked: int = 0
    fates: list[Fate] = attrs.field(factory=list[Fate])
    is_over: bool = False
    _lost: ta.DeviceLostError | None = None
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @classmethod
    async def prepare(cls, device: ta.Device) -> Load:
        """Put the right operand, and ask once."""
        generator = np.random.default_rng(20250101)
        lefts = generator.standard_normal((_OPERANDS, _SIZE, _SIZE), np.float32)
        right = generator.standard_normal((_SIZE, _SIZE), np.float32)
        references = lefts.astype(np.float64) @ right.astype(np.float64)
        load = cls(device=device, lefts=lefts, right=await device.put(right), references=references)
        # The first product starts the library's actor, so that the tree shows it before anything fails.
        (await ta.linalg.matmul(lefts[0], load.right)).release()
        return load

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for what changes as requests get their outcomes.

        Raises:
            DeviceLostError: The device was given up.
        """
        while not holds():
            await self._changed.park()
            if self._lost is not None:
                raise self._lost

    async def wait_settled(self, more: int) -> None:
        """Wait until so many more requests have their outcomes."""
        wanted = len(self.fates) + more
        await self.wait_until(lambda: len(self.fates) >= wanted)

    async def ask_on(self) -> None:
        """Ask, one request after the other."""
        while not self.is_over:
            await self._ask()

    async def _ask(self) -> None:
        self.asked += 1
        begun, index = trio.current_time(), self.asked % len(self.lefts)
        outcome, cause, error = "completed", None, None
        try:
            product = await ta.linalg.matmul(self.lefts[index], self.right)
            host = await product.to_host()
            product.release()
            reference = self.references[index]
            error = float(np.linalg.norm(host - reference) / np.linalg.norm(reference))
        except (ta.ActorError, ta.AccelError) as failure:
            outcome, cause = type(failure).__name__, _describe(failure)
            if isinstance(failure, ta.DeviceLostError):
                self._lost, self.is_over = failure, True
        ended = trio.current_time()
        fate = Fate(begun=begun, ended=ended, after=self.after, outcome=outcome, cause=cause, error=error)
        self.fates.append(fate)
        self._changed.unpark_all()


def _describe(failure: Exception) -> str:
    cause = failure.__cause__
    text = f"{type(failure).__name__}: {failure}"
    return text if cause is None else f"{text}; from {type(cause).__name__}: {cause}"


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


def _inject(device: ta.Device, **how: Any) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, **how)


_HANG = f"hang, given up after {_STUCK_AFTER:g} s"
_FAULTS = (
    Fault("crash", "crash of the BLAS actor", 0, lambda on: _inject(on, fail=RuntimeError(_REASON))),
    Fault("poison", "poison of the context", 1, lambda on: ta.testing.poison(on, _REASON)),
    Fault("trap", "trap in a kernel", 1, lambda on: _inject(on, poison=True, how="trap")),
    Fault("assert", "failed assertion in a kernel", 1, lambda on: _inject(on, poison=True, how="assert")),
    Fault("kill", "SIGKILL to the worker process", 1, lambda on: _inject(on, kill=True, how="writing")),
    Fault("hang", _HANG, 1, lambda on: _inject(on, hang=True, how="kernel")),
)
# Without kernels, these two are the same as the poison.
_OF_KERNELS = {"trap", "assert"}


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


async def _break(fault: Fault, load: Load) -> FaultReport:
    """Inject a fault under load and wait until the device serves again.

    Raises:
        DeviceLostError: The device does not come back.
    """
    first, generation = len(load.fates), load.device.generation
    start = trio.current_time()
    load.after = fault.name
    fault.inject(load.device)
    await load.wait_until(lambda: _is_over(load.fates[first:]) or len(load.fates) >= first + _PATIENCE)
    milliseconds = (trio.current_time() - start) * 1e3
    return FaultReport(
        fault=fault.name,
        text=fault.text,
        losses=fault.losses,
        generation_before=generation,
        generation_after=load.device.generation,
        failed=sum(not fate.is_completed for fate in load.fates[first:]),
        recovery_ms=milliseconds if _is_over(load.fates[first:]) else None,
    )


def _is_over(fates: Sequence[Fate]) -> bool:
    """Tell whether a request shows the end of a fault: begun after it had been felt, and right.

    Requests that are made after the first failure are served by the next incarnation, or context.
    """
    felt = next((fate.ended for fate in fates if not fate.is_completed), None)
    return felt is not None and any(
        fate.begun >= felt and fate.error is not None and fate.error <= _LIMIT for fate in fates
    )


@attrs.frozen(kw_only=True)
class ArrayReport:
    """An array that no operation uses, before the first fault and after the last one.

    Attributes:
        dtype: Its dtype.
        nbytes: Its size in bytes.
        sha256_before: Hash of its elements before the first fault, copied to the host.
        sha256_after: The same at the end; ``None`` if the array is lost.
    """

    dtype: str
    nbytes: int
    sha256_before: str | None
    sha256_after: str | None

    @property
    def is_identical(self) -> bool:
        """Whether its elements are as they were."""
        return self.sha256_before == self.sha256_after is not None


def _elements(dtype: str) -> NDArray[Any]:
    """Random bytes, the same each time: any pattern of bits must come through. Blocking."""
    return np.frombuffer(np.random.default_rng(0).bytes(_NBYTES), dtype)


async def _hash(ref: ta.AccelRef) -> str | None:
    try:
        host = await ref.to_host()
    except ta.StaleRefError:
        return None
    return await in_thread(lambda: hashlib.sha256(host.data).hexdigest())


@attrs.frozen(kw_only=True)
class Check:
    """A number that must not exceed a limit; NaN exceeds every limit.

    Attributes:
        name: The measured quantity.
        value: The measured number.
        limit: The largest number that is right.
    """

    name: str
    value: float
    limit: float = 0

    @property
    def is_ok(self) -> bool:
        """Whether the number is within its limit."""
        return bool(self.value <= self.limit)

    def __str__(self) -> str:
        form = "d" if isinstance(self.value, int) else ".1e"
        return f"{self.value:{form}}, allowed {self.limit:{form}}"


@attrs.frozen(kw_only=True)
class Report:
    """What happened in a run.

    Attributes:
        seconds: How long it took.
        requests: Requests of all clients.
        faults: The effect of each fault, in order.
        arrays: Arrays that were on the device all the time.
        tree_before: The actors before the first fault.
        tree_after: The actors after the last request.
        fates: Every request, in the order of their ends.
    """

    seconds: float
    requests: int
    faults: Sequence[FaultReport]
    arrays: Sequence[ArrayReport]
    tree_before: str
    tree_after: str
    fates: Sequence[Fate]

    @property
    def failed(self) -> Counter[str]:
        """Requests that got an error, counted by its class."""
        return Counter(fate.outcome for fate in self.fates if not fate.is_completed)

    @property
    def lost(self) -> int:
        """Requests with neither a result nor an error."""
        return abs(self.requests - len(self.fates))

    def summarize(self) -> str:
        """Return one line for a person."""
        failed = self.failed.total()
        is_kept = all(array.is_identical for array in self.arrays)
        return (
            f"{count_of(len(self.faults), 'fault')}, {self.requests} requests: "
            f"{len(self.fates) - failed} completed, {failed} failed, {self.lost or 'none'} lost; "
            f"arrays {'unchanged' if is_kept else 'lost or changed'}"
        )

    def checks(self) -> list[Check]:
        """Everything that must hold; see `Check`."""
        wrong = sum(abs(one.generation_after - one.generation_before - one.losses) for one in self.faults)
        errors = [math.nan if fate.error is None else fate.error for fate in self.fates if fate.is_completed]
        # `max` would pass over a NaN that does not come first.
        worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan)
        unfelt = sum(one.recovery_ms is None for one in self.faults)
        changed = sum(not array.is_identical for array in self.arrays)
        return [
            Check(name="requests lost: neither result nor error", value=self.lost),
            Check(name="requests failed for another reason", value=sum(map(_is_strange, self.fates))),
            Check(name="faults not felt, or not recovered from", value=unfelt),
            Check(name="generations more or less than contexts lost", value=wrong),
            Check(name="arrays lost or changed", value=changed),
            Check(name="relative error of every result", value=worst, limit=_LIMIT),
        ]


def _is_strange(fate: Fate) -> bool:
    """Tell whether it failed with another class of error than the faults have, or over another crash."""
    if fate.cause is None:
        return False
    is_another = fate.outcome == "ActorFailedError" and _REASON not in fate.cause
    return is_another or fate.outcome not in _FAILURES


def run_recover(*, rounds: int, backend: str | None, is_json: bool) -> int:
    """Run the demo.

    Args:
        rounds: How often all faults are injected, one round after the other.
        backend: Device to open, ``None`` for the best one.
        is_json: Print one JSON document and nothing else.

    Returns:
        0 if every check holds, else 1.

    Raises:
        InputError: The backend cannot be used.
        InterruptError: A signal ended the run.
        AccelError, ActorError: The demo failed.
    """
    document: dict[str, object] = dict.fromkeys(("command", "version", "ok", "exit_code", "error", "device"))

    def render(code: int, error: str | None) -> str:
        ours = {"command": "demo", "version": ta.__version__}
        ours |= {"ok": code == 0, "exit_code": code, "error": error}
        return json.dumps({**document, **ours}, allow_nan=False, indent=2)

    job = partial(_run, rounds, backend, document, make_console(is_quiet=is_json))
    return run_for_json(job, render) if is_json else run_async(job)


async def _run(rounds: int, backend: str | None, document: dict[str, object], console: Console) -> int:
    async with ta.open_system("demo") as system:
        async with await _open_device(system, backend) as device:
            info = device.info
            document.update(device=info.name, backend=info.backend, description=info.description)
            where = f"{info.name} (in a worker process), {info.description}"
            print_line(console, f"[bold]{escape(f'trio-accel {ta.__version__} on {where}')}[/]\n")
            screen = _Screen(console=console, system=system)
            report = await _recover(system, device, rounds, screen)
        checks = report.checks()
        found = [{**as_json(check), "ok": check.is_ok} for check in checks]
        document.update(summary=report.summarize(), checks=found, failed=report.failed, **as_json(report))
        _print(console, report, checks)
    return int(not all(check.is_ok for check in checks))


async def _open_device(system: ta.System, backend: str | None) -> ta.Device:
    options = ta.DeviceOptions(
        isolation="process",
        close_grace=_CLOSE_GRACE,
        intensity=_INTENSITY,
        backoff=_BACKOFF,
        stuck_after=_STUCK_AFTER,
    )
    try:
        return await system.open_device(backend, options=options)
    except (ta.NotSupportedError, ValueError) as error:
        # The error of a device that is there advises an isolation that the demo does not have.
        device = error.device if isinstance(error, ta.NotSupportedError) else None
        why = f"the demo kills worker processes, and {device} has none here"
        raise InputError(
            why if device else f"cannot open a device: {str(error).removeprefix('spec: ')}"
        ) from error


async def _recover(system: ta.System, device: ta.Device, rounds: int, screen: _Screen) -> Report:
    """Ask, break, ask on; then compare."""
    start = trio.current_time()
    left_out = _OF_KERNELS if device.info.backend == "cpu" else set[str]()
    faults = rounds * [fault for fault in _FAULTS if fault.name not in left_out]
    async with trio.open_nursery() as drawing:
        if can_move(screen.console):
            drawing.start_soon(screen.draw_on)
        screen.doing = "putting arrays"
        refs = [await device.put(await in_thread(_elements, dtype)) for dtype in _DTYPES]
        hashes = [await _hash(ref) for ref in refs]
        load = await Load.prepare(device)
        before = str(system.tree())
        async with trio.open_nursery() as asking:
            for _ in range(_CLIENTS):
                asking.start_soon(load.ask_on)
            for number, fault in enumerate(faults, 1):
                await load.wait_settled(_BETWEEN)
                screen.doing = f"{number} of {len(faults)}: {fault.text}, {len(load.fates)} requests"
                screen.reports.append(await _break(fault, load))
            await load.wait_settled(_BETWEEN)
            load.is_over = True
        screen.doing = "comparing the hashes of arrays"
        arrays = [
            ArrayReport(dtype=dtype, nbytes=ref.nbytes, sha256_before=hashed, sha256_after=await _hash(ref))
            for dtype, ref, hashed in zip(_DTYPES, refs, hashes, strict=True)
        ]
        drawing.cancel_scope.cancel(reason="everything has been seen")
    return Report(
        seconds=round(trio.current_time() - start, 6),
        requests=load.asked,
        faults=screen.reports,
        arrays=arrays,
        tree_before=before,
        tree_after=str(system.tree()),
        fates=load.fates,
    )


@attrs.define(kw_only=True, eq=False)
class _Screen:
    """What goes on, drawn while it does on a terminal that can."""

    console: Console
    system: ta.System
    doing: str = ""
    reports: list[FaultReport] = attrs.field(factory=list[FaultReport])
    _spinner: Spinner = attrs.field(factory=lambda: Spinner("dots", style="cyan"))

    async def draw_on(self) -> None:
        """Draw until it is cancelled; nothing of it stays."""
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                self._spinner.update(text=_cut(self.doing))
                tree = _tree(str(self.system.tree()))
                live.update(Group(_faults(self.reports), Text(), self._spinner, Text(), tree), refresh=True)
                await trio.sleep(_REFRESH_SECONDS)


def _cut(lines: str) -> Text:
    """Lines that end where the terminal does: one that went on below would break a tree."""
    return Text(lines, no_wrap=True, overflow="ellipsis")


def _tree(lines: str) -> RenderableType:
    return Padding(_cut(lines), (0, 0, 0, 2))


def _print(console: Console, report: Report, checks: Sequence[Check]) -> None:
    is_ok = all(check.is_ok for check in checks)
    title = f"{_mark(is_ok)} [bold]recover[/]  {report.summarize()} [dim]({report.seconds:.1f} s)[/]"
    print_line(console, title)
    after = f"after {count_of(len(report.faults), 'fault')}, {_CLIENTS} requests under way all the time"
    parts: list[RenderableType] = [
        Text("before", style="dim"),
        _tree(report.tree_before),
        Text(after, style="dim"),
        _tree(report.tree_after),
        Text(),
        _faults(report.faults),
        Text(),
    ]
    if report.failed:
        errors = ", ".join(f"{count} {name}" for name, count in sorted(report.failed.items()))
        parts += [Text(f"errors: {errors}"), Text()]
    parts += [_arrays(report.arrays), Text()]
    parts += [Text.from_markup(f"{_mark(check.is_ok)} {check.name}: {check}") for check in checks]
    console.print(Padding(Group(*parts), (0, 0, 1, 2)))
    failed = sum(not check.is_ok for check in checks)
    told = f"[bold red]{failed} of {len(checks)} checks failed[/]"
    console.print(f"[bold green]all {len(checks)} checks hold[/]" if is_ok else told)


def _mark(is_ok: bool) -> str:
    return "[green]✓[/]" if is_ok else "[bold red]✗[/]"


def _grid(*headings: str) -> Table:
    """Make a table with a line below its head; ``>`` in front of a heading puts its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _faults(faults: Sequence[FaultReport]) -> Table:
    """Describe the broken parts, and how long that was felt."""
    table = _grid("fault", "generation", ">failed", ">next right product")
    for one in faults:
        recovery = "never" if one.recovery_ms is None else f"after {one.recovery_ms:.1f} ms"
        generations = f"{one.generation_before} → {one.generation_after}"
        table.add_row(one.text, generations, str(one.failed), recovery)
    return table


def _arrays(arrays: Sequence[ArrayReport]) -> Table:
    """Describe the contents of the arrays before and after."""
    table = _grid("array", ">MiB", "SHA-256 before", "SHA-256 after", "")
    for one in arrays:
        hashes = [(text or "lost")[:_DIGITS] for text in (one.sha256_before, one.sha256_after)]
        became = "[green]identical[/]" if one.is_identical else "[bold red]lost or changed[/]"
        table.add_row(one.dtype, f"{one.nbytes / 2**20:.0f}", *hashes, became)
    return table
