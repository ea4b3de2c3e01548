"""Random steps: functions of arrays and numbers, with the events that their calls meet."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import trio
from chain_programs import ENDS, HOSTS, WRITING, N, Program, contents, outcome, programs, step_by_step
from hypothesis import strategies as st

import trio_accel as ta

# The first call makes a plan, which is computed in place after a few quick calls.
WARM = 24
LAYOUTS = ("plain", "offset", "strided", "transposed", "reversed", "one block", "same")
EVENTS = (
    *LAYOUTS,
    "numbers",
    "contents",
    "two tasks",
    "changed host",
    "cancelled",
    "deadline",
    "released",
    "assigned",
    "warm",
)
RESULTS = ("one", "tuple", "dictionary", "list with an argument")


@attrs.frozen
class Case:
    """A step, and what happens between its calls.

    Attributes:
        program: The calls that it makes.
        result: How its results are nested.
        events: The events, in this order.
        uses_closure: Whether it adds a constant from its closure.
    """

    program: Program
    result: str
    events: Sequence[str]
    uses_closure: bool

    def function(self) -> Callable[..., Any]:
        """Make the function of the step."""
        constant = np.linspace(-1.0, 1.0, N)

        def run(x: Any, y: Any, rest: Mapping[str, Any], hosts: Sequence[Any], more: float) -> Any:
            leaves = {"x": x, "y": y, **rest, **dict(zip(HOSTS, hosts, strict=True)), "more": more}
            values = self.program.values(leaves)
            if self.uses_closure:
                values[-1] = values[-1] + constant
            last = ENDS[self.program.end](values[-1])
            return {
                "one": lambda: last,
                "tuple": lambda: (last, values[0]),
                "dictionary": lambda: {"last": last, "first": [values[0]]},
                "list with an argument": lambda: [x, last],
            }[self.result]()

        return run


def cases(*, kinds: Sequence[str]) -> st.SearchStrategy[Case]:
    """Steps of these calls."""
    events = st.lists(st.sampled_from(EVENTS), min_size=2, max_size=6)
    return st.builds(Case, programs(kinds=kinds), st.sampled_from(RESULTS), events, st.booleans())


def arguments(leaves: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of the function, from the leaves of its program."""
    rest = {name: leaves[name] for name in ("view", "whole", "part")}
    return leaves["x"], leaves["y"], rest, [leaves[name] for name in HOSTS], leaves.get("more", 0.0)


async def put(program: Program, device: ta.Device, turn: int, layout: str) -> dict[str, Any]:
    """Make the leaves, of which two arrays lie in another way on the device."""
    host, leaves = program.host(turn), await program.put(device, turn)
    for name in ("x", "y"):
        leaves[name] = await _laid_out(device, host[name], layout)
    if layout == "same":
        leaves["y"] = leaves["x"]
    if layout == "one block" and host["x"].dtype == host["y"].dtype:
        both = await device.put(np.concatenate([host["y"], host["x"]]))
        leaves["x"], leaves["y"] = both[N:], both[:N]
    leaves["view"] = leaves["x"].T[::-1]
    return leaves


async def _laid_out(device: ta.Device, host: Any, layout: str) -> ta.AccelRef:
    if layout == "offset":
        return (await device.put(np.concatenate([host, host])))[N:]
    if layout == "strided":
        return (await device.put(host.repeat(2, axis=0).repeat(2, axis=1)))[::2, 1::2]
    if layout == "transposed":
        return (await device.put(np.ascontiguousarray(host.T))).T
    if layout == "reversed":
        return (await device.put(np.ascontiguousarray(host[::-1, ::-1])))[::-1, ::-1]
    return await device.put(host)


async def expected_of(case: Case, leaves: Mapping[str, Any]) -> Any:
    """The outcome of the same calls, awaited one by one."""
    made = case.function()(*arguments(leaves))
    if case.result == "one":
        return await outcome(step_by_step(made))
    operands: list[Any] = []
    _leaves(made, operands)
    return await outcome_of(step_by_step(ta.gather(*operands)))


async def outcome_of(asked: Coroutine[Any, Any, Any]) -> Any:
    """The bits of the results in their order, or the error."""
    try:
        results = await asked
    except (ta.AccelError, ValueError, TypeError) as error:
        return type(error), str(error)
    if not isinstance(results, (tuple, list, dict)):
        return await outcome(_value(results))
    found: list[Any] = []
    _leaves(results, found)
    return [await outcome(_value(each)) for each in found]


async def _value(value: Any) -> Any:
    return value


def _leaves(nested: Any, found: list[Any]) -> None:
    if isinstance(nested, (tuple, list, dict)):
        for each in nested.values() if isinstance(nested, dict) else nested:
            _leaves(each, found)
    else:
        found.append(nested)


@types.coroutine
def changed_after_a_turn(
    asked: Coroutine[Any, Any, Any], change: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Run a coroutine, and change something as soon as other tasks may run."""
    send: Callable[[Any], Any] = asked.send
    given: Any = None
    is_changed = False
    while True:
        try:
            value = send(given)
        except StopIteration as done:
            return done.value
        if not is_changed:
            is_changed = True
            change()
        try:
            given = yield value
            send = asked.send
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the coroutine gets it, and raises
            given, send = error, asked.throw


class Checker:
    """Compares the calls of a step with the same calls awaited one by one.

    Args:
        device: The device of the steps.
        case: The step.

    Attributes:
        step: The step.
    """

    def __init__(self, device: ta.Device, case: Case) -> None:
        self.step: Any = ta.step(case.function())
        self._device = device
        self._case = case
        self._turn = 0
        self._layout = "plain"
        self._mine: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        # A result that stays, and its contents: later runs do not write to it.
        self._earlier: list[tuple[Any, Any]] = []

    async def run(self) -> None:
        """Compare all calls."""
        await self._put(self._layout)
        await self._compare(WARM)
        for event in self._case.events:
            await self._meet(event)
            await self._compare()

    async def _put(self, layout: str) -> None:
        self._turn += 1
        program, self._layout = self._case.program, layout
        self._mine = await put(program, self._device, self._turn, layout)
        self._plain = await put(program, self._device, self._turn, layout)

    async def _renew(self) -> None:
        self._turn += 1
        for leaves in self._mine, self._plain:
            await self._case.program.renew(leaves, self._turn)

    def _ask(self, leaves: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        asked: Coroutine[Any, Any, Any] = self.step(*arguments(leaves))
        return asked

    async def _compare(self, runs: int = 1) -> None:
        expected = await expected_of(self._case, self._plain)
        for run in range(runs):
            if run and self._writes():
                # It may read what it has written.
                expected = await expected_of(self._case, self._plain)
            assert await outcome_of(self._ask(self._mine)) == expected, run
        assert await contents(self._mine) == await contents(self._plain)
        for result, bits in self._earlier:
            assert await outcome_of(_value(result)) == bits
        if self._case.result != "one":
            self._earlier = []
        elif isinstance(expected[0], np.dtype) and not self._writes():
            self._earlier = [(await self._ask(self._mine), expected)]
            if self._is_kept():
                self._earlier = []

    def _writes(self) -> bool:
        return not WRITING.isdisjoint(node.kind for node in self._case.program.nodes)

    def _is_kept(self) -> bool:
        """Whether the result may be a view of an argument, which later events change."""
        blocks = {self._mine[name].block for name in ("x", "y", "whole", "all")}
        result = self._earlier[0][0]
        return isinstance(result, ta.AccelRef) and result.block in blocks

    async def _meet(self, event: str) -> None:
        if event in LAYOUTS:
            await self._put(event)
        elif event == "numbers":
            for leaves in self._mine, self._plain:
                leaves["more"] = leaves.get("more", 0.0) + 0.25
        elif event == "contents":
            await self._renew()
        elif event == "warm":
            await self._compare(WARM)
        elif event == "assigned":
            for leaves in self._mine, self._plain:
                await leaves["x"].assign(leaves["y"] * 0.5)
        else:
            await getattr(self, f"_{event.replace(' ', '_')}")()

    async def _two_tasks(self) -> None:
        """Two tasks at once, with arrays of their own."""
        other = await put(self._case.program, self._device, self._turn + 100, self._layout)
        plain = await put(self._case.program, self._device, self._turn + 100, self._layout)
        for leaves in other, plain:
            leaves["more"] = 7.5
        expected = [await expected_of(self._case, each) for each in (self._plain, plain)]
        found: dict[int, Any] = {}

        async def ask(number: int, leaves: Mapping[str, Any]) -> None:
            for _ in range(1 if self._writes() else 2):
                found[number] = await outcome_of(self._ask(leaves))
                assert found[number] == expected[number]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0, self._mine)
            nursery.start_soon(ask, 1, other)
        assert await contents(other) == await contents(plain)

    async def _changed_host(self) -> None:
        """The program changes its host arrays as soon as it can."""
        hosts = [self._mine[name] for name in HOSTS]
        if not all(host.flags.writeable for host in hosts):
            return
        expected = await expected_of(self._case, self._plain)
        before = [host.copy() for host in hosts]

        def change() -> None:
            for host in hosts:
                host[...] = np.nan

        assert await outcome_of(_run(changed_after_a_turn(self._ask(self._mine), change))) == expected
        for host, old in zip(hosts, before, strict=True):
            host[...] = old

    async def _cancelled(self) -> None:
        """A step cancelled before its beginning never begins."""
        before = await contents(self._mine)
        with trio.CancelScope() as scope:
            scope.cancel()
            await self._ask(self._mine)
        assert scope.cancelled_caught
        assert await contents(self._mine) == before

    async def _deadline(self) -> None:
        """A step with a deadline is done or not, so its target is unchanged or complete."""
        before = await contents(self._mine)
        expected = await expected_of(self._case, self._plain)
        with trio.move_on_after(3e-4):
            assert await outcome_of(self._ask(self._mine)) == expected
        # A step given up while it ran has invalidated its targets.
        with suppress(ta.StaleRefError):
            assert await contents(self._mine) in (before, await contents(self._plain))
        await self._put(self._layout)

    async def _released(self) -> None:
        """An array with returned memory is refused."""
        for leaves in self._mine, self._plain:
            await leaves["y"].copy()
            leaves["y"].release()
        try:
            await self._ask(self._mine)
        except ta.StaleRefError as error:
            assert "released" in str(error)  # noqa: PT017  # the type is known
        else:
            raise AssertionError
        await self._put(self._layout)


async def _run(awaitable: Any) -> Any:
    return await awaitable
