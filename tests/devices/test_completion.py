"""All completion strategies keep the same contract."""

from __future__ import annotations

import gc
import itertools
import resource
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from garbage import without_collection
from manual_backend import ManualBackend, ManualStream
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Waker
from trio_accel.devices import CompletionPort, Phase, Put
from trio_accel.devices.base import _port
from trio_accel.devices.engine import _context_state

STRATEGIES = [
    ta.HostCallbackCompletion(),
    ta.PolledCompletion(interval=0.001),
    ta.AdaptiveCompletion(),
    ta.AdaptiveCompletion(budget=0.01),
    ta.SyncCompletion(),
]
NAMES = ["host callback", "polled", "adaptive", "adaptive, long", "sync"]


@pytest.fixture(params=STRATEGIES, ids=NAMES)
def strategy(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
async def chosen(system: ta.System, strategy: ta.HostCallbackCompletion) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="inline", completion=strategy)
    ) as device:
        yield device


async def test_the_results_are_the_same(chosen: ta.Device) -> None:
    rng = np.random.default_rng(1)
    host = rng.standard_normal((40, 40))
    ref = await chosen.put(host)
    results: dict[int, np.ndarray] = {}

    async def client(number: int) -> None:
        product = await ta.linalg.matmul(ref, host[:, : number + 1])
        spectrum = await ta.fft.fft(product, axis=0)
        results[number] = await spectrum.to_host()

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(client, number)
    for number, result in results.items():
        expected = np.fft.fft(host @ host[:, : number + 1], axis=0)
        np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-10)
    statistics = await chosen.statistics()
    assert (statistics.in_flight, statistics.launched) == (0, statistics.completed)


async def test_an_error_of_the_work_is_reported(chosen: ta.Device) -> None:
    ref = await chosen.put(np.ones(3))
    ta.testing.inject_fault(chosen, ta.linalg.Scal, fail=RuntimeError("injected"))
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(2.0, ref)
    await ta.linalg.scal(2.0, ref)
    np.testing.assert_array_equal(await ref.to_host(), [2, 2, 2])


async def test_a_cancelled_wait_leaves_nothing_behind(chosen: ta.Device) -> None:
    ref = await chosen.put(np.ones((300, 300)))
    for deadline in (0.0, 0.0005):
        with trio.move_on_after(deadline):
            for _ in range(100):
                await ta.linalg.matmul(ref, ref)
    await chosen.synchronize()
    gc.collect()
    statistics = await chosen.statistics()
    assert (statistics.in_flight, statistics.memory.blocks) == (0, 1)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=NAMES[:4], indirect=True)
async def test_the_reply_follows_the_work(
    system: ta.System, backend: ManualBackend, strategy: ta.HostCallbackCompletion
) -> None:
    async with system.open_device("manual", options=ta.DeviceOptions(completion=strategy)) as device:
        ref = await device.put(np.ones(3))
        backend.device.is_held = True
        replied = trio.Event()

        async def ask() -> None:
            await ta.linalg.scal(3.0, ref)
            replied.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for _ in range(50):
                # A strategy that polls is never blocked for long.
                await trio.lowlevel.checkpoint()
            assert not replied.is_set()
            backend.device.release()
            with trio.fail_after(60):
                await replied.wait()
        np.testing.assert_array_equal(await ref.to_host(), [3, 3, 3])


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=NAMES[:4], indirect=True)
async def test_a_long_operation_costs_the_waiting_thread_next_to_nothing(
    system: ta.System, backend: ManualBackend, strategy: ta.HostCallbackCompletion
) -> None:
    async with system.open_device("manual", options=ta.DeviceOptions(completion=strategy)) as device:
        ref = await device.put(np.ones(3))
        # The imports of the library are not a wait.
        await ta.linalg.scal(1.0, ref)
        backend.device.is_held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ta.linalg.scal, 3.0, ref)
            await trio.lowlevel.checkpoint()
            with without_collection():
                before = _processor_time()
                # clock: the time that this work takes decides nothing
                await trio.sleep(0.2)
                spent = _processor_time() - before
            backend.device.release()
        # A fifth of the cost allowed for a wait of one second.
        assert spent < 0.05


async def ask_held(device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, seconds: float) -> None:
    """Ask for work with this duration."""
    backend.device.is_held = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ta.linalg.scal, 1.0, ref)
        # clock: the time that this work takes decides nothing
        await trio.sleep(seconds)
        backend.device.release()


# Seconds after which an operation is due, and for which it is looked for: half of them before that.
DUE, WINDOW = 2.0, 100.0


async def make_steady(
    device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, seconds: float = DUE
) -> None:
    """Have the port expect that the next operation takes as long, as if two in a row had."""
    port = device.dispatch.session.engine.completion  # type: ignore[union-attr]
    await ask_held(device, backend, ref, 0.01)
    estimators = port._estimators.values()  # type: ignore[attr-defined]
    assert estimators
    for estimator in estimators:
        estimator.is_steady, estimator.seconds = True, seconds
    # On a busy machine the port may have begun to look when the operation was already over.
    port.is_quick = False


@pytest.mark.parametrize("window", [WINDOW, 0.0])
async def test_steady_work_is_seen_when_due_without_a_notification(
    system: ta.System, backend: ManualBackend, monkeypatch: pytest.MonkeyPatch, window: float
) -> None:
    """Without a window it is seen when the stream notifies, and not before."""
    wakers: list[Waker] = []
    # The watchdog's own look is later.
    monkeypatch.setattr(_context_state, "_INTERVAL", 60.0)
    strategy = ta.AdaptiveCompletion(window=window)
    async with system.open_device("manual", options=ta.DeviceOptions(completion=strategy)) as device:
        ref = await device.put(np.ones(3))
        await make_steady(device, backend, ref)
        monkeypatch.setattr(ManualStream, "notify", lambda self, event, waker: wakers.append(waker))
        backend.device.is_held = True
        pending = device.submit(ta.linalg.Scal(1.0, ref))
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        backend.device.release()
        if window:
            with trio.fail_after(60):
                while not pending.is_done:  # noqa: ASYNC110  # nobody is told
                    await trio.lowlevel.checkpoint()
        else:
            # clock: a longer pause only makes it surer that nobody looks
            await trio.sleep(0.05)
            assert not pending.is_done
        for waker in wakers:
            waker.ring()
        with trio.fail_after(60):
            await pending.wait()


async def test_every_port_counts_the_calls_of_threads(strategy: ta.HostCallbackCompletion) -> None:
    port = strategy.open(lambda: None)
    port.calls += 1  # type: ignore[misc]
    assert port.calls == 1
    port.close()


async def test_the_loop_does_not_poll_while_a_thread_makes_a_call(
    system: ta.System, backend: ManualBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakers: list[Waker] = []
    monkeypatch.setattr(_context_state, "_INTERVAL", 60.0)
    strategy = ta.AdaptiveCompletion(window=WINDOW)
    async with system.open_device("manual", options=ta.DeviceOptions(completion=strategy)) as device:
        port = device.dispatch.session.engine.completion  # type: ignore[union-attr]
        ref = await device.put(np.ones(3))
        await make_steady(device, backend, ref)
        monkeypatch.setattr(ManualStream, "notify", lambda self, event, waker: wakers.append(waker))
        port.calls = 1  # type: ignore[misc]
        backend.device.is_held = True
        pending = device.submit(ta.linalg.Scal(1.0, ref))
        # clock: any moment will do
        await trio.sleep(0.1)
        backend.device.release()
        # clock: a longer pause only makes it surer
        await trio.sleep(0.05)
        assert not pending.is_done
        assert wakers
        port.calls = 0  # type: ignore[misc]
        for waker in wakers:
            waker.ring()
        with trio.fail_after(60):
            await pending.wait()


class TestPolling:
    """One short operation at a time, for which nobody has to be woken."""

    @pytest.fixture
    async def device(self, system: ta.System, backend: ManualBackend) -> AsyncGenerator[ta.Device, None]:
        strategy = ta.AdaptiveCompletion(window=0.0)
        async with system.open_device("manual", options=ta.DeviceOptions(completion=strategy)) as device:
            yield device

    @pytest.fixture
    async def ref(self, device: ta.Device) -> ta.AccelRef:
        ref = await device.put(np.ones(3))
        await ta.linalg.scal(1.0, ref)
        return ref

    async def watched(self, device: ta.Device, tasks: int, ref: ta.AccelRef) -> int:
        """How many of ten operations each task leaves to the task that looks."""
        port = device.dispatch.session.engine.completion  # type: ignore[union-attr]
        watch, count = port.watch, itertools.count()

        def counting(*arguments: Any) -> None:
            next(count)
            watch(*arguments)

        async def ask() -> None:
            for _ in range(10):
                await ta.linalg.scal(1.0, ref)

        port.watch = counting  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(ask)
        port.watch = watch  # type: ignore[method-assign]
        return next(count)

    async def test_a_lone_asker_sees_the_end_at_once(self, device: ta.Device, ref: ta.AccelRef) -> None:
        # A turn of the loop may take long here, and then nothing is known to be quick.
        assert min([await self.watched(device, 1, ref) for _ in range(5)]) <= 1

    async def test_concurrent_askers_do_not_delay_each_other(
        self, device: ta.Device, ref: ta.AccelRef
    ) -> None:
        assert await self.watched(device, 2, ref) >= 18

    async def test_slower_work_is_left_to_the_task_and_so_is_the_next(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef
    ) -> None:
        port = device.dispatch.session.engine.completion  # type: ignore[union-attr]
        port.is_quick = True  # type: ignore[misc]
        before = time.perf_counter()
        await ask_held(device, backend, ref, 0.05)
        assert time.perf_counter() - before >= 0.05
        assert not port.is_quick

    async def test_polled_work_is_seen_though_the_library_ends_meanwhile(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef
    ) -> None:
        session = device.dispatch.session  # type: ignore[union-attr]
        library = session.libraries[ta.linalg.Scal.library]

        def end(phase: Phase, launch: object) -> None:
            if phase is Phase.ENQUEUE:
                library.cancel("a test")

        session.engine.completion.is_quick = True
        backend.device.is_held = True
        device.state.hooks.append(end)
        with pytest.raises(ta.ContextLostError):
            await ta.linalg.scal(2.0, ref)
        assert session.engine.streams.in_flight == 1
        backend.device.release()
        with trio.fail_after(60):
            await session.engine.synchronize()


@pytest.mark.alone
class TestSpinning:
    """A lone caller of work with a steady duration waits for it in its own task."""

    @pytest.fixture
    async def device(
        self, system: ta.System, backend: ManualBackend, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncGenerator[ta.Device, None]:
        # Nobody else sees the end of an operation under a spin: no notification, and no look of the watchdog.
        monkeypatch.setattr(_context_state, "_INTERVAL", 60.0)
        monkeypatch.setattr(_port, "LONGEST_LOOK", 10.0)
        options = ta.DeviceOptions(
            completion=ta.AdaptiveCompletion(window=WINDOW), cancel_grace=0.3, close_grace=0.3
        )
        async with system.open_device("manual", options=options) as device:
            yield device

    @pytest.fixture
    async def ref(self, device: ta.Device, backend: ManualBackend) -> ta.AccelRef:
        ref = await device.put(np.ones(3))
        await make_steady(device, backend, ref)
        return ref

    @pytest.fixture
    def ends(self, device: ta.Device, ref: ta.AccelRef) -> list[bool]:
        """For each spin, whether it lasted to the end."""
        port = device.dispatch.session.engine.completion  # type: ignore[union-attr]
        spin, ends = port.spin, list[bool]()

        async def noting(*arguments: Any) -> bool:
            ends.append(await spin(*arguments))
            return ends[-1]

        port.spin = noting  # type: ignore[method-assign]
        return ends

    @pytest.mark.slow
    async def test_it_sees_the_end_by_itself(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        # One may take longer here than the one before, and then the next two are watched.
        for _ in range(20):
            await ask_held(device, backend, ref, 0.1)
        assert ends.count(True) >= 3
        np.testing.assert_array_equal(await ref.to_host(), np.ones(3))
        assert (await device.statistics()).in_flight == 0

    @pytest.mark.slow
    async def test_nobody_spins_for_long(
        self,
        device: ta.Device,
        backend: ManualBackend,
        ref: ta.AccelRef,
        ends: list[bool],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Trio reports Ctrl-C to the main task only where it is parked."""
        monkeypatch.setattr(_port, "LONGEST_LOOK", 0.02)
        for _ in range(20):
            await ask_held(device, backend, ref, 0.1)
        assert ends.count(False) >= 3
        assert True not in ends

    async def test_the_rest_of_the_program_continues(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        turns, is_over = 0, False

        async def count() -> None:
            nonlocal turns
            while not is_over:
                await trio.lowlevel.checkpoint()
                turns += 1

        async def scale() -> None:
            nonlocal is_over
            await ta.linalg.scal(1.0, ref)
            is_over = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            backend.device.is_held = True
            nursery.start_soon(scale)
            with trio.fail_after(60):
                while turns <= 50:  # noqa: ASYNC110  # nobody is told
                    await trio.lowlevel.checkpoint()
            assert not ends
            backend.device.release()
        assert ends == [True]

    async def test_with_another_asker_it_is_left_to_the_task(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        backend.device.is_held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ta.linalg.scal, 2.0, ref)
            for _ in range(50):
                await trio.lowlevel.checkpoint()
            assert not ends
            nursery.start_soon(ta.linalg.scal, 3.0, ref)
            with trio.fail_after(60):
                while not ends:  # noqa: ASYNC110  # nobody is told
                    await trio.sleep(0.001)
            assert ends == [False]
            backend.device.release()
        assert ends == [False]
        np.testing.assert_array_equal(await ref.to_host(), np.full(3, 6.0))

    async def test_overdue_work_is_left_to_the_task(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        # It is looked for until a second after it has begun.
        await make_steady(device, backend, ref, 1.0 - WINDOW / 2)
        del ends[:]
        backend.device.is_held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ta.linalg.scal, 1.0, ref)
            with trio.fail_after(60):
                while not ends:  # noqa: ASYNC110  # nobody is told
                    await trio.sleep(0.001)
            assert ends == [False]
            backend.device.release()

    async def test_cancelled_work_is_waited_for_while_the_grace_lasts(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        backend.device.is_held = True
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with ta.cancel_grace(60.0), scope:
                nursery.start_soon(self.cancel_soon, scope, partial(self.release_later, backend, 0.15))
                await ta.linalg.scal(2.0, ref)
        assert scope.cancel_called
        assert not scope.cancelled_caught
        assert ends == [False]
        np.testing.assert_array_equal(await ref.to_host(), np.full(3, 2.0))

    async def cancel_soon(
        self, scope: trio.CancelScope, then: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    ) -> None:
        """Cancel when the caller spins."""
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        scope.cancel()
        await then()

    async def release_later(self, backend: ManualBackend, seconds: float) -> None:
        # clock: the time that this work takes decides nothing
        await trio.sleep(seconds)
        backend.device.release()

    async def test_work_longer_than_the_grace_is_given_up(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        backend.device.is_held = True
        before, scope = trio.current_time(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with scope:
                nursery.start_soon(self.cancel_soon, scope)
                await ta.linalg.scal(2.0, ref)
        assert scope.cancelled_caught
        # The device is held until it is released here.
        assert trio.current_time() - before >= 0.3
        assert ends == [False]
        backend.device.release()
        with trio.fail_after(60):
            await device.synchronize()

    async def test_the_context_may_be_lost_meanwhile(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef, ends: list[bool]
    ) -> None:
        backend.device.is_held = True
        session = device.dispatch.session  # type: ignore[union-attr]

        async def lose() -> None:
            # clock: any moment will do
            await trio.sleep(0.02)
            session.engine.lose_context(ta.ContextPoisonedError("a test"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            with pytest.raises(ta.ContextLostError):
                await ta.linalg.scal(2.0, ref)
        assert len(ends) == 1
        backend.devices[0].release()
        # Its task would look for that, which sleeps here.
        session.engine.completer.reap()
        fresh = await device.put(np.ones(3))
        np.testing.assert_array_equal(await fresh.to_host(), np.ones(3))

    async def test_a_loop_of_them_can_be_cancelled(
        self, device: ta.Device, backend: ManualBackend, ref: ta.AccelRef
    ) -> None:
        with trio.move_on_after(0.3) as scope, trio.fail_after(60):
            while True:
                await ta.linalg.scal(1.0, ref)
        assert scope.cancelled_caught


class Deaf(CompletionPort):
    """A strategy that hears nothing: as if the notifying thread never got the interpreter's lock."""

    def open(self, reap: object) -> Deaf:
        return self

    def watch(self, stream: object, event: object) -> None:
        pass

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        pass


async def test_unnotified_work_is_seen_all_the_same(system: ta.System) -> None:
    # Next to a loop that computes all the time, a thread may wait for seconds.
    options = ta.DeviceOptions(isolation="inline", completion=Deaf(), stuck_after=0.2)
    async with system.open_device(BACKEND, options=options) as device:
        ref = await device.put(np.ones(3))
        with trio.fail_after(60):
            for _ in range(15):
                await ta.linalg.scal(1.0, ref)
        assert device.generation == 1


async def test_looking_when_it_is_due_costs_little(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="inline", completion=ta.AdaptiveCompletion(window=0.003))
    async with system.open_device(BACKEND, options=options) as device:
        ref = await device.put(np.ones(3))
        await ta.linalg.scal(1.0, ref)
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.05, count=6)
        with without_collection():
            before = _processor_time()
            for _ in range(6):
                await ta.linalg.scal(1.0, ref)
            spent = _processor_time() - before
        # At most 3 ms of each is spent with looking, and all else is as ever.
        assert spent < 6 * 0.012


async def test_sync_blocks_the_loop_and_warns(system: ta.System) -> None:
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="inline", completion=ta.SyncCompletion())
    ) as device:
        ref = await device.put(np.ones((400, 400)))
        phases: list[str] = []
        device.state.hooks.append(lambda phase, launch: phases.append(phase.value))

        async def ask() -> None:
            await ta.linalg.matmul(ref, ref)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        assert "Trio loop" in (ta.SyncCompletion.__doc__ or "")
        # The second is enqueued when the first is complete.
        assert phases.count("complete") == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ta.PolledCompletion(interval=0),
            "PolledCompletion: interval must be seconds above 0, got 0",
        ),
        (lambda: ta.AdaptiveCompletion(budget=-1), "budget must be seconds above 0, got -1"),
        (lambda: ta.AdaptiveCompletion(budget="1"), "budget must be seconds above 0, got '1'"),
        (lambda: ta.AdaptiveCompletion(window=-1), "window must be seconds from 0, got -1"),
        (lambda: ta.AdaptiveCompletion(window=True), "window must be seconds from 0, got True"),
    ],
)
def test_wrong_options_are_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


async def test_every_watcher_sees_the_latest_generation(device: ta.Device) -> None:
    seen: list[list[int]] = [[], []]

    async def watch(mine: list[int]) -> None:
        async with aclosing(device.watch_generation()) as generations:
            async for generation in generations:
                mine.append(generation)  # noqa: PERF401  # seen while it goes on

    async with trio.open_nursery() as nursery:
        for mine in seen:
            nursery.start_soon(watch, mine)
        await wait_all_tasks_blocked()
        assert seen == [[1], [1]]
        ta.testing.inject_fault(device, Put, fail=ta.ContextPoisonedError("lost"))
        with pytest.raises(ta.ContextLostError):
            await device.put(np.ones(3))
        await device.put(np.ones(3))
        await wait_all_tasks_blocked()
        assert seen == [[1, 2], [1, 2]]
        await device.close()
        # The iteration ends with the device, and so does this block.
    assert seen == [[1, 2], [1, 2]]


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("due", "end"), [(-50.0, 25.0), (12.0, 25.0), (14.0, 26.0), (25.0, 37.0), (36.0, 48.0), (38.0, 25.0)]
)
def test_a_poll_does_not_end_just_before_something_is_due(due: float, end: float) -> None:
    """In microseconds from now on; a turn of the loop, which takes ten, follows it."""
    assert _port._end_of_poll(1.0, 1.0 + due * 1e-6) == pytest.approx(1.0 + end * 1e-6, abs=1e-9)
