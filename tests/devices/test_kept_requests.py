"""Requests by kept plans have the results of calls awaited one by one, whatever happens to the plans.

The tables have four entries, so that plans make way all the time.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest
import trio
import trio.testing
from chain_programs import outcome, step_by_step
from chosen import BACKEND
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from isolations import inline, isolated

import trio_accel as ta
from trio_accel import arrays, linalg, nn
from trio_accel.backends.base.kit import kept_plans
from trio_accel.backends.base.kit.captured_calls import GraphCall
from trio_accel.backends.base.kit.kept_chains import BoundChain
from trio_accel.backends.base.kit.kept_plans import KeptPlans
from trio_accel.devices.front._chains import Template
from trio_accel.testing import inject_fault

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning"),
]
BOUND = 4
GRAPHS = "trio_accel.graphs:GraphsActor"
Structure = Callable[[Any, Any, Any], Any]
STRUCTURES: dict[str, Structure] = {
    "number": lambda x, y, k: (x * k + y).to_host(),
    "stays": lambda x, y, k: x - y,
    "product": lambda x, y, k: (nn.relu(x @ y) * k).to_host(),
    "single": lambda x, y, k: arrays.var(x, axis=0),
    "with a host array": lambda x, y, k: (x + np.full((3, 3), k)).to_host(),
    "in place": lambda x, y, k: arrays.add(x * 0.5, 1.0, out=y),
    "several": lambda x, y, k: ta.gather(x + y, x - k),
    # A float among integers is in the key.
    "no slot": lambda x, y, k: (arrays.sign(x).cast("int32") * k).to_host(),
    # Its steps look at results in between.
    "by steps": lambda x, y, k: arrays.unique_values(x + 0.0),
    "solve": lambda x, y, k: linalg.cholesky(x @ x.T + np.eye(3) * k).to_host(),
}
if BACKEND == "cuda":
    # The stand-in lacks solvers.
    del STRUCTURES["solve"]
NAMES = st.sampled_from(sorted(STRUCTURES))
NUMBERS = st.sampled_from([0.5, -2.0, 3.0, 1e-3, 7.25, 0.0, -0.0, 1e300])
LAYOUTS = st.sampled_from(["plain", "transposed", "part", "float32"])
PLACES = st.sampled_from(["x", "y"])


class Requests(RuleBasedStateMachine):
    """A device, and each array twice: for chains, and for the calls one by one."""

    device: ClassVar[ta.Device]
    other: ClassVar[ta.Device | None]
    tables: ClassVar[list[weakref.ref[KeptPlans[Any]]]]
    reached: ClassVar[set[str]]

    @initialize()
    def begin(self) -> None:
        self.turn = 0
        self.mine: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        for place in ("x", "y"):
            self._run(self._put, place, "plain")

    def teardown(self) -> None:
        self.mine.clear()
        self.plain.clear()

    def _run(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        trio.from_thread.run(function, *args)

    async def _put(self, place: str, layout: str) -> None:
        self.turn += 1
        host = np.random.default_rng(self.turn).integers(-9, 9, (3, 3)).astype(np.float64)
        for arrays_of in (self.mine, self.plain):
            if layout == "part":
                wide = await self.device.put(np.pad(host, 1))
                arrays_of[place] = wide[1:4, 1:4]
            elif layout == "transposed":
                arrays_of[place] = (await self.device.put(np.ascontiguousarray(host.T))).T
            else:
                arrays_of[place] = await self.device.put(
                    host.astype("float32" if layout == "float32" else "f8")
                )

    def _call(self, name: str, k: float, of: dict[str, Any] | None = None) -> Any:
        of = self.mine if of is None else of
        return STRUCTURES[name](of["x"], of["y"], k)

    async def _by_steps(self, name: str, k: float) -> Any:
        return await step_by_step(self._call(name, k, self.plain))

    async def _ask(self, name: str, k: float) -> None:
        if name == "several":
            found, expected = await self._call(name, k), await self._by_steps(name, k)
            assert [await outcome(one.copy()) for one in found] == [
                await outcome(one.copy()) for one in expected
            ]
            return
        expected = await outcome(self._by_steps(name, k))
        assert await outcome(self._call(name, k)) == expected
        # The targets of updates in place are also the same.
        assert await outcome(self.mine["y"].to_host()) == await outcome(self.plain["y"].to_host())

    async def _ask_alone(self, name: str, k: float) -> None:
        with suppress(ta.AccelError, TypeError):
            await self._call(name, k)

    @rule(name=NAMES, k=NUMBERS, times=st.integers(1, 6))
    def ask(self, name: str, k: float, times: int) -> None:
        for _ in range(times):
            self._run(self._ask, name, k)

    @rule(name=NAMES, numbers=st.lists(NUMBERS, min_size=2, max_size=6))
    def ask_with_other_numbers(self, name: str, numbers: list[float]) -> None:
        for k in numbers:
            self._run(self._ask, name, k)

    @rule(place=PLACES, layout=LAYOUTS)
    def drop_and_put(self, place: str, layout: str) -> None:
        """The id of a dropped block is given again."""
        self.mine.pop(place)
        self.plain.pop(place)
        self._run(self._put, place, layout)

    @rule(place=PLACES, k=NUMBERS)
    def assign(self, place: str, k: float) -> None:
        async def assign() -> None:
            for of in (self.mine, self.plain):
                await of[place].assign(np.full((3, 3), np.float32(k % 7)))

        self._run(assign)

    @rule(count=st.integers(1, 2 * BOUND))
    def overflow(self, count: int) -> None:
        async def ask() -> None:
            for _ in range(count):
                self.turn += 1
                x = await self.device.put(np.ones(4 + self.turn))
                assert (await ((x + 1.0) * 2.0).to_host()).tolist() == [4.0] * (4 + self.turn)

        self._run(ask)

    @rule(name=NAMES, k=NUMBERS, checkpoints=st.integers(0, 12))
    def cancel(self, name: str, k: float, checkpoints: int) -> None:
        async def ask() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._ask_alone, name, k)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            # It may have run, or not.
            for place in ("x", "y"):
                await self._put(place, "plain")

        self._run(ask)

    @rule(name=NAMES, k=NUMBERS)
    def several_tasks(self, name: str, k: float) -> None:
        async def ask() -> None:
            if name in ("in place", "several"):
                return
            expected = await outcome(self._by_steps(name, k))
            found: list[Any] = []

            async def one() -> None:
                found.append(await outcome(self._call(name, k)))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one)
            assert found == [expected] * 3

        self._run(ask)

    @rule(name=st.sampled_from(sorted({"solve", "product"} & set(STRUCTURES))), k=NUMBERS)
    def two_devices(self, name: str, k: float) -> None:
        async def ask() -> None:
            if self.other is None:
                return
            expected = await outcome(self._by_steps(name, k))
            good = await self.other.put(np.eye(3))
            found: dict[int, Any] = {}

            async def one(number: int, call: Any) -> None:
                found[number] = await outcome(call)

            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one, 0, self._call(name, k))
                    nursery.start_soon(one, 1, STRUCTURES[name](good, good, 1.0))
                assert found[0] == expected
                assert found[1][0] == np.float64

        self._run(ask)

    @rule(name=st.sampled_from(["product", "number"]), k=NUMBERS)
    def fault(self, name: str, k: float) -> None:
        """While a fault waits, a chain runs by steps, and the fault hits one of them."""

        async def ask() -> None:
            for place in ("x", "y"):
                # Other dtypes would be refused before.
                await self._put(place, "plain")
            for is_chain in (True, False):
                fault = inject_fault(self.device, "linalg.Matmul", fail=ta.NotSupportedError("for the test"))
                found = await outcome(self._call(name, k) if is_chain else self._by_steps(name, k))
                fault.remove()
                assert (found[0] is ta.NotSupportedError) == (name == "product")

        self._run(ask)

    @rule()
    def close_library(self) -> None:
        self._run(self.device.close_library, GRAPHS)

    @rule()
    def lose_the_context(self) -> None:
        async def lose() -> None:
            generation = self.device.generation
            ta.testing.poison(self.device, "for the test")
            with trio.fail_after(60):
                while self.device.generation == generation:
                    await outcome(self.device.zeros(3))
            for place in ("x", "y"):
                await self._put(place, "plain")

        self._run(lose)

    @invariant()
    def holds(self) -> None:
        for table in filter(None, [each() for each in self.tables]):
            plans = list(table.plans.values())
            assert len(plans) <= table.bound
            for plan in plans:
                assert plan.in_flight == 0
                assert plan.state not in ("seen", "over")
                if isinstance(plan.key[0], GraphCall):
                    # The driver has captured a launch, which needs no recording and no binding. Only a real
                    # driver captures products.
                    assert (plan.state, plan.binding) == ("armed", None)
                    continue
                self.reached.add(plan.state)
                assert (plan.binding is not None) == (plan.state in ("bound", "armed"))
                assert (plan.value is None) == (plan.state == "refused")
                if isinstance(plan.binding, BoundChain):
                    for _, spec in plan.binding.nodes:
                        described = spec.descriptor()
                        values = list(described.values(spec))
                        assert not any(isinstance(value, np.ndarray) for value in values)
                if isinstance(plan.value, Template):
                    assert plan.value.until_joined >= 0


class Asks:
    """Counts the requests that a device's table has to do with."""

    def __init__(self, chains: Any) -> None:
        self.count = 0
        self._find, self._counts = chains._find, chains.kept.counts
        chains._find = self.find

    def find(self, chain: Any) -> Any:
        before = self.served
        plan = self._find(chain)
        # A plan without a key runs by steps, and counts nowhere.
        self.count += bool(plan.key) or self.served != before
        return plan

    @property
    def served(self) -> int:
        counts = self._counts
        return int(counts.unplanned + counts.hits + counts.recorded + counts.refused)


async def search(
    system: ta.System, isolation: ta.Isolation, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_plans, "MAX_PLANS", BOUND)
    tables: list[weakref.ref[KeptPlans[Any]]] = []
    init = KeptPlans.__init__

    def noted(self: KeptPlans[Any], *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        tables.append(weakref.ref(self))

    monkeypatch.setattr(KeptPlans, "__init__", noted)
    options = ta.DeviceOptions(
        isolation=isolation, intensity=ta.Intensity(100_000, 60.0), backoff=ta.Backoff(base=0.0)
    )
    states: set[str] = set()
    async with system.open_device(BACKEND, options=options) as device:
        asks = Asks(device.chains)  # type: ignore[attr-defined]  # an open device has them
        async with system.open_device(BACKEND, options=options, name="other") as other:
            attributes = {
                "device": device,
                "other": other if isolation == "inline" else None,
                "tables": tables,
                "reached": states,
            }
            machine: Any = type("Machine", (Requests,), attributes)
            run = settings(max_examples=most, stateful_step_count=12, deadline=None, derandomize=True)
            try:
                await trio.to_thread.run_sync(lambda: run_state_machine_as_test(machine, settings=run))
            except Flaky as error:
                # The device outlives a run, so the same steps fail earlier in the next run. The first failure
                # is the context of this error.
                raise error.__context__ or error from None
        counts = (await device.statistics()).plan_caches["application"]
        assert asks.count == asks.served == counts.unplanned + counts.hits + counts.recorded + counts.refused
        assert min(counts.unplanned, counts.hits, counts.recorded, counts.refused, counts.evicted) > 0
        device.chains.blocks.spare = None  # type: ignore[attr-defined]
        gc.collect()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0
    expected = {"recorded", "refused"}
    if isolation == "inline":
        # On the CPU only conditions leave a chain bound.
        expected.add("bound" if BACKEND == "cuda" else "armed")
    assert states == expected


@inline
async def test_any_events_in_the_life_of_a_plan(
    system: ta.System, isolation: ta.Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await search(system, isolation, 60, monkeypatch)


@isolated
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_any_events_in_the_life_of_a_plan_in_a_worker(
    system: ta.System, isolation: ta.Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await search(system, isolation, 20, monkeypatch)


@inline
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_any_events_in_the_life_of_a_plan_many_times(
    system: ta.System, isolation: ta.Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await search(system, isolation, 200, monkeypatch)
