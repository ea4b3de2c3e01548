"""Plans of kernels: made once for a layout, kept while there is room or while something uses them."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_modules import Moved, install

pytest.importorskip("cuda.bindings")

from trio_accel.backends.base import CacheCounts, LibraryError
from trio_accel.backends.base.kit.kernels import kernel
from trio_accel.backends.base.kit.library import PlanCache
from trio_accel.backends.cuda.kit._library import CudaLibrary, KernelCall, LibraryDevice, ModuleLibrary

pytestmark = pytest.mark.one_backend

only_cuda = pytest.mark.usefixtures("only_cuda")


@attrs.define(eq=False)
class Plan:
    """The result of a plan function.

    Attributes:
        way: Of which operation.
        thread: Name of the thread that made it.
        is_busy: Whether it may not be given back.
    """

    way: str
    thread: str = attrs.field(factory=lambda: threading.current_thread().name)
    is_busy: bool = False


class TestTable:
    """Needs no device and no driver."""

    def table(self, most: int) -> tuple[PlanCache, list[Any]]:
        closed: list[Any] = []
        return PlanCache(most, closed.append, lambda plan: bool(plan.is_busy)), closed

    def test_the_oldest_makes_way(self) -> None:
        table, closed = self.table(2)
        first, second, third = (Plan(way) for way in "123")
        table.store(("1",), first)
        table.store(("2",), second)
        assert table.find(("1",)) is first
        table.store(("3",), third)
        assert closed == [second]
        assert [table.find((way,)) for way in "123"] == [first, None, third]
        assert len(table) == 2

    def test_a_busy_plan_stays_until_it_is_free(self) -> None:
        table, closed = self.table(2)
        plans = [Plan(str(number), is_busy=True) for number in range(5)]
        for plan in plans:
            table.store((plan.way,), plan)
        # More than fit, as none may go.
        assert (len(table), closed) == (5, [])
        plans[1].is_busy = plans[3].is_busy = False
        last = Plan("last")
        table.store(("last",), last)
        assert closed == [plans[1], plans[3]]
        for plan in plans:
            plan.is_busy = False
        table.store(("last",), last)
        assert (len(table), closed) == (2, [plans[1], plans[3], plans[0], plans[2]])

    def test_a_plan_of_its_own_does_not_make_way(self) -> None:
        table, closed = self.table(0)
        plan = Plan("only")
        table.store(("only",), plan)
        assert (table.find(("only",)), closed) == (plan, [])

    @given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
    def test_outcomes_of_plans_are_counted(self, launched: list[int], most: int) -> None:
        """Against a model: the most recently used keys."""
        counts = CacheCounts()
        table = PlanCache(most, counts=counts)
        kept: list[int] = []
        found = made = 0
        for number in launched:
            key = (number,)
            plan = table.find(key)
            assert (plan is not None) == (number in kept)
            if plan is None:
                plan = Plan(str(number))
                table.store(key, plan)
                made += 1
            else:
                kept.remove(number)
                found += 1
            table.note_launch(plan)
            kept = [*kept, number][-most:]
        assert attrs.astuple(counts) == (found, made, made - len(kept))

    def test_all_are_given_back(self) -> None:
        table, closed = self.table(5)
        plans = [Plan("1"), Plan("2", is_busy=True)]
        for plan in plans:
            table.store((plan.way,), plan)
        table.clear()
        assert (closed, len(table)) == (plans, 0)


@attrs.define(eq=False)
class Planned:
    """A module with a kernel with plans."""

    made: list[Plan] = attrs.field(factory=list)
    used: list[Plan] = attrs.field(factory=list)
    fails: bool = False

    def plan(self, spec: Moved, device: LibraryDevice) -> Plan:
        assert isinstance(device, LibraryDevice)
        if self.fails:
            raise LibraryError("no plan", library="own", code="size")
        self.made.append(Plan(spec.way))
        return self.made[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> str:
        @kernel(Moved, backend="cuda", plan=self.plan)
        def move(spec: Moved, call: KernelCall) -> None:
            self.used.append(call.plan)
            call.convert(call.array(spec.source), call.array(spec.out))

        return install(monkeypatch, move=move)


@only_cuda
def test_a_plan_is_made_once_for_a_layout(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned()
    library = rig.library(planned.install(monkeypatch))
    specs = [Moved(rig.put(np.arange(4.0)), rig.empty((4,), "float64"), "one") for _ in range(3)]
    work = library.prepare(specs[0])
    assert (planned.made, work is None) == ([], False)
    thread = threading.Thread(target=work, name="planning")
    thread.start()
    thread.join()
    (plan,) = planned.made
    assert (plan.way, plan.thread) == ("one", "planning")
    for spec in specs:
        assert library.prepare(spec) is None
        rig.apply(library.name, spec)
        np.testing.assert_array_equal(rig.get(spec.out), np.arange(4.0))
    assert planned.used == [plan] * 3
    for other in (
        attrs.evolve(specs[0], way="two"),
        Moved(rig.put(np.arange(5.0)), rig.empty((5,), "float64"), "one"),
        Moved(rig.put(np.arange(4.0)), rig.empty((4,), "float32"), "one"),
    ):
        assert library.prepare(other) is not None
        # Nobody prepares it: then the launch does.
        rig.apply(library.name, other)
    assert len(planned.made) == 4
    assert planned.used[3:] == planned.made[1:]
    # Three launches by the first plan, and one by each of the others.
    assert attrs.astuple(rig.device.usage()[library.name].plans) == (2, 4, 0)


@only_cuda
def test_a_plan_that_cannot_be_made(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(fails=True)
    library = rig.library(planned.install(monkeypatch))
    spec = Moved(rig.put(np.arange(4.0)), rig.empty((4,), "float64"), "")
    work = library.prepare(spec)
    assert work is not None
    for attempt in (work, lambda: rig.enqueue(library.name, spec)):
        with pytest.raises(LibraryError, match="no plan") as caught:
            attempt()
        assert caught.value.device == "cuda:0"
    planned.fails = False
    rig.apply(library.name, spec)
    assert len(planned.used) == 1


@only_cuda
def test_more_plans_than_fit(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleLibrary, "most_plans", 3)
    planned = Planned()
    name = planned.install(monkeypatch)
    source, out = rig.put(np.arange(4.0)), rig.empty((4,), "float64")
    for _ in range(2):
        for number in range(5):
            rig.apply(name, Moved(source, out, str(number)))
    assert [plan.way for plan in planned.made] == list("0123401234")
    for way in "234":
        rig.apply(name, Moved(source, out, way))
    assert len(planned.made) == 10
    assert rig.library(name)._plans.__len__() == 3


class PlanningLibrary(CudaLibrary):
    """A library with resources to give back for its plans."""

    name = "planning"
    most_plans = 2

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self.closed: list[str] = []

    def _plan(self, spec: Moved, device: LibraryDevice) -> Plan:
        return Plan(spec.way)

    @kernel(Moved, backend="cuda", plan=_plan)
    def _move(self, spec: Moved, call: KernelCall) -> None:
        call.plan.is_busy = True

    def _close_plan(self, plan: Plan) -> None:
        self.closed.append(plan.way)

    def _is_busy(self, plan: Plan) -> bool:
        return plan.is_busy


@only_cuda
def test_a_library_gives_its_plans_back(rig: Any) -> None:
    with rig.device.context:
        library = PlanningLibrary(rig.device)
    assert library.operations == {Moved.operation}
    array = rig.empty((4,), "float64")
    plans = []
    for way in "abc":
        spec = Moved(array, array, way)
        library.enqueue(spec, rig.stream)
        plans.append(library._plans.find(spec.descriptor().plan_key(spec)))
    assert library.closed == []
    plans[1].is_busy = False
    library.enqueue(Moved(array, array, "d"), rig.stream)
    assert library.closed == ["b"]
    rig.finish(rig.stream)
    library.close()
    assert library.closed == ["b", "a", "c", "d"]
    library.close()
    assert len(library.closed) == 4
