"""A device for code that blocks: Ctrl-C, and its end."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import pytest
import trio
import trio.lowlevel
from blocking_tasks import WAIT, Task, interrupt, late_interrupt, never_run, refused
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import ArrayApi, BlockingDevice, array_api

pytestmark = pytest.mark.machine

RNG = np.random.default_rng(0)


def is_running(system: str) -> bool:
    return any(thread.name == f"trio_accel.{system}" for thread in threading.enumerate())


def wait_for_end(system: str) -> None:
    deadline = time.monotonic() + WAIT
    while is_running(system):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("interrupt", [interrupt, late_interrupt])
def test_ctrl_c_cancels_the_task_and_waits_for_its_end(
    b: BlockingDevice, x: ta.AccelRef, interrupt: Callable[[], None]
) -> None:
    task = Task(interrupt)
    with pytest.raises(KeyboardInterrupt):
        b.wait(task.run)
    assert task.has_ended.is_set()
    assert b.get(x).shape == (3, 3)


@pytest.mark.parametrize("interrupt", [interrupt, late_interrupt])
def test_a_second_ctrl_c_ends_the_wait_for_the_task(b: BlockingDevice, interrupt: Callable[[], None]) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    async def stay() -> None:
        try:
            interrupt()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                interrupt()
                await trio.to_thread.run_sync(may_end.wait, WAIT)
            has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        b.wait(stay)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(WAIT)


def test_ctrl_c_during_a_transfer(b: BlockingDevice) -> None:
    host = RNG.normal(size=1 << 21)

    async def put() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.device.put, host)
            await trio.lowlevel.checkpoint()
            interrupt()
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        b.wait(put)
    host[:] = 0  # nothing reads it
    assert b.get(b.wait(b.device.put(host[:3]))).tolist() == [0, 0, 0]
    gc.collect()
    assert b.wait(b.device.statistics).memory.used < host.nbytes


@pytest.mark.parametrize("is_to_host", [False, True])
def test_ctrl_c_in_the_middle_of_a_large_transfer(
    b: BlockingDevice, monkeypatch: pytest.MonkeyPatch, is_to_host: bool
) -> None:
    monkeypatch.setattr("trio_accel.devices.front._memory._CHUNK_BYTES", 4096)
    host = RNG.normal(size=1 << 17)
    x = b.wait(b.device.put(host))
    seen: list[ta.ProgressEvent] = []

    def watch(event: ta.ProgressEvent) -> None:
        seen.append(event)
        if len(seen) == 2:
            interrupt()

    out = np.empty_like(host)
    with pytest.raises(KeyboardInterrupt), ta.watch_progress(watch):
        b.wait(x.to_host(out=out) if is_to_host else b.device.put(host))
    assert 0 < seen[-1].done <= host.nbytes
    out[:] = host[:] = 0  # nothing reads or writes them
    b.wait(b.device.synchronize)
    assert not out.any()
    gc.collect()
    assert b.wait(b.device.statistics).memory.used < x.nbytes + host.nbytes


@pytest.mark.parametrize("interrupt", [interrupt, late_interrupt])
def test_ctrl_c_in_the_opening(monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]) -> None:
    task = Task(interrupt)
    monkeypatch.setattr(ta.System, "open_device", lambda *_, **__: task.run())
    with pytest.raises(KeyboardInterrupt):
        ta.blocking(NAME, name="interrupted")
    assert task.has_ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "trio_accel.interrupted"]


def test_ctrl_c_before_the_first_line_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ta.blocking(NAME)
    threads[0].start()
    threads[0].join(WAIT)
    assert not threads[0].is_alive()


def test_a_callback_that_exits_ends_the_run_with_its_error() -> None:
    b = ta.blocking(NAME, name="exits")
    may_end = threading.Event()
    future = b.submit(trio.to_thread.run_sync, may_end.wait)
    future.add_done_callback(lambda _: sys.exit(3))
    may_end.set()
    assert future.result(WAIT)
    with pytest.raises(SystemExit):
        b.close()


def test_ctrl_c_ends_the_wait_of_close() -> None:
    b = ta.blocking(NAME, name="staying")
    has_begun, may_end = threading.Event(), threading.Event()

    async def stay() -> None:
        has_begun.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                late_interrupt()
                await trio.to_thread.run_sync(may_end.wait, WAIT)

    b.submit(stay)
    assert has_begun.wait(WAIT)
    with pytest.raises(KeyboardInterrupt):
        b.close()
    assert repr(b) == f"<BlockingDevice <Device staying/{NAME}, ready, generation 1>, closing>"
    may_end.set()
    b.close()
    assert repr(b) == f"<BlockingDevice <Device staying/{NAME}, closed, generation 1>>"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_ctrl_c_cancels_calls_of_a_namespace(is_interrupted: bool) -> None:
    """The main thread calls a namespace of a run in another thread."""
    made: Future[ArrayApi] = Future()
    stop: Future[Callable[[], None]] = Future()

    async def main() -> None:
        async with ta.open_system("s") as system, system.open_device(NAME, options=INLINE) as device:
            done, token = trio.Event(), trio.lowlevel.current_trio_token()
            stop.set_result(lambda: token.run_sync_soon(done.set))
            made.set_result(array_api(device))
            await done.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    task = Task(interrupt)
    try:
        xp = made.result(WAIT)
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                xp.call("wait", task.run)
            assert task.has_ended.is_set()
        assert np.asarray(xp.asarray([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]
    finally:
        stop.result(WAIT)()
        thread.join()
    assert "asarray: this namespace is closed, or its Trio run has ended" in refused(xp.asarray, [1.0])


# Its end


def test_after_the_close() -> None:
    b = ta.blocking(NAME, options=INLINE)
    x, array = b.wait(b.device.put(np.ones(2))), b.xp.asarray([1.0])
    b.close()
    assert not is_running(b.system.name)
    for ask in (
        lambda: b.get(x),
        lambda: b.submit(x + x),
        lambda: b.wait(never_run()),
        lambda: b.get(array),
    ):
        assert "this blocking device is closed, or its Trio run has ended; make another" in refused(ask)
    assert "this namespace is closed, or its Trio run has ended" in refused(lambda: array + 1)
    with pytest.raises(RuntimeError, match=r"^with: this blocking device is closed"), b:
        pass
    b.close()
    assert repr(b) == f"<BlockingDevice <Device {b.device.path}, closed, generation 1>>"


def test_close_cancels_the_work_in_flight() -> None:
    b, task, asked = ta.blocking(NAME, options=INLINE), Task(), Task()
    future = b.submit(task.run)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(refused, b.wait, asked.run)
        assert task.has_begun.wait(WAIT)
        assert asked.has_begun.wait(WAIT)
        b.close()
        assert "wait: this blocking device is closed" in told.result(WAIT)
    assert task.has_ended.is_set()
    with pytest.raises(CancelledError):
        future.result(0)


def test_close_cancels_a_group_of_tasks(own: BlockingDevice) -> None:
    tasks = [Task(), Task()]

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task.run)

    future = own.submit(both)
    assert all(task.has_begun.wait(WAIT) for task in tasks)
    own.close()
    assert future.cancelled()


def test_a_task_submitted_while_it_closes(own: BlockingDevice) -> None:
    """The run takes no more tasks, although it has not ended."""
    told: Future[Future[None]] = Future()

    async def late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            # The nursery is closed when its last task has ended; this is later.
            call_soon = trio.lowlevel.current_trio_token().run_sync_soon
            call_soon(lambda: call_soon(lambda: told.set_result(own.submit(trio.sleep, 0))))

    own.submit(late)
    own.wait(trio.sleep, 0)
    own.close()
    with pytest.raises((CancelledError, RuntimeError)):
        told.result(WAIT).result(WAIT)


def test_devices_that_cannot_be_opened() -> None:
    with pytest.raises(ValueError, match="nothing"):
        ta.blocking("nothing")
    with pytest.raises(TypeError, match="options must be DeviceOptions"):
        ta.blocking(NAME, options={})  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        ta.blocking(NAME, name="a/b")


def test_a_run_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio needs descriptors, which a process may have no more of."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(trio, "run", fail)
    with pytest.raises(OSError, match="Too many open files"):
        ta.blocking(NAME)


def test_the_end_of_its_run_is_reported() -> None:
    b = ta.blocking(NAME, options=INLINE)

    async def fail() -> None:
        raise KeyError("mine")

    b.wait(_start_soon, fail)
    wait_for_end(b.system.name)
    with pytest.raises(RuntimeError, match="its Trio run has ended") as error:
        b.wait(trio.sleep, 0)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="mine"):
        b.close()
    b.close()


async def _start_soon(function: Callable[[], Awaitable[None]]) -> None:
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None
    nursery.start_soon(function)


# A device that the program has dropped


def collect_in_this_thread(device: BlockingDevice) -> Callable[[], object]:
    return gc.collect


def collect_in_its_thread(device: BlockingDevice) -> Callable[[], object]:
    async def current_token() -> trio.lowlevel.TrioToken:
        await trio.lowlevel.checkpoint()
        return trio.lowlevel.current_trio_token()

    token = device.wait(current_token)
    return lambda: token.run_sync_soon(gc.collect)


@pytest.mark.parametrize("collector_of", [collect_in_this_thread, collect_in_its_thread])
def test_a_dropped_device_is_closed(
    collector_of: Callable[[BlockingDevice], Callable[[], object]],
) -> None:
    b = ta.blocking(NAME, options=INLINE, name="dropped")
    assert float(b.xp.sum(b.xp.ones(3))) == 3.0
    x, collect = b.wait(b.device.put(np.ones(2))), collector_of(b)
    device, weak = b.device, weakref.ref(b)
    del b
    collect()
    wait_for_end("dropped")
    assert weak() is None
    assert "closed" in repr(device)
    assert x.shape == (2,)


def test_opening_a_device_closes_dropped_ones() -> None:
    b = ta.blocking(NAME, options=INLINE, name="first")
    for name in ("second", "third"):
        b = ta.blocking(NAME, options=INLINE, name=name)
    wait_for_end("first")
    b.close()
    gc.collect()
    wait_for_end("second")


def test_arrays_and_namespaces_keep_a_device() -> None:
    array = ta.blocking(NAME, options=INLINE, name="of an array").xp.ones(2)
    xp = ta.blocking(NAME, options=INLINE, name="of a namespace").xp
    gc.collect()
    assert np.asarray(array + 1).tolist() == np.asarray(xp.asarray([1.0, 1.0]) + 1).tolist() == [2.0, 2.0]
    del array, xp
    gc.collect()
    wait_for_end("of an array")
    wait_for_end("of a namespace")


def test_tasks_keep_a_device() -> None:
    may_end = threading.Event()
    future = ta.blocking(NAME, options=INLINE, name="busy").submit(trio.to_thread.run_sync, may_end.wait)
    gc.collect()
    may_end.set()
    assert future.result(WAIT)
    gc.collect()
    wait_for_end("busy")


@pytest.mark.parametrize("place", ["result", "add_done_callback"])
def test_ctrl_c_while_waiting_for_a_lock(
    b: BlockingDevice, x: ta.AccelRef, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Between the lock and the body of its `with`, so that nothing else releases the lock."""
    enter = threading.Condition.__enter__

    def enter_and_stop(self: threading.Condition) -> bool:
        entered = enter(self)
        if sys._getframe(1).f_code.co_name == place and threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            raise KeyboardInterrupt
        return entered

    monkeypatch.setattr(threading.Condition, "__enter__", enter_and_stop)
    with pytest.raises(KeyboardInterrupt):
        _ = b.get(x) if place == "result" else ta.blocking(NAME)
    assert b.submit(x.to_host).result(10).shape == b.get(x).shape
