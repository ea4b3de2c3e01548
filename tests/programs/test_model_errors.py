"""Each row about a method, or about a service, in the table of failures is true."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from chosen import ROOT
from failing_program import Fails, Neighbour
from pages import blocks

import trio_accel as ta
from trio_accel.patterns import Batcher, RateLimit, RateLimitError, Submit

PAGE = ROOT / "docs" / "guide" / "failures.md"
OPTIONS = ta.DeviceOptions(isolation="process", retry=1, stuck_after=4.0)
TABLE = PAGE.read_text(encoding="utf-8").partition("## The table")[2].partition("\n## ")[0]
METHOD = "A method "
# The first cell of each row, and the others of it.
ROWS = {
    cells[0].strip().removeprefix(METHOD): [cell.strip() for cell in cells[1:]]
    for line in TABLE.splitlines()
    if line.startswith("| ") and (cells := line[1:-1].split("|"))
}
X = np.array([1.0, 2.0])
DOUBLED, HALVED = [2.0, 4.0], [0.5, 1.0]


def answer(error: Exception) -> int:
    """The status that the page's function gives."""
    names: dict[str, Any] = {}
    (program,) = (block for block in blocks(PAGE) if "def status" in block.text)
    exec(program.text, names)
    status: int = names["status"](error)
    return status


@attrs.frozen(kw_only=True)
class Case:
    """The events of a row.

    Attributes:
        row: How it begins on the page.
        how: The argument of the method.
        method: Which one.
        error: Class of the caller's error.
        cause: Class of its cause; None if it is not looked at.
        neighbour: Result of another program in flight, or the class of its error.
        behind: Result of a later call of the same program, or the class of its error.
        restarts: The restarts of only the program.
        losses: How often the context was lost.
        is_damaged: Whether the state is damaged.
        totals: The state after a further `add`, where it is not damaged.
    """

    row: str
    how: str
    error: type[Exception]
    method: Callable[..., Any] = Fails.double
    cause: type[Exception] | None = None
    neighbour: object = HALVED
    behind: object = DOUBLED
    restarts: int = 0
    losses: int = 0
    is_damaged: bool = False
    totals: tuple[float, float] = (1.0, 2.0)


ENDS = "ends its process each time it runs"
UNDECLARED = "that updates arrays raises any other error"
CASES = [
    Case(row="raises `Refused`", how="refused", error=ta.programs.Refused),
    Case(row="raises `Refused`", how="declared", error=ValueError),
    Case(
        row="that updates arrays raises `Refused",
        how="unchanged",
        method=Fails.add,
        error=ta.programs.Refused,
    ),
    Case(
        row="raises an undeclared error",
        how="undeclared",
        error=ta.ActorFailedError,
        cause=KeyError,
        restarts=1,
    ),
    Case(row="raises `SystemExit`", how="exit", error=ta.ActorFailedError, restarts=1),
    Case(row="raises `SystemExit`", how="interrupt", error=ta.ActorFailedError, restarts=1),
    Case(row="returns a dtype", how="wrong", error=ta.ActorFailedError, cause=TypeError, restarts=1),
    *(
        Case(
            row=UNDECLARED,
            how=how,
            method=Fails.add,
            error=ta.ActorFailedError,
            cause=cause,
            behind=ta.InputFailedError,
            restarts=1,
            is_damaged=True,
        )
        # If arrays are updated, a declared error is not a refusal, and `Refused` without `unchanged` neither.
        for how, cause in (("undeclared", KeyError), ("declared", ValueError), ("refused", None))
    ),
    Case(row="raises `MemoryError`", how="memory", error=ta.OutOfMemoryError, cause=MemoryError),
    *(
        Case(
            row=ENDS,
            how=how,
            error=ta.ContextLostError,
            neighbour=ta.ContextLostError,
            behind=ta.ContextLostError,
            losses=2,
        )
        for how in ("killed", "crash", "left")
    ),
    Case(
        row="that updates arrays ends its process",
        how="killed",
        method=Fails.add,
        error=ta.ContextLostError,
        behind=ta.InputFailedError,
        losses=1,
        is_damaged=True,
    ),
    Case(row="causes a GPU fault", how="fault", error=ta.ContextPoisonedError, losses=1),
    Case(row="does not return", how="hang", error=ta.CompletionTimeoutError, losses=1),
    Case(
        row="exceeds the caller's deadline",
        how="slow",
        method=Fails.add,
        error=trio.TooSlowError,
        totals=(2.0, 4.0),
    ),
]


class Lab:
    """A device with the two programs, and the outcomes of callers."""

    def __init__(
        self, device: ta.Device, failing: ta.programs.Program[Fails], other: ta.programs.Program[Neighbour]
    ) -> None:
        self.device, self.failing, self.other = device, failing, other
        self.got: dict[str, Any] = {}

    async def ask(self, name: str, ask: Callable[[], Awaitable[ta.AccelRef | None]]) -> None:
        try:
            result = await ask()
            self.got[name] = None if result is None else (await result.to_host()).tolist()
        except (ta.AccelError, ta.ActorError, ValueError, trio.TooSlowError) as error:
            self.got[name] = error

    async def fail(self, case: Case) -> None:
        """Ask for a failing call, with a concurrent one and a later one."""
        how = "" if case.how == "fault" else case.how
        if case.how == "fault":
            operation = self.failing.operation(Fails.double)
            ta.testing.inject_fault(self.device, operation, poison=True, repeat=True)

        async def asker() -> Any:
            with trio.fail_after(0.7 if how == "slow" else 40.0):
                return await self.failing.ask(case.method, X, how)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ask, "neighbour", lambda: self.other.ask(Neighbour.half, X))
            await trio.testing.wait_all_tasks_blocked(0.02)
            nursery.start_soon(self.ask, "asker", asker)
            await trio.testing.wait_all_tasks_blocked(0.005)
            nursery.start_soon(self.ask, "behind", lambda: self.failing.ask(Fails.double, X, ""))


def is_as_told(got: object, told: object) -> bool:
    return type(got) is told if isinstance(told, type) else got == told


async def open_lab(system: ta.System, options: ta.DeviceOptions) -> Lab:
    device = await system.open_device("cpu", options=options)
    failing = await ta.open_program(device, Fails, await device.zeros(2), backoff=ta.Backoff(base=0.0))
    lab = Lab(device, failing, await ta.open_program(device, Neighbour))
    # Modules are imported, and libraries open.
    await lab.failing.ask(Fails.double, X, "")
    await lab.other.ask(Neighbour.half, X)
    return lab


def row(beginning: str) -> tuple[str, ...]:
    (cells,) = (cells for first, cells in ROWS.items() if first.startswith(beginning))
    return tuple(cells)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method.__name__}-{case.how}")
async def test_a_row_is_true(system: ta.System, case: Case) -> None:
    cells = row(case.row)
    lab = await open_lab(system, OPTIONS)
    restarted: list[str] = []

    def observe(event: ta.Event) -> None:
        if isinstance(event, ta.ActorRestarted) and event.path.endswith("/program"):
            restarted.append(event.path)

    with system.subscribe(observe):
        await lab.fail(case)
        got, device, failing = lab.got, lab.device, lab.failing
        assert type(got["asker"]) is case.error, got
        assert case.cause is None or type(got["asker"].__cause__) is case.cause
        assert is_as_told(got["neighbour"], case.neighbour), got
        assert is_as_told(got["behind"], case.behind), got
        assert getattr(got["asker"], "is_to_blame", False) is (case.how == "fault")
        assert failing.is_damaged is case.is_damaged
        await lab.ask("later", lambda: failing.ask(Fails.add, X, ""))
        if case.is_damaged:
            assert type(got["later"]) is ta.StaleRefError
            assert answer(got["later"]) == int(row("An array is released, lost or damaged")[-1])
            await failing.reset(totals=np.zeros(2))
            assert await failing.ask(Fails.add, X, "") is None
        else:
            assert got["later"] is None
    assert (device.generation - 1, len(restarted)) == (case.losses, case.restarts)
    # And the page documents it.
    assert answer(got["asker"]) == int(cells[-1])
    if cells[0] != "that error":
        assert f"`{case.error.__name__}`" in cells[0].replace("trio.", "")
    assert bool(case.losses) is ("worker" in cells[2])
    assert bool(case.restarts) is cells[2].startswith("the program")
    assert ("twice" in cells[2]) is (case.losses == 2)
    assert ("damaged" in cells[2]) is case.is_damaged
    assert isinstance(case.neighbour, type) is ("in flight at both losses `ContextLostError`" in cells[1])
    if isinstance(case.behind, type) and case.is_damaged:
        assert f"`{case.behind.__name__}`" in cells[1]


async def test_statements_about_the_state_are_true(system: ta.System) -> None:
    """A call continues after its caller has left, and a refused update has changed nothing."""
    for case in CASES:
        if case.how in ("slow", "unchanged"):
            lab = await open_lab(system, OPTIONS)
            totals = await lab.device.zeros(2)
            await lab.failing.reset(totals=totals)
            await lab.fail(case)
            await lab.failing.ask(Fails.add, X, "")
            assert tuple((await totals.to_host()).tolist()) == case.totals
            await lab.device.close()


async def test_a_program_that_fails_too_often_has_ended_until_it_is_reset(system: ta.System) -> None:
    cells = row("fails more often than `intensity=`")
    async with system.open_device("cpu", options=OPTIONS) as device:
        failing = await ta.open_program(
            device, Fails, np.zeros(2), intensity=ta.Intensity(restarts=1), backoff=ta.Backoff(base=0.0)
        )
        other = await ta.open_program(device, Neighbour)
        for _ in range(2):
            with pytest.raises(ta.ActorFailedError, match="crashed while serving"):
                await failing.ask(Fails.double, X, "undeclared")
        for _ in range(2):
            with pytest.raises(ta.ActorFailedError, match="has ended for good") as caught:
                await failing.ask(Fails.double, X, "")
            assert answer(caught.value) == int(cells[-1])
        assert (await (await other.ask(Neighbour.half, X)).to_host()).tolist() == HALVED
        await failing.reset()
        assert (await (await failing.ask(Fails.double, X, "")).to_host()).tolist() == DOUBLED
        assert device.generation == 1


async def test_without_retry_all_in_flight_are_lost(system: ta.System) -> None:
    lab = await open_lab(system, attrs.evolve(OPTIONS, retry=0))
    await lab.fail(Case(row=ENDS, how="killed", error=ta.ContextLostError))
    assert {type(lab.got[name]) for name in ("asker", "neighbour")} == {ta.ContextLostError}
    assert (await (await lab.failing.ask(Fails.double, X, "")).to_host()).tolist() == DOUBLED
    assert lab.device.generation == 2


async def test_errors_before_a_method_is_called(system: ta.System) -> None:
    lab = await open_lab(system, OPTIONS)
    wrong, limited = row("A wrong argument"), row("A client exceeds its")
    full, lost = row("The mailbox of a [`Batcher`]"), row("More losses than")
    calls: list[tuple[Callable[[], Awaitable[object]], type[Exception], tuple[str, ...]]] = [
        (lambda: lab.failing.ask("double", X), TypeError, wrong),
        (lambda: lab.failing.ask("double", X, "", "too many"), TypeError, wrong),
    ]

    async def model(batch: list[float]) -> list[float]:
        await trio.sleep_forever()
        return batch

    limit = RateLimit(rate=0.001, burst=1.0)
    assert limit.try_acquire()
    calls.append((lambda: limit.wrap(model, wait=False)([1.0]), RateLimitError, limited))
    batcher = await system.spawn(Batcher[float, float], model, capacity=1)
    calls.append((lambda: batcher.ask(Submit(1.0)), ta.MailboxFullError, full))
    async with trio.open_nursery() as nursery:
        # One is with the model, and one waits.
        for _ in range(2):
            nursery.start_soon(batcher.ask, Submit(1.0))
            await trio.testing.wait_all_tasks_blocked()
        for call, error, cells in calls:
            with pytest.raises(error) as caught:
                await call()
            assert answer(caught.value) == int(cells[-1])
            assert f"`{error.__name__}`" in cells[0]
        nursery.cancel_scope.cancel()
    await batcher.stop()

    device = await system.open_device(
        "cpu", options=attrs.evolve(OPTIONS, retry=0, intensity=ta.Intensity(0))
    )
    failing = await ta.open_program(device, Fails, np.zeros(2))
    with pytest.raises(ta.ContextLostError):
        await failing.ask(Fails.double, X, "killed")
    with pytest.raises(ta.DeviceLostError) as gone:
        await failing.ask(Fails.double, X, "")
    assert answer(gone.value) == int(lost[-1])


def test_every_row_has_a_test() -> None:
    tested = [case.row for case in CASES] + ["fails more often than `intensity=`"]
    rows = re.findall(rf"^\| {METHOD}(.+?) \|", TABLE, re.MULTILINE)
    assert len(rows) > 10
    assert [first for first in rows if not first.startswith(tuple(tested))] == []
