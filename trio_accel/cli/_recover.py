"""``demo recover``: faults under load, shown live, and their effects on requests and arrays."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from statistics import median
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
from trio_accel.cli._console import as_json, can_redraw, count_of, cut, make_console, print_line
from trio_accel.cli._run import in_thread, open_device, run_async, run_for_json

# The rows and columns of an operand, and the numbers of operands and concurrent requests.
_SIZE, _OPERANDS, _CLIENTS = 64, 25, 16
# The tolerance of a float32 product and sum; it grows with the root of the term count.
_LIMIT = 1e-5 * math.sqrt(_SIZE)
# Requests that end before the first fault, between two, and after the last one.
_REQUESTS_BETWEEN_FAULTS = 25
# A fault without an effect, or without a recovery, after this number of requests counts as failed.
_MAX_REQUESTS = 500
_OPTIONS = ta.DeviceOptions(
    isolation="process",
    # Seconds that the command waits after Ctrl-C for an operation that still runs.
    close_grace=0.2,
    # The demo measures how soon the next one serves, not how long a supervisor waits after several failures.
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    # One operation hangs, and all others are much faster.
    stuck_after=2.0,
)
_REFRESH_SECONDS = 0.08
# Dtypes of the arrays that no operation uses, and the bytes of each.
_DTYPES, _NBYTES = ("float32", "float64", "complex64", "int8"), 16 << 20
_DIGITS = 12
_REASON = "injected"
# A product may be computed twice. Clients retry at once, because the demo measures how soon the next one
# serves.
_RETRY = partial(
    ta.patterns.RetryPolicy,
    attempts=5,
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    may_run_twice=True,
)
# The failures that an attempt may have: over a crash, with its context, or hung.
_FAILURES = {"ActorFailedError", "ContextLostError", "ContextPoisonedError", "CompletionTimeoutError"}


@attrs.frozen
class DemoFault:
    """A fault to inject: its name, the failing part in words, the contexts that it costs, and how."""

    name: str
    text: str
    losses: int
    inject: Callable[[ta.Device], object]


def _inject(device: ta.Device, **how: Any) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, **how)


_FAULTS = (
    DemoFault("crash", "crash of the BLAS actor", 0, partial(_inject, fail=RuntimeError(_REASON))),
    DemoFault("poison", "poison of the context", 1, partial(ta.testing.poison, reason=_REASON)),
    DemoFault("trap", "trap in a kernel", 1, partial(_inject, poison=True, how="trap")),
    DemoFault("assert", "failed assertion in a kernel", 1, partial(_inject, poison=True, how="assert")),
    DemoFault("kill", "SIGKILL to the worker process", 1, partial(_inject, kill=True, how="writing")),
    DemoFault("hang", "hang, given up after 2 s", 1, partial(_inject, hang=True, how="kernel")),
)
# Without kernels, these two are the same as the poison.
_OF_KERNELS = {"trap", "assert"}


@attrs.define(kw_only=True, eq=False)
class DemoLoad:
    """Clients that request products continuously.

    Attributes:
        lefts: The left operands on the host, float32.
        right: The common right operand, on the device.
        references: The products in float64.
        asked: The number of requests so far.
        errors: The relative errors of the received products.
        retried: The errors of attempts, with their causes; most were retried.
        failures: The errors of requests that no further attempt has helped.
        is_over: Whether clients send no new requests; current ones still end.
    """

    lefts: NDArray[np.float32]
    right: ta.AccelRef
    references: NDArray[np.float64]
    asked: int = 0
    errors: list[float] = attrs.field(factory=list[float])
    retried: list[str] = attrs.field(factory=list[str])
    failures: list[str] = attrs.field(factory=list[str])
    is_over: bool = False
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _product: Callable[[int], Awaitable[NDArray[np.float32]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        budget = ta.patterns.RetryBudget(share=1.0)
        self._product = _RETRY(budget=budget).wrap(self._attempt)

    @classmethod
    async def prepare(cls, device: ta.Device) -> DemoLoad:
        """Put the right operand, and ask once."""
        generator = np.random.default_rng(20250101)
        lefts = generator.standard_normal((_OPERANDS, _SIZE, _SIZE), np.float32)
        right = generator.standard_normal((_SIZE, _SIZE), np.float32)
        references = lefts.astype(np.float64) @ right.astype(np.float64)
        load = cls(lefts=lefts, right=await device.put(right), references=references)
        # The first product starts the library's actor, so that the tree shows it before anything fails.
        await load.ask()
        return load

    @property
    def ended(self) -> int:
        """The number of requests that got a product or an error."""
        return len(self.errors) + len(self.failures)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition that changes when requests end."""
        while not holds():
            await self._changed.park()

    async def wait_ended(self, count: int) -> None:
        """Wait until `count` further requests have ended."""
        target = self.ended + count
        await self.wait_until(lambda: self.ended >= target)

    async def ask_on(self) -> None:
        """Send one request after the other."""
        while not self.is_over:
            await self.ask()

    async def ask(self) -> bool:
        """Request a product, and return whether it is right.

        Raises:
            DeviceLostError: The device was given up; only one request raises this.
        """
        self.asked += 1
        index, is_right = self.asked % len(self.lefts), False
        try:
            host = await self._product(index)
            reference = self.references[index]
            self.errors.append(float(np.linalg.norm(host - reference) / np.linalg.norm(reference)))
            is_right = self.errors[-1] <= _LIMIT
        except (ta.ActorError, ta.AccelError) as failure:
            self.failures.append(_describe(failure))
            if isinstance(failure, ta.DeviceLostError) and not self.is_over:
                self.is_over = True
                raise
        self._changed.unpark_all()
        return is_right

    async def _attempt(self, index: int) -> NDArray[np.float32]:
        try:
            product = await ta.linalg.matmul(self.lefts[index], self.right)
            host: NDArray[np.float32] = await product.to_host()
            product.release()
        except (ta.ActorError, ta.AccelError) as failure:
            self.retried.append(_describe(failure))
            self._changed.unpark_all()
            raise
        return host


def _describe(failure: Exception) -> str:
    cause = failure.__cause__
    text = f"{type(failure).__name__}: {failure}"
    return text if cause is None else f"{text}; from {type(cause).__name__}: {cause}"


def _class_of(failure: str) -> str:
    return failure.partition(":")[0]


def _is_strange(failure: str) -> bool:
    """Return whether the faults do not cause this error, or it comes from another crash."""
    is_other_crash = _class_of(failure) == "ActorFailedError" and _REASON not in failure
    return is_other_crash or _class_of(failure) not in _FAILURES


@attrs.frozen(kw_only=True)
class Effect:
    """The effect of a fault.

    Attributes:
        fault: The name of the fault.
        text: The failing part, in words.
        losses: The number of contexts that it costs.
        generation_before: The generation of the device before it.
        generation_after: The generation that served again.
        retried: The number of failed attempts from its injection on, until the device served again.
        recovery_ms: The time from its injection to the right product of a request that was begun after its
            effect; infinite if no request was affected or none was served after it.
    """

    fault: str
    text: str
    losses: int
    generation_before: int
    generation_after: int
    retried: int
    recovery_ms: float


@attrs.frozen(kw_only=True)
class ArrayReport:
    """An array that no operation uses, before the first fault and after the last one.

    Attributes:
        dtype: Its dtype.
        nbytes: Its size in bytes.
        sha256_before: Hash of its elements before the first fault, copied to the host.
        sha256_after: The same at the end; ``"lost"`` if the array is.
    """

    dtype: str
    nbytes: int
    sha256_before: str
    sha256_after: str

    @property
    def is_identical(self) -> bool:
        """Whether its elements are as they were."""
        return self.sha256_before == self.sha256_after


def _elements(seed: int, dtype: str) -> NDArray[Any]:
    """Return random bytes, the same each time, because any bit pattern must survive. Blocking."""
    return np.frombuffer(np.random.default_rng(seed).bytes(_NBYTES), dtype)


async def _hash(ref: ta.AccelRef) -> str:
    try:
        host = await ref.to_host()
    except ta.StaleRefError:
        return "lost"
    return await in_thread(lambda: hashlib.sha256(host.data).hexdigest())


@attrs.frozen
class Check:
    """A number that must not exceed a limit; NaN exceeds every limit."""

    name: str
    value: float
    limit: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the number is within its limit."""
        return bool(self.value <= self.limit)


@attrs.define(kw_only=True, eq=False)
class Demo:
    """One run, drawn live if the terminal supports it."""

    console: Console
    system: ta.System
    device: ta.Device
    load: DemoLoad = attrs.field(init=False)
    effects: list[Effect] = attrs.field(factory=list[Effect])
    arrays: list[ArrayReport] = attrs.field(factory=list[ArrayReport])
    _spinner: Spinner = attrs.field(factory=lambda: Spinner("dots", style="cyan"))

    async def run(self, rounds: int) -> None:
        """Ask, break, ask on; then compare."""
        left_out = set[str]() if self.device.info.is_accelerator else _OF_KERNELS
        faults = rounds * [fault for fault in _FAULTS if fault.name not in left_out]
        console = self.console
        async with trio.open_nursery() as drawing:
            if can_redraw(console):
                drawing.start_soon(self._draw_on)
            self._tell("putting arrays")
            refs = [await self.device.put(await in_thread(_elements, *entry)) for entry in enumerate(_DTYPES)]
            hashes = [await _hash(ref) for ref in refs]
            self.load = await DemoLoad.prepare(self.device)
            console.print(Text("before", style="dim"), _tree(self.system))
            async with trio.open_nursery() as asking:
                for _ in range(_CLIENTS):
                    asking.start_soon(self.load.ask_on)
                for number, fault in enumerate(faults, 1):
                    await self.load.wait_ended(_REQUESTS_BETWEEN_FAULTS)
                    self._tell(f"{number} of {len(faults)}: {fault.text}, {self.load.ended} requests")
                    self.effects.append(await self._break(fault))
                await self.load.wait_ended(_REQUESTS_BETWEEN_FAULTS)
                self.load.is_over = True
            self._tell("comparing the hashes of arrays")
            for dtype, ref, old_hash in zip(_DTYPES, refs, hashes, strict=True):
                after = await _hash(ref)
                report = ArrayReport(
                    dtype=dtype, nbytes=ref.nbytes, sha256_before=old_hash, sha256_after=after
                )
                self.arrays.append(report)
            drawing.cancel_scope.cancel(reason="everything has been seen")

    async def _break(self, fault: DemoFault) -> Effect:
        """Inject a fault under load and wait until the device serves again."""
        load, generation = self.load, self.device.generation
        retried, max_ended, start = len(load.retried), load.ended + _MAX_REQUESTS, trio.current_time()
        fault.inject(self.device)
        await load.wait_until(lambda: len(load.retried) > retried or load.ended >= max_ended)
        # Requests from now on are served by the next incarnation, or context.
        is_right = False
        while not is_right and load.ended < max_ended:
            is_right = await load.ask()
        return Effect(
            fault=fault.name,
            text=fault.text,
            losses=fault.losses,
            generation_before=generation,
            generation_after=self.device.generation,
            retried=len(load.retried) - retried,
            recovery_ms=(trio.current_time() - start) * 1e3 if is_right else math.inf,
        )

    def failed(self) -> Counter[str]:
        """Count the requests that got an error, by its class."""
        return Counter(map(_class_of, self.load.failures))

    def retried(self) -> Counter[str]:
        """Count the attempts that got an error, by its class."""
        return Counter(map(_class_of, self.load.retried))

    def summarize(self) -> str:
        """Return one line for a person."""
        load, is_kept = self.load, all(array.is_identical for array in self.arrays)
        return (
            f"{count_of(len(self.effects), 'fault')}, {load.asked} requests: {len(load.errors)} completed, "
            f"{len(load.retried)} retried, {len(load.failures)} failed, "
            f"{load.asked - load.ended or 'none'} lost; "
            f"arrays {'unchanged' if is_kept else 'lost or changed'}"
        )

    def checks(self) -> tuple[Check, ...]:
        """Return everything that must hold."""
        load, effects = self.load, self.effects
        unfelt = sum(effect.recovery_ms == math.inf for effect in effects)
        wrong = sum(
            abs(effect.generation_after - effect.generation_before - effect.losses) for effect in effects
        )
        # NaN if there is one, or if there are no products.
        worst = float(np.max(load.errors or [math.nan]))
        return (
            Check("requests failed or lost", abs(load.asked - len(load.errors))),
            Check("attempts failed for another reason", sum(map(_is_strange, load.retried))),
            Check("faults not felt, or not recovered from", unfelt),
            Check("generations more or less than contexts lost", wrong),
            Check("arrays lost or changed", sum(not array.is_identical for array in self.arrays)),
            Check("relative error of every result", worst, _LIMIT),
        )

    # The terminal.

    def _tell(self, doing: str) -> None:
        self._spinner.update(text=cut(doing))

    async def _draw_on(self) -> None:
        """Draw until it is cancelled; then remove the drawing."""
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                above: list[RenderableType] = [Text(), _faults(self.effects)] if self.effects else []
                live.update(Group(*above, Text(), self._spinner, _tree(self.system)), refresh=True)
                await trio.sleep(_REFRESH_SECONDS)

    def print(self) -> None:
        """Print what happened."""
        checks, errors = self.checks(), [f"{number} {name}" for name, number in self.retried().items()]
        parts: list[RenderableType] = [_faults(self.effects), Text()]
        parts += [Text(f"retried after: {', '.join(errors)}"), Text()] if errors else []
        parts += [_arrays(self.arrays), Text()]
        for entry in checks:
            parts.append(f"{_mark(entry.is_ok)} {entry.name}: {entry.value:.3g}, allowed {entry.limit:.3g}")
        after = f"after {count_of(len(self.effects), 'fault')}, {_CLIENTS} requests under way all the time"
        self.console.print(Text(after, style="dim"), _tree(self.system))
        failed = sum(not check.is_ok for check in checks)
        print_line(self.console, f"\n{_mark(not failed)} [bold]recover[/]  {self.summarize()}")
        self.console.print(Padding(Group(*parts), (1, 0, 1, 2)))
        good = f"[bold green]all {len(checks)} checks hold[/]"
        self.console.print(f"[bold red]{failed} of {len(checks)} checks failed[/]" if failed else good)


def _tree(system: ta.System) -> RenderableType:
    return Padding(cut(str(system.tree())), (0, 0, 0, 2))


def _mark(is_ok: bool) -> str:
    return "[green]✓[/]" if is_ok else "[bold red]✗[/]"


def _grid(*headings: str) -> Table:
    """Make a table with a line below its head; ``>`` before a heading right-aligns its column."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _faults(effects: list[Effect]) -> Table:
    """Describe the faults, and the duration of each: the median of all rounds, and the longest time."""
    table = _grid("fault", ">times", ">retried", ">right again", ">at most")
    for text in dict.fromkeys(effect.text for effect in effects):
        ours = [effect for effect in effects if effect.text == text]
        times = [effect.recovery_ms for effect in ours]
        took = [
            "never" if milliseconds == math.inf else f"{milliseconds:.1f} ms"
            for milliseconds in (median(times), max(times))
        ]
        table.add_row(text, str(len(ours)), str(sum(effect.retried for effect in ours)), *took)
    return table


def _arrays(arrays: list[ArrayReport]) -> Table:
    """Describe the contents of the arrays before and after."""
    table = _grid("array", ">MiB", "SHA-256 before", "SHA-256 after", "")
    for report in arrays:
        hashes = report.sha256_before[:_DIGITS], report.sha256_after[:_DIGITS]
        became = "[green]identical[/]" if report.is_identical else "[bold red]lost or changed[/]"
        table.add_row(report.dtype, f"{report.nbytes / 2**20:.0f}", *hashes, became)
    return table


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
    document: dict[str, object] = {"command": "demo", "version": ta.__version__}

    def render(code: int, error: str | None) -> str:
        fields = {**document, "ok": code == 0, "exit_code": code, "error": error}
        return json.dumps(fields, allow_nan=False, indent=2)

    job = partial(_run, rounds, backend, document, make_console(is_quiet=is_json))
    with _without_log():
        return run_for_json(job, render) if is_json else run_async(job)


@contextmanager
def _without_log() -> Generator[None]:
    """Drop the log of devices, because the demo injects their faults and shows them itself."""
    logger = logging.getLogger("trio_accel.devices")
    level = logger.level
    # Above all levels.
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _run(rounds: int, backend: str | None, document: dict[str, object], console: Console) -> int:
    async with ta.open_system("demo") as system, await open_device(system, backend, _OPTIONS) as device:
        info = device.info
        document.update(device=info.name, backend=info.backend, description=info.description)
        target = f"{info.name} (in a worker process), {info.description}"
        print_line(console, f"[bold]{escape(f'trio-accel {ta.__version__} on {target}')}[/]\n")
        demo = Demo(console=console, system=system, device=device)
        await demo.run(rounds)
        demo.print()
    checks = demo.checks()
    document.update(
        summary=demo.summarize(),
        requests=demo.load.asked,
        failed=demo.failed(),
        retried=demo.retried(),
        checks=[{**as_json(check), "ok": check.is_ok} for check in checks],
        faults=list(map(as_json, demo.effects)),
        arrays=list(map(as_json, demo.arrays)),
    )
    return int(not all(check.is_ok for check in checks))
