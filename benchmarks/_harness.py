"""How benchmarks are declared, measured and judged."""

from __future__ import annotations

import enum
import gc
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import trio

from ._processors import Processors
from ._statistics import Pairs, Summary
from .rivals import RivalMissingError

if TYPE_CHECKING:
    from ._stand import Devices

__all__ = [
    "Benchmark",
    "Figure",
    "Goal",
    "Isolation",
    "Pairs",
    "Plan",
    "Result",
    "Verdict",
    "alternate",
    "first_paragraph",
    "per_call",
]

Isolation: TypeAlias = Literal["inline", "process"]


def _say_nothing(*_: object) -> None:
    """Who does not watch."""


@attrs.frozen(kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        pairs: Measurements of ours and of the peer each, taken in turns.
        warmups: Measurements of each before them, not counted.
        scale: Share of the full work per measurement.
        backend: The device to measure; None for the best one.
        patience: Seconds after which no pair of a comparison is taken once more because a processor was
            slow meanwhile (Linux); with 0 nobody looks whether one was.
        watch: Told how many of how many measurements are done; called between two of them only.
        devices: Devices that all benchmarks share; None where each opens its own.
    """

    pairs: int = 25
    warmups: int = 2
    scale: float = 1.0
    backend: str | None = None
    patience: float = 0.0
    watch: Callable[[int, int], None] = attrs.field(default=_say_nothing, eq=False, repr=False)
    devices: Devices | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def is_quick(self) -> bool:
        """Whether this is less than the full work: a look, no measurement."""
        return self.scale < 1.0

    @classmethod
    def quick(cls) -> Plan:
        """See whether everything runs; too little to trust the numbers."""
        return cls(pairs=1, warmups=0, scale=0.002)

    async def rest(self, seconds: float) -> None:
        """Let the machine settle before a measurement; a quick look does not wait."""
        await trio.sleep(0.0 if self.is_quick else seconds)

    def count(self, full: int) -> int:
        """The number of repetitions in one measurement."""
        return max(1, round(full * self.scale))


class Figure(enum.StrEnum):
    """Which number of a row a goal speaks of."""

    OURS = "ours"
    RATIO = "ratio"
    DIFFERENCE = "difference"


class Verdict(enum.StrEnum):
    """What became of a goal."""

    MET = "met"
    MISSED = "MISSED"
    NONE = "-"
    NOT_RUN = "not run"


@attrs.frozen(kw_only=True)
class Goal:
    """A bound for one figure of a row: at most `most`, or at least `least`."""

    figure: Figure
    most: float | None = None
    least: float | None = None

    def is_met(self, value: float) -> bool:
        """Whether a value lies within the bound, which itself belongs to it."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


@attrs.frozen(kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: Name of the row; that of its benchmark, with an ending if that has several.
        unit: Of `ours`, `peer` and `difference`.
        ours: Measurements of this library; None where it was not run.
        peer: Measurements of what it is compared with, if anything.
        ratio: Ours over the peer, pair by pair.
        difference: Ours less the peer, pair by pair.
        goal: The bound, if there is one.
        retaken: Pairs that do not count, because a processor was slow meanwhile.
        disturbed: Pairs that count although one was, as there was no patience left.
        reason: Why it was not run.
    """

    name: str
    unit: str = ""
    ours: Summary | None = None
    peer: Summary | None = None
    ratio: Summary | None = None
    difference: Summary | None = None
    goal: Goal | None = None
    retaken: int = 0
    disturbed: int = 0
    reason: str = ""

    @classmethod
    def compare(cls, name: str, pairs: Pairs, *, unit: str, goal: Goal | None = None) -> Result:
        """Make the row of a comparison."""
        return cls(
            name=name,
            unit=unit,
            ours=Summary.of(pairs.ours),
            peer=Summary.of(pairs.peer),
            ratio=pairs.ratio(),
            difference=pairs.difference(),
            goal=goal,
            retaken=pairs.retaken,
            disturbed=pairs.disturbed,
        )

    @property
    def verdict(self) -> Verdict:
        """Whether the median lies within the goal."""
        if self.ours is None:
            return Verdict.NOT_RUN
        if self.goal is None:
            return Verdict.NONE
        figures = {Figure.OURS: self.ours, Figure.RATIO: self.ratio, Figure.DIFFERENCE: self.difference}
        figure = figures[self.goal.figure]
        if figure is None:
            raise ValueError(
                f"{self.name}: the goal speaks of a {self.goal.figure.value}, but there is no peer"
            )
        return Verdict.MET if self.goal.is_met(figure.median) else Verdict.MISSED


@attrs.frozen
class Benchmark:
    """Something that is measured.

    Attributes:
        name: Group and name, such as ``"actors.ask"``.
        run: Measures; returns one row or several.
        isolation: Where the context of the device lives that is measured; None where there is no device.
        text: What is measured, where the docstring of `run` does not tell.
    """

    name: str
    run: Callable[[Plan], Awaitable[tuple[Result, ...]]]
    isolation: Isolation | None = None
    text: str = ""

    async def measure(self, plan: Plan) -> tuple[Result, ...]:
        """Take its rows, or one that says why it cannot be run here."""
        reason = ""
        rows: tuple[Result, ...] = ()
        try:
            rows = await self.run(plan)
        except* RivalMissingError as missing:
            error: BaseException = missing
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            reason = str(error)
        return rows if not reason else (Result(name=self.name, reason=reason),)

    @property
    def names(self) -> set[str]:
        """What it can be called: its name, its group, and its name without the isolation."""
        return {self.name, self.group, self.name.removesuffix(f"-{self.isolation}")}

    @property
    def group(self) -> str:
        """The first part of its name."""
        return self.name.partition(".")[0]

    @property
    def description(self) -> str:
        """What is measured and against what."""
        return self.text or first_paragraph(self.run)


def first_paragraph(function: Callable[..., object]) -> str:
    """The first paragraph of a function's docstring, in one line."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


async def alternate(
    ours: Callable[[], Awaitable[float]],
    peer: Callable[[], Awaitable[float]],
    plan: Plan,
    *,
    on_pair: Callable[[], None] = _say_nothing,
) -> Pairs:
    """Measure ours and a peer in turns: A B A B.

    The garbage collector runs before each measurement and never during one, for both alike.

    With `Plan.patience`, both compute on processors that nothing else slows down, as far as that can be seen,
    and a pair is taken once more where one was slow by the end of it.

    Args:
        ours: Takes one measurement of this library.
        peer: Takes one of what it is compared with.
        plan: How many.
        on_pair: Called after each pair that counts.
    """
    await trio.lowlevel.checkpoint()
    for _ in range(plan.warmups):
        await ours()
        await peer()
    mine: list[float] = []
    theirs: list[float] = []
    retaken, disturbed, patience = 0, 0, plan.patience
    processors = Processors() if patience and Processors.are_told() else None
    with _collector_off(), processors.chosen() if processors else nullcontext():
        while len(mine) < plan.pairs:
            plan.watch(len(mine), plan.pairs)
            start = time.perf_counter()
            of_ours, was_good = await _take(ours, "ours", processors)
            of_peer, is_good = 0.0, False
            if was_good or patience <= 0:
                of_peer, is_good = await _take(peer, "peer", processors)
            if is_good or patience <= 0:
                mine.append(of_ours)
                theirs.append(of_peer)
                disturbed += not (was_good and is_good)
                on_pair()
            else:
                retaken += 1
                patience -= time.perf_counter() - start
    return Pairs(ours=tuple(mine), peer=tuple(theirs), retaken=retaken, disturbed=disturbed)


async def _take(
    measure: Callable[[], Awaitable[float]], name: str, processors: Processors | None
) -> tuple[float, bool]:
    """Take a measurement, and say whether the processors that it ran on had their full speed."""
    gc.collect()
    if processors is None:
        return await measure(), True
    processors.begin(name)
    return await measure(), processors.were_good(name)


async def per_call(function: Callable[[], Awaitable[object]], calls: int) -> float:
    """Seconds that one call takes, over a number of them one after the other."""
    await trio.lowlevel.checkpoint()
    start = time.perf_counter()
    for _ in range(calls):
        await function()
    return (time.perf_counter() - start) / calls


@contextmanager
def _collector_off() -> Generator[None, None, None]:
    was_enabled = gc.isenabled()
    gc.collect()
    # What lives already (modules, mostly) is set aside, so that collecting between two measurements is quick.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
