"""Operations handed over without waiting: in the order of submission, whatever library serves them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices import Copy, Fill, Put, ToHost
from trio_accel.devices.base._waits import SubmissionOrder

pytestmark = pytest.mark.any_backend


async def test_values_are_used_before_anything_has_run(manual: ta.Device, backend: ManualBackend) -> None:
    host = np.arange(9.0).reshape(3, 3)
    await manual.synchronize()
    backend.device.is_held = True
    put = manual.submit(Put(host))
    product = manual.submit(ta.linalg.Matmul(put.value, put.value))
    spectrum = manual.submit(ta.fft.Fft(product.value))
    back = manual.submit(ToHost(spectrum.value))
    await wait_all_tasks_blocked()
    assert not any(pending.is_done for pending in (put, product, spectrum, back))
    assert "in flight" in repr(back)
    backend.device.release()
    result = await back.wait()
    np.testing.assert_allclose(result, np.fft.fft(host @ host), rtol=1e-12)
    assert all(pending.is_done and pending.error is None for pending in (put, product, spectrum))
    assert await product.wait() is product.value
    assert "done" in repr(product)


async def test_intermediate_results_may_be_dropped_at_once(device: ta.Device) -> None:
    value = device.submit(Put(np.ones(4))).value
    for _ in range(10):
        value = device.submit(Copy(value)).value
    np.testing.assert_array_equal(await value.to_host(), np.ones(4))
    del value
    assert (await device.statistics()).memory.blocks == 0


async def test_an_array_released_before_it_was_made_leaves_nothing(device: ta.Device) -> None:
    pending = device.submit(Put(np.ones(4)))
    pending.value.release()
    await pending.wait()
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 0


async def test_a_later_write_waits_for_an_earlier_read_in_another_mailbox(
    system: ta.System, backend: ManualBackend
) -> None:
    """The reader's window is full, the writer's library idle: the writer must not overtake."""
    async with system.open_device(options=ta.DeviceOptions(in_flight=2)) as device:
        x = await device.put(np.ones(3))
        y = await device.put(np.ones(3))
        backend.device.is_held = True
        first = device.submit(ta.linalg.Scal(2.0, y))
        reader = device.submit(ta.linalg.Dot(x, x))
        with pytest.raises(ta.QueueFullError, match="2 submitted operations of BlasActor are not done"):
            device.submit(ta.linalg.Scal(2.0, y))
        writer = device.submit(Fill(x, 5.0))
        await wait_all_tasks_blocked()
        backend.device.release()
        for pending in (first, reader, writer):
            await pending.wait()
        assert await reader.value.item() == 3.0
        np.testing.assert_array_equal(await x.to_host(), [5, 5, 5])


async def test_a_failed_producer_fails_its_consumers(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, fail=RuntimeError("broken"))
    a = await device.put(np.eye(3))
    product = device.submit(ta.linalg.Matmul(a, a))
    spectrum = device.submit(ta.fft.Fft(product.value))
    host = device.submit(ToHost(spectrum.value))
    untouched = device.submit(ta.fft.Fft(a))
    with pytest.raises(ta.ActorFailedError, match="broken"):
        await product.wait()
    for pending in (spectrum, host, host):
        with pytest.raises(ta.InputFailedError, match=r"was (to be|being) written by"):
            await pending.wait()
        assert isinstance(pending.error, ta.InputFailedError)
        assert pending.error.__cause__ is not None
    np.testing.assert_allclose(await (await untouched.wait()).to_host(), np.fft.fft(np.eye(3)))
    with pytest.raises(ta.StaleRefError, match="spoiled by"):
        await product.value.to_host()
    assert "failed" in repr(product)


async def test_a_refused_update_invalidates_the_array_for_later_submissions(
    device: ta.Device,
) -> None:
    """The program continues as if the array had been changed: it must not read it unchanged."""
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("broken"))
    update = device.submit(ta.linalg.Scal(2.0, x))
    before_it_is_known = device.submit(ToHost(update.value))
    with pytest.raises(ta.InputFailedError):
        await before_it_is_known.wait()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
        device.submit(ToHost(update.value))
    with pytest.raises(ta.ActorFailedError):
        await update.wait()


async def test_a_cancelled_wait_cancels_nothing_else(manual: ta.Device, backend: ManualBackend) -> None:
    x = await manual.put(np.ones(3))
    backend.device.is_held = True
    pending = manual.submit(ta.linalg.Scal(2.0, x))
    with trio.move_on_after(0) as scope:
        await pending.wait()
    assert scope.cancelled_caught
    assert not pending.is_done
    backend.device.release()
    await pending.wait()
    np.testing.assert_array_equal(await x.to_host(), [2, 2, 2])


async def test_a_lost_context_ends_submitted_work(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=ta.ContextPoisonedError("lost"))
    lost = device.submit(ta.linalg.Scal(2.0, x))
    after = device.submit(ta.fft.Fft(x))
    for pending in (lost, after):
        with pytest.raises((ta.ContextLostError, ta.InputFailedError, ta.StaleRefError)):
            await pending.wait()
    y = await device.put(np.ones(3))
    assert device.generation == 2
    np.testing.assert_array_equal(
        await (await device.submit(ta.linalg.Scal(2.0, y)).wait()).to_host(), [2, 2, 2]
    )


async def test_invalid_submissions_are_refused_at_once(device: ta.Device) -> None:
    with pytest.raises(TypeError, match="submit: 3 is not an operation"):
        device.submit(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis"):
        device.submit(ta.linalg.Matmul(np.ones((2, 3)), np.ones((2, 3))))
    x = await device.put(np.ones(3))
    await device.close()
    with pytest.raises(ta.DeviceLostError, match="closed"):
        device.submit(ta.linalg.Scal(2.0, x))


async def test_a_library_that_cannot_be_opened_fails_its_submissions(device: ta.Device) -> None:
    class Nowhere(ta.linalg.Scal):
        library = "trio_accel.nowhere:NoActor"

    x = await device.put(np.ones(3))
    pending = device.submit(Nowhere(2.0, x))
    with pytest.raises(Exception, match="nowhere"):
        await pending.wait()
    np.testing.assert_array_equal(await (await device.put(np.ones(3))).to_host(), [1, 1, 1])


STEPS: list[Callable[..., Any]] = [
    lambda a, b, c: (ta.linalg.Matmul(a, b, c), ("c",), lambda a, b, c: a @ b),
    lambda a, b, c: (ta.linalg.Axpy(0.5, a, b), ("b",), lambda a, b, c: 0.5 * a + b),
    lambda a, b, c: (ta.linalg.Scal(-0.5, a), ("a",), lambda a, b, c: -0.5 * a),
    lambda a, b, c: (Fill(c, 0.25), ("c",), lambda a, b, c: np.full_like(c, 0.25)),
    lambda a, b, c: (ta.linalg.Gemm(0.5, a, b, 0.5, c), ("c",), lambda a, b, c: 0.5 * a @ b + 0.5 * c),
]


STREAMS = [ta.SingleStream(), ta.StreamPool(2), ta.StreamPool(3), ta.PerActorStreams()]


@pytest.mark.parametrize("streams", STREAMS, ids=["1 stream", "2 streams", "3 streams", "own streams"])
async def test_random_graphs_equal_the_serial_result(
    system: ta.System, isolation: Isolation, streams: ta.StreamPool
) -> None:
    options = ta.DeviceOptions(in_flight=64, isolation=isolation, streams=streams)
    async with system.open_device(BACKEND, options=options) as device:

        async def run_here(program: list[Any], seed: int) -> None:
            await run_graph(device, program, seed)

        # All graphs use the one device: each is run from the thread of the search for them.
        @settings(max_examples=100, deadline=None, derandomize=True)
        @given(
            program=st.lists(
                st.tuples(st.integers(0, 6), st.permutations(range(4))), min_size=1, max_size=40
            ),
            seed=st.integers(0, 1000),
        )
        def search(program: list[Any], seed: int) -> None:
            trio.from_thread.run(run_here, program, seed)

        await trio.to_thread.run_sync(search)
        statistics = await device.statistics()
        assert (statistics.generation, statistics.in_flight, statistics.memory.blocks) == (1, 0, 0)


async def run_graph(device: ta.Device, program: list[Any], seed: int) -> None:
    """Submit all of it, wait for nothing in between, and compare with the serial result."""
    rng = np.random.default_rng(seed)
    hosts = [rng.uniform(-1, 1, (4, 4)) for _ in range(4)]
    expected = [host.copy() for host in hosts]
    refs = [device.submit(Put(host)).value for host in hosts]
    for kind, order in program:
        numbers = dict(zip("abc", order, strict=False))
        if kind < len(STEPS):
            message, [target], compute = STEPS[kind](*(refs[numbers[name]] for name in "abc"))
            device.submit(message)
            expected[numbers[target]] = compute(*(expected[numbers[name]] for name in "abc"))
        elif kind == 5:
            refs[numbers["b"]] = device.submit(Copy(refs[numbers["a"]])).value
            expected[numbers["b"]] = expected[numbers["a"]].copy()
        else:
            spectrum = device.submit(ta.fft.Rfft(refs[numbers["a"]], axis=0)).value
            refs[numbers["c"]] = device.submit(ta.fft.Irfft(spectrum, 4, axis=0)).value
            expected[numbers["c"]] = np.fft.irfft(np.fft.rfft(expected[numbers["a"]], axis=0), 4, axis=0)
    results = [device.submit(ToHost(ref)) for ref in refs]
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(await result.wait(), right, rtol=1e-9, atol=1e-9)
    # Operations without a reader may still run.
    await device.synchronize()
    assert (await device.statistics()).in_flight == 0


@pytest.mark.parametrize(
    "streams", [ta.SingleStream(), ta.PerActorStreams()], ids=["1 stream", "own streams"]
)
async def test_in_random_graphs_only_dependents_of_failures_fail(
    system: ta.System, isolation: Isolation, streams: ta.SingleStream
) -> None:
    options = ta.DeviceOptions(in_flight=64, isolation=isolation, streams=streams)
    async with system.open_device(BACKEND, options=options) as device:

        async def run_here(program: list[Any], seed: int) -> None:
            await FailingGraph(device, seed).run(program)

        @settings(max_examples=100, deadline=None, derandomize=True)
        @given(
            program=st.lists(
                st.tuples(
                    st.integers(0, 5), st.permutations(range(4)), st.sampled_from([False] * 4 + [True])
                ),
                min_size=1,
                max_size=30,
            ),
            seed=st.integers(0, 1000),
        )
        def search(program: list[Any], seed: int) -> None:
            trio.from_thread.run(run_here, program, seed)

        await trio.to_thread.run_sync(search)
        # Errors hold frames, and these their errors.
        gc.collect()
        statistics = await device.statistics()
        assert (statistics.generation, statistics.in_flight, statistics.memory.blocks) == (1, 0, 0)


class FailingGraph:
    """A graph in which some operations are refused by their library, next to what is right."""

    def __init__(self, device: ta.Device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.device = device
        self.expected = [rng.uniform(-1, 1, (4, 4)) for _ in range(4)]
        self.refs = [device.submit(Put(host)).value for host in self.expected]
        # Arrays with the targets of a failed operation, or with results that depend on them.
        self.spoiled: set[int] = set()
        # Arrays among them that were never made, which no write heals.
        self.unmade: set[int] = set()
        self.good: list[ta.Pending[Any]] = []
        self.failed: list[ta.Pending[Any]] = []

    async def run(self, program: list[Any]) -> None:
        for kind, order, is_refused in program:
            await self.step(kind, order[:3], is_refused=is_refused)
        for pending in self.good:
            await pending.wait()
        for pending in self.failed:
            with pytest.raises((ta.LibraryError, ta.InputFailedError, ta.StaleRefError)):
                await pending.wait()
        for index, (ref, right) in enumerate(zip(self.refs, self.expected, strict=True)):
            if index in self.spoiled:
                with pytest.raises(ta.StaleRefError, match="spoiled by"):
                    await ref.to_host()
            else:
                np.testing.assert_allclose(await ref.to_host(), right, rtol=1e-9, atol=1e-9)

    async def step(self, kind: int, order: list[int], *, is_refused: bool) -> None:
        names = dict(zip("abc", order, strict=True))
        is_copy = kind == len(STEPS)
        if is_copy:
            message, target = Copy(self.refs[order[0]]), names["b"]
            used, result = {names["a"]}, self.expected[order[0]].copy()
        else:
            message, [name], compute = STEPS[kind](*(self.refs[index] for index in order))
            target, result = names[name], compute(*(self.expected[index] for index in order))
            used = {0: set(order[:2]), 1: set(order[:2]), 2: {order[0]}, 3: set[int](), 4: set(order)}[kind]
            # Overwritten arrays may be invalid, but not missing.
            used |= self.unmade & {target}
        will_fail = bool(used & self.spoiled)
        if is_refused and not will_fail:
            refusal = ta.LibraryError("no", library="any", code=7)
            ta.testing.inject_fault(self.device, type(message), fail=refusal)
            will_fail = True
        try:
            pending = self.device.submit(message)
        except ta.StaleRefError:
            assert used & self.spoiled
            return
        (self.failed if will_fail else self.good).append(pending)
        if is_copy:
            self.refs[target] = pending.value
            (self.unmade.add if will_fail else self.unmade.discard)(target)
        if will_fail:
            self.spoiled.add(target)
            return
        self.expected[target] = result
        if target in self.spoiled:
            if not is_copy:
                # It heals the array once it is done.
                await pending.wait()
            self.spoiled.discard(target)


def test_the_order_forgets_finished_work() -> None:
    order = SubmissionOrder()
    writer = order.enter(frozenset(), frozenset({1}))
    readers = [order.enter(frozenset({1}), frozenset({2 + number})) for number in range(3)]
    last = order.enter(frozenset({2}), frozenset({1}))
    assert [turn.is_ready for turn in (writer, *readers, last)] == [True, False, False, False, False]
    order.leave(writer)
    assert all(turn.is_ready for turn in readers)
    assert not last.is_ready
    for turn in readers:
        order.leave(turn)
        order.leave(turn)
    assert last.is_ready
    order.leave(last)
    assert order.is_empty
