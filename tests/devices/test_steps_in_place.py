"""Short steps are computed by their caller, if nothing could see the difference."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from step_programs import changed_after_a_turn
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.engine._in_place import InPlace

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="other backends do not compute on the host")
GRAPHS = "trio_accel.graphs:GraphsActor"
N = 16
# Runs in the thread of the stream until a place is looked for, and some for a machine with other work to do.
WARM = 200


def place_of(device: ta.Device) -> InPlace | None:
    """The object that computes steps in place, or None."""
    found: InPlace | None = device.dispatch.in_place(GRAPHS)  # type: ignore[attr-defined]
    return found


def computed(device: ta.Device) -> int:
    place = place_of(device)
    return 0 if place is None else place.computed


async def settled(device: ta.Device, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until it is computed in place twice in a row."""
    row = 0
    for _ in range(WARM):
        before = computed(device)
        await ask()
        row = row + 1 if computed(device) > before else 0
        if row == 2:
            return
    raise AssertionError("it is not computed in place")


@ta.step
def scaled(x: Any, y: Any, k: float) -> Any:
    return ((x + y) * k).to_host()


@ta.step
def sum_on_device(x: Any, y: Any) -> Any:
    return x + y


@pytest.fixture
def isolation() -> Isolation:
    """Workers have their own memory, and compute in it."""
    return "inline"


@pytest.fixture
async def arrays(device: ta.Device) -> list[ta.AccelRef]:
    """Two arrays, of ones and of twos."""
    return [await device.put(np.full(N, value)) for value in (1.0, 2.0)]


async def test_it_is_computed_in_place_from_some_run_on(device: ta.Device, arrays: list[Any]) -> None:
    async def ask() -> None:
        np.testing.assert_array_equal(await scaled(*arrays, 0.5), np.full(N, 1.5))

    await settled(device, ask)
    before, launched = computed(device), (await device.statistics()).launched
    for number in range(10):
        np.testing.assert_array_equal(await scaled(*arrays, float(number)), np.full(N, 3.0 * number))
    assert computed(device) == before + 10
    # The figures of the device count them all the same.
    assert (await device.statistics()).launched == launched + 10


async def test_a_result_that_stays_is_an_array_of_its_own(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: sum_on_device(*arrays))
    before = computed(device)
    results = [await sum_on_device(*arrays)]
    await arrays[0].fill(5.0)
    results.append(await sum_on_device(*arrays))
    results.append(await sum_on_device(results[0], results[1]))
    assert computed(device) == before + 3
    for result, value in zip(results, (3.0, 7.0, 10.0), strict=True):
        np.testing.assert_array_equal(await result.to_host(), np.full(N, value))


async def test_an_option_switches_it_off(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=attrs.evolve(INLINE, in_place=False)) as device:
        x, y = await device.put(np.ones(N)), await device.put(np.ones(N))
        for _ in range(64):
            np.testing.assert_array_equal(await scaled(x, y, 2.0), np.full(N, 4.0))
        assert place_of(device) is None


async def test_not_while_an_operation_in_flight_changes_its_arrays(device: ta.Device) -> None:
    big = await device.put(np.full((700, 700), 2.0))
    out, one = await device.put(np.zeros((700, 700))), await device.put(np.ones(N))
    row = out[0, :N]
    await settled(device, lambda: scaled(row, one, 2.0))
    before = computed(device)
    pending = device.submit(ta.linalg.Matmul(big, big, out=out))
    await trio.lowlevel.checkpoint()
    found = await scaled(row, one, 2.0)
    # It has waited for the product.
    np.testing.assert_array_equal(found, np.full(N, 2.0 * (700 * 4.0 + 1.0)))
    assert computed(device) == before
    await pending.wait()
    await settled(device, lambda: scaled(row, one, 2.0))


async def test_next_to_an_operation_in_flight_that_only_reads_its_arrays(device: ta.Device) -> None:
    big = await device.put(np.full((700, 700), 2.0))
    row, one = big[0, :N], await device.put(np.ones(N))
    # Its library is open.
    await ta.linalg.matmul(big, big)
    await settled(device, lambda: scaled(row, one, 2.0))
    before = computed(device)
    pending = device.submit(ta.linalg.Matmul(big, big))
    await wait_all_tasks_blocked()
    np.testing.assert_array_equal(await scaled(row, one, 2.0), np.full(N, 6.0))
    assert computed(device) == before + 1
    await pending.wait()


async def test_not_while_a_lease_is_held(device: ta.Device, arrays: list[Any]) -> None:
    other = await device.put(np.zeros(N))
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = computed(device)
    async with other.lease(write=True):
        np.testing.assert_array_equal(await scaled(*arrays, 2.0), np.full(N, 6.0))
    assert computed(device) == before
    found: list[Any] = []

    async def ask() -> None:
        found.append(await scaled(*arrays, 2.0))

    async with trio.open_nursery() as nursery:
        async with arrays[0].lease(write=True) as view:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert not found
            view[...] = 9.0
        del view
    np.testing.assert_array_equal(found[0], np.full(N, 22.0))
    await settled(device, lambda: scaled(*arrays, 2.0))


async def test_not_while_operations_are_observed(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = computed(device)
    seen: list[str] = []

    class Hook:
        def __call__(self, *told: Any) -> None:
            seen.append(str(told))

    with device.observed(Hook(), lambda ask: ask):  # type: ignore[attr-defined]
        np.testing.assert_array_equal(await scaled(*arrays, 2.0), np.full(N, 6.0))
    assert seen
    assert computed(device) == before
    await settled(device, lambda: scaled(*arrays, 2.0))


async def test_not_while_messages_are_observed_or_measured(
    system: ta.System, device: ta.Device, arrays: list[Any]
) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = place_of(device)
    assert before is not None
    count = before.computed
    with ta.telemetry.record(system):
        np.testing.assert_array_equal(await scaled(*arrays, 2.0), np.full(N, 6.0))
        assert before.computed == count
    await settled(device, lambda: scaled(*arrays, 2.0))


async def test_an_injected_fault_meets_the_launch(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = computed(device)
    fault = ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=ta.AccelError("a fault"))
    np.testing.assert_array_equal(await scaled(*arrays, 2.0), np.full(N, 6.0))
    assert computed(device) == before
    fault.remove()
    await settled(device, lambda: scaled(*arrays, 2.0))


async def test_a_cancelled_step_never_begins(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: sum_on_device(*arrays))
    before = computed(device)
    with trio.CancelScope() as scope:
        scope.cancel()
        await sum_on_device(*arrays)
    assert scope.cancelled_caught
    with trio.move_on_after(0.0) as scope:
        await sum_on_device(*arrays)
    assert scope.cancelled_caught
    assert computed(device) == before
    await sum_on_device(*arrays)
    assert computed(device) == before + 1


async def test_every_call_lets_other_tasks_run(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: sum_on_device(*arrays))
    order: list[str] = []

    async def ask(name: str) -> None:
        for _ in range(3):
            await sum_on_device(*arrays)
            order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "a")
        nursery.start_soon(ask, "b")
    for turn in range(3):
        assert set(order[2 * turn : 2 * turn + 2]) == {"a", "b"}


async def test_released_arrays_are_refused(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    arrays[1].release()
    with pytest.raises(ta.StaleRefError, match=r"step scaled: its memory was released"):
        await scaled(*arrays, 2.0)


async def test_an_array_released_by_another_task_is_refused(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = computed(device)
    # Its arguments were taken, and it is at its checkpoint.
    asked = changed_after_a_turn(scaled(*arrays, 2.0), arrays[0].release)
    with pytest.raises(ta.StaleRefError, match="released"):
        await asked
    assert computed(device) == before


async def test_a_remade_block_is_not_read_in_its_old_state(device: ta.Device) -> None:
    """Ids and memory of dropped arrays are used again; a bound step sees the new contents."""
    y = await device.put(np.ones(N))

    async def ask(value: float) -> None:
        x = await device.put(np.full(N, value))
        np.testing.assert_array_equal(await scaled(x, y, 2.0), np.full(N, 2.0 * (value + 1.0)))

    for turn in range(100):
        await ask(float(turn))
        if turn % 10 == 9:
            gc.collect()
            await device.synchronize()
            # Its memory serves an array of another size, and other memory gets its id.
            other = await device.put(np.full(4 * N, -1.0))
            await ask(0.5 + turn)
            await other.fill(float(turn))


async def test_it_keeps_no_array_alive(device: ta.Device) -> None:
    async def ask() -> None:
        x, y = await device.put(np.ones(N)), await device.put(np.ones(N))
        await settled(device, lambda: scaled(x, y, 2.0))
        await settled(device, lambda: sum_on_device(x, y))

    await ask()
    for _ in range(2):
        gc.collect()
        await device.synchronize()
    # Results in between have memory of their own, which is kept for the next.
    spare = device.state.blocks.spare  # type: ignore[attr-defined]
    assert (await device.statistics()).memory.blocks == (spare is not None)
    device.state.blocks.make_room()  # type: ignore[attr-defined]
    assert (await device.statistics()).memory.blocks == 0


async def test_bound_work_is_dropped_with_its_block(device: ta.Device) -> None:
    y = await device.put(np.ones(N))
    x = await device.put(np.ones(N))
    step = ta.step(lambda x, y: (x * y).to_host())
    await settled(device, lambda: step(x, y))
    plans = device.chains.kept.plans  # type: ignore[attr-defined]
    plan = next(kept.value for key, kept in plans.items() if key[0] == step._key)
    (bound,) = plan._bound.values()
    assert bound.works
    assert not bound.is_dropped
    x.release()
    await device.synchronize()
    assert bound.is_dropped
    assert bound.works == ()
    assert bound.result is None


async def test_an_error_in_place_is_reported_by_the_launch(
    device: ta.Device, arrays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await settled(device, lambda: sum_on_device(*arrays))

    def broken(*_: object) -> int:
        raise ValueError("no such thing")

    monkeypatch.setattr(InPlace, "compute", broken)
    result = await sum_on_device(*arrays)
    np.testing.assert_array_equal(await result.to_host(), np.full(N, 3.0))


async def test_long_work_runs_in_the_thread(device: ta.Device) -> None:
    x = await device.put(np.ones((300, 300)))
    step = ta.step(lambda x: ta.arrays.sum(x @ x @ x @ x).item())
    for _ in range(40):
        assert await step(x) == 300.0**5
    assert computed(device) == 0


async def test_the_loss_of_the_context_ends_it(system: ta.System) -> None:
    options = attrs.evolve(INLINE, backoff=ta.Backoff(base=0.0), intensity=ta.Intensity(9, 60.0))
    async with system.open_device(BACKEND, options=options) as device:
        x, y = await device.put(np.ones(N)), await device.put(np.ones(N))
        await settled(device, lambda: scaled(x, y, 2.0))
        old = place_of(device)
        ta.testing.poison(device)
        with suppress(ta.AccelError):
            await (x + y)
        with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
            await scaled(x, y, 2.0)
        x, y = await device.put(np.ones(N)), await device.put(np.full(N, 2.0))
        for _ in range(40):
            np.testing.assert_array_equal(await scaled(x, y, 2.0), np.full(N, 6.0))
        await settled(device, lambda: scaled(x, y, 2.0))
        assert place_of(device) is not old


@pytest.fixture
async def other(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    """A second device."""
    async with system.open_device(BACKEND, name="other", options=INLINE) as device:
        yield device


async def test_each_device_has_its_own_place(device: ta.Device, other: ta.Device, arrays: list[Any]) -> None:
    theirs = [await other.put(np.full(N, value)) for value in (10.0, 20.0)]
    await settled(device, lambda: scaled(*arrays, 2.0))
    await settled(other, lambda: scaled(*theirs, 2.0))
    before = computed(device), computed(other)
    np.testing.assert_array_equal(await scaled(*arrays, 2.0), np.full(N, 6.0))
    np.testing.assert_array_equal(await scaled(*theirs, 2.0), np.full(N, 60.0))
    assert (computed(device), computed(other)) == (before[0] + 1, before[1] + 1)


async def test_another_run_of_trio_never_computes_in_place(device: ta.Device, arrays: list[Any]) -> None:
    await settled(device, lambda: scaled(*arrays, 2.0))
    before = computed(device)

    def run() -> None:
        with pytest.raises(RuntimeError, match="belongs to another thread or Trio run"):
            trio.run(lambda: scaled(*arrays, 2.0))

    await trio.to_thread.run_sync(run)
    assert computed(device) == before


async def test_bindings_to_alternating_arrays_do_not_add_up(device: ta.Device) -> None:
    step = ta.step(lambda x, y: (x - y).to_host())
    y, others = await device.put(np.ones(N)), [await device.put(np.full(N, float(k))) for k in range(9)]
    await settled(device, lambda: step(others[0], y))
    place = place_of(device)
    assert place is not None
    before = place.computed
    for _ in range(20):
        for number, x in enumerate(others):
            np.testing.assert_array_equal(await step(x, y), np.full(N, number - 1.0))
    assert place.computed > before + 100
    bound = place._engine.uses[y.block.id].bound
    assert bound is not None
    assert len(bound) < 10


async def test_missing_memory_is_made_by_the_launch(system: ta.System) -> None:
    """Memory kept for intermediate results is dropped first, and an error is the error of the calls."""
    size = 4096
    options = attrs.evolve(INLINE, memory_limit=6 * 8 * size)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(size))
        step = ta.step(lambda x: ta.arrays.sum(x * 2.0, axis=0) + x)
        await settled(device, lambda: step(x))
        held: list[Any] = []

        async def fill() -> None:
            while len(held) < 9:
                held.append(await step(x))

        with pytest.raises(ta.OutOfMemoryError) as caught:
            await fill()
        assert caught.value.operation is not None
        assert "arrays." in caught.value.operation
        for each in held:
            np.testing.assert_array_equal(await each.to_host(), np.full(size, 2.0 * size + 1.0))
        held.clear()
        del each, caught
        np.testing.assert_array_equal(await (await step(x)).to_host(), np.full(size, 2.0 * size + 1.0))
