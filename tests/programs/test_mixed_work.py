"""Work of all kinds on one device, at once and with faults, against a model in NumPy.

The arrays hold integers, so results are exact. The model knows the replies to the callers, and no more. A
step that succeeds has run once. A step that fails has not run, or has damaged its targets. A step that was
cancelled, or whose context was lost, has run or has not: each is a world of its own. Some world must agree
with the findings.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_code import Host, Mixed, mix, plus, total

import trio_accel as ta
from trio_accel import graphs, linalg
from trio_accel.backends.base import Isolation
from trio_accel.testing import inject_fault

pytestmark = pytest.mark.skipif(
    BACKEND == "cuda" and not IS_STAND_IN, reason="its program has NumPy write to the memory of the device"
)

# Tools that make NumPy arrays of a GPU's host-visible memory are installed.
sys.path.append(str(Path(__file__).parents[1] / "devices"))

SIZE, SLOTS = 5, 5
STATE, CONSTANT = 0, 1
LARGE = 1 << 30
MANY = {"intensity": ta.Intensity(10**6, 60.0), "backoff": ta.Backoff(initial=0.0, base=0.0, jitter=0.0)}
FAILURES = (
    ta.ContextLostError,
    ta.InputFailedError,
    ta.StaleRefError,
    ta.LibraryError,
    ta.ActorFailedError,
)

World: TypeAlias = dict[int, Host]


@attrs.frozen
class Step:
    """One thing to do.

    Attributes:
        kind: The kind of step.
        x: Slot of the array to read.
        y: Slot of the array to change, if any.
        leaves: The number of loop turns before the caller is cancelled; None for never.
    """

    kind: str
    x: int
    y: int
    leaves: int | None


@attrs.frozen
class Kind:
    """The effect of a step.

    Attributes:
        ask: Asks for it: gets the work, x and y.
        becomes: The new value of y, from a world, x and y; None if no array changes.
        replies: The contents of the reply, from the same; None if they are not looked at.
        name: Of the operation that a fault hits; empty for none.
        targets: Slots that y may be.
        is_told_later: Whether the reply needs a second operation. So a call that ran may fail. If it changes
            nothing, it may run again, with the contents of the arrays by then.
    """

    ask: Callable[[Work, Any, Any], Awaitable[Any]]
    becomes: Callable[[World, Host, Host], Host] | None = None
    replies: Callable[[World, Host, Host], Any] | None = None
    name: str = ""
    targets: tuple[int, ...] = tuple(range(SLOTS))
    is_told_later: bool = False


async def _replace(work: Work, x: ta.AccelRef, y: ta.AccelRef) -> None:
    """Another array in its place: earlier operations still have the old one."""
    (slot,) = [slot for slot, ref in enumerate(work.refs) if ref is y]
    work.refs[slot] = work.fresh.pop()
    y.release()


async def _lease(work: Work, x: ta.AccelRef, y: ta.AccelRef) -> None:
    async with y.lease(write=True) as array:
        np.add(array, 3.0, out=array)


async def _copied(work: Work, x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await x.copy()


KINDS = {
    "axpy": Kind(lambda _, x, y: linalg.axpy(2.0, x, y), lambda _, x, y: 2 * x + y, None, "linalg.Axpy"),
    "fill": Kind(lambda _, x, y: y.fill(4.0), lambda _, x, y: np.full(SIZE, 4.0), None, "devices.Fill"),
    "copy": Kind(_copied, None, lambda _, x, y: x, "devices.Copy"),
    "kernel": Kind(lambda _, x, y: mix(SIZE, 3.0, x, y), lambda _, x, y: 3 * x - y, None, "jit.mix"),
    "plus": Kind(lambda _, x, y: plus(x, y), None, lambda _, x, y: 2 * x + y, "jit.plus"),
    "in place": Kind(lambda _, x, y: plus(x, y, out=y), lambda _, x, y: 2 * x + y, None, "jit.plus"),
    "total": Kind(lambda _, x, y: total(x), None, lambda _, x, y: x.sum(), "jit.total"),
    "graph": Kind(
        lambda work, x, y: work.graph(x, y),
        lambda world, x, y: x - (y + 2 * world[CONSTANT]),
        lambda world, x, y: 3 * x - (y + 2 * world[CONSTANT]),
        "graphs.Replay",
        tuple({*range(SLOTS)} - {CONSTANT}),
    ),
    "add": Kind(
        lambda work, x, y: work.program.ask(Mixed.add, x),
        lambda _, x, y: y + x,
        None,
        "mixed_code.Mixed.add",
        (STATE,),
    ),
    "add to": Kind(
        lambda work, x, y: work.program.ask(Mixed.add_to, x, y),
        lambda _, x, y: y + x,
        lambda _, x, y: (y + x).sum(),
        "mixed_code.Mixed.add_to",
        tuple({*range(SLOTS)} - {STATE}),
        is_told_later=True,
    ),
    "sum": Kind(
        lambda work, x, y: work.program.ask(Mixed.sum, x),
        None,
        lambda world, x, y: x + world[STATE],
        "mixed_code.Mixed.sum",
    ),
    "sum of any": Kind(
        lambda work, x, y: work.program.ask(Mixed.sum_of_any, x),
        None,
        lambda world, x, y: x + world[STATE],
        "mixed_code.Mixed.sum_of_any.fetch",
        is_told_later=True,
    ),
    "breaks": Kind(
        lambda work, x, y: work.program.ask(Mixed.breaks, y),
        lambda _, x, y: y,
        None,
        "mixed_code.Mixed.breaks",
        tuple({*range(SLOTS)} - {STATE}),
    ),
    "replace": Kind(_replace, lambda _, x, y: np.arange(SIZE) * 1.0, None, "", (2, 3, 4)),
    "lease": Kind(_lease, lambda _, x, y: y + 3.0),
}
if BACKEND != "cpu":
    del KINDS["lease"]


@attrs.define(eq=False)
class Work:
    """A device with arrays, a program and a graph, and their possible contents.

    Attributes:
        device: The device.
        program: Its state is the array of one slot.
        graph: Its constant belongs to another.
        refs: The arrays of the slots.
        fresh: Arrays that replace others.
        worlds: The possible contents of the slots.
        suspects: Slots with possibly damaged arrays.
        kinds: The step kinds of the last burst.
    """

    device: ta.Device
    program: Any = None
    graph: Any = None
    refs: list[ta.AccelRef] = attrs.field(factory=list[ta.AccelRef])
    fresh: list[ta.AccelRef] = attrs.field(factory=list[ta.AccelRef])
    worlds: list[World] = attrs.field(factory=list[World])
    suspects: set[int] = attrs.field(factory=set[int])
    kinds: set[str] = attrs.field(factory=set[str])

    async def begin(self) -> None:
        """Make everything."""
        device, hosts = self.device, [np.arange(SIZE) + 10.0 * slot for slot in range(SLOTS)]
        self.refs = [await device.put(host) for host in hosts]
        self.worlds = [dict(enumerate(hosts))]
        opening: Any = ta.open_program
        self.program = await opening(device, Mixed, self.refs[STATE], **MANY)
        constant = self.refs[CONSTANT]

        async def chain(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
            await linalg.axpy(2.0, constant, y)
            await mix(SIZE, 1.0, x, y)
            return await plus(x, y)

        x, y = await device.zeros(SIZE), await device.zeros(SIZE)
        self.graph = await graphs.capture(device, chain, x, y)
        # A request for an unopened library waits for the opening, and is handed over afterwards.
        await chain(x, y)
        await self.graph(x, y)

    async def end(self) -> None:
        """Let go of everything."""
        if self.graph is not None:
            self.graph.close()
        if self.program is not None:
            await self.program.aclose()
        self.refs.clear()

    async def burst(self, steps: list[Step], fault: tuple[str, str] | None) -> None:
        """Ask for all steps in their order without a wait in between; then look at all that there is."""
        self.fresh = [
            await self.device.put(np.arange(SIZE) * 1.0) for step in steps if step.kind == "replace"
        ]
        injected = None if fault is None else _inject(self.device, *fault)
        outcomes: list[Any] = [None] * len(steps)
        turns = [trio.Event() for _ in range(len(steps) + 1)]
        turns[0].set()
        with trio.fail_after(60):
            try:
                async with trio.open_nursery() as nursery:
                    for number, step in enumerate(steps):
                        nursery.start_soon(self._run, step, number, turns, outcomes)
            finally:
                if injected is not None:
                    injected.remove()
            # A program may still be made again when the next burst begins.
            before, self.kinds = self.kinds, {step.kind for step in steps}
            kinds = self.kinds | (before & {"breaks"})
            for step, outcome in zip(steps, outcomes, strict=True):
                await self._follow(step, outcome, kinds, has_fault=fault is not None)
            await self._check()

    async def _run(self, step: Step, number: int, turns: list[trio.Event], outcomes: list[Any]) -> None:
        await turns[number].wait()
        # Its turn comes when this one has handed its operation over.
        turns[number + 1].set()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                if step.leaves is not None:
                    nursery.start_soon(_cancel_after, scope, step.leaves)
                try:
                    ask = KINDS[step.kind].ask
                    outcomes[number] = await ask(self, self.refs[step.x], self.refs[step.y])
                except FAILURES as error:
                    outcomes[number] = error
                nursery.cancel_scope.cancel()
        if scope.cancelled_caught:
            outcomes[number] = scope

    async def _follow(self, step: Step, outcome: Any, kinds: set[str], *, has_fault: bool) -> None:
        """Let the worlds do what a step has done."""
        kind, worlds, breaks = KINDS[step.kind], self.worlds, "breaks" in kinds
        after = worlds
        if kind.becomes is not None:
            after = [{**world, step.y: kind.becomes(world, world[step.x], world[step.y])} for world in worlds]
        if isinstance(outcome, (Exception, trio.CancelScope)):
            is_ours = step.kind == "breaks"
            if isinstance(outcome, Exception):
                may_fail = has_fault or is_ours or bool(self.suspects) or (kind.is_told_later and breaks)
                # A queued request finds out that its array was released.
                is_released = "replace" in kinds and "was released" in str(outcome)
                assert may_fail or is_released, (step, outcome)
                assert is_ours or not isinstance(outcome, ta.ActorFailedError), (step, outcome)
            if kind.becomes is not None:
                self.suspects.add(step.y)
                # Work in flight when its context was lost may have run, and others may have seen it.
                may_have_run = (trio.CancelScope, ta.ContextLostError)
                if isinstance(outcome, may_have_run) or kind.is_told_later:
                    self.worlds = [*worlds, *after]
            return
        assert step.kind != "breaks"
        self.worlds = after
        runs_again = kind.is_told_later and kind.becomes is None and (has_fault or breaks)
        if kind.replies is not None and not runs_again:
            reply = await _read(outcome)
            replies = [kind.replies(world, world[step.x], world[step.y]) for world in worlds]
            pairs = zip(after, replies, strict=True)
            self.worlds = [world for world, expected in pairs if np.array_equal(expected, reply)]
            assert self.worlds, (step, reply, replies)
        if kind.becomes is not None and "fill" not in kinds:
            # Had the array been damaged, this would have failed. A fill does not look at it, and does not
            # make it usable again.
            self.suspects.discard(step.y)

    async def _check(self) -> None:
        damaged: list[int] = []
        for slot, ref in enumerate(self.refs):
            try:
                held = await ref.to_host()
            except (ta.StaleRefError, ta.InputFailedError):
                # Its producer may still be in flight, without its caller.
                if slot not in self.suspects:
                    raise
                damaged.append(slot)
                continue
            expected = [world[slot] for world in self.worlds]
            self.worlds = [world for world in self.worlds if np.array_equal(world[slot], held)]
            assert self.worlds, (slot, held, expected)
            if np.abs(held).max() > LARGE:
                await ref.fill(1.0)
                self.worlds[0][slot] = np.ones(SIZE)
        self.suspects.clear()
        del self.worlds[1:]
        if {STATE, CONSTANT} & {*damaged}:
            # Program and graph are of no use without them.
            await self.end()
            await self.begin()
            return
        for slot in damaged:
            self.worlds[0][slot] = np.ones(SIZE)
            self.refs[slot] = await self.device.put(np.ones(SIZE))


async def _cancel_after(scope: trio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def _read(reply: Any) -> Any:
    if isinstance(reply, (tuple, list)):
        (reply,) = reply
    return await reply.to_host() if isinstance(reply, ta.AccelRef) else reply


def _inject(device: ta.Device, kind: str, how: str) -> Any:
    if how == "fail":
        return inject_fault(
            device, KINDS[kind].name, fail=ta.LibraryError("on purpose", library="x", code="y")
        )
    return inject_fault(device, KINDS[kind].name, **{how: True})  # type: ignore[arg-type]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from([*KINDS]))
    y = draw(st.sampled_from(KINDS[kind].targets))
    x = (y + draw(st.integers(1, SLOTS - 1))) % SLOTS
    may_leave = kind not in ("replace", "breaks")
    return Step(kind, x, y, draw(st.none() | st.none() | st.integers(0, 12)) if may_leave else None)


def bursts(hows: tuple[str, ...]) -> st.SearchStrategy[Any]:
    hit = st.sampled_from([kind for kind in KINDS if KINDS[kind].name])
    faults = st.none() | st.tuples(hit, st.sampled_from(hows))
    return st.lists(st.tuples(st.lists(steps(), max_size=12), faults), min_size=1, max_size=5)


async def search(device: ta.Device, most: int, hows: tuple[str, ...]) -> None:
    async def check(work: Any) -> None:
        mixed = Work(device)
        try:
            await mixed.begin()
            for asked, fault in work:
                await mixed.burst(asked, fault)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(10):
                await mixed.end()

    @given(work=bursts(hows))
    @settings(max_examples=most, deadline=None, derandomize=True, database=None)
    def run(work: Any) -> None:
        trio.from_thread.run(check, work)

    await trio.to_thread.run_sync(run)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("spares", [0, 1])
async def test_mixed_work_is_that_of_a_model(system: ta.System, isolation: Isolation, spares: int) -> None:
    if isolation == "inline" and spares:
        pytest.skip("spares are worker processes")
    # With a spare, suspects of a fault run again; without, the likeliest does not.
    chosen: dict[str, Any] = {"spares": spares, "retry_suspects": bool(spares), **MANY}
    options = ta.DeviceOptions(isolation=isolation, retry=1, **chosen)
    hows = ("fail",) if isolation == "inline" else ("fail", "kill", "poison", "segfault")
    async with system.open_device(BACKEND, options=options) as device:
        await search(device, 30, hows)
        assert (device.generation > 1) == (isolation == "process")
