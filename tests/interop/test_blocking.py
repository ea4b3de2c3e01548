"""A device for code that blocks: results, Ctrl-C, places where it refuses, its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import ArrayApi, BlockingDevice, array_api

pytestmark = pytest.mark.machine

WAIT = 20.0  # seconds, for what happens in an instant
RNG = np.random.default_rng(0)
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("tests.blocking", default="of the run")


@pytest.fixture(scope="module")
def b() -> Generator[BlockingDevice, None, None]:
    with ta.blocking(NAME, options=INLINE) as opened:
        # Libraries have threads, which stay from their first use on.
        x = opened.wait(opened.device.put(np.eye(2)))
        opened.get(ta.linalg.qr(opened.wait(x @ x)))
        opened.get(opened.xp.asarray(x.shape) + 1)
        yield opened


@pytest.fixture
def own() -> Generator[BlockingDevice, None, None]:
    with ta.blocking(NAME, options=INLINE, name="own") as opened:
        yield opened


@pytest.fixture
def x(b: BlockingDevice) -> ta.AccelRef:
    return b.wait(b.device.put(RNG.normal(size=(3, 3))))


def late_interrupt() -> None:
    """Send a Ctrl-C that does not wake up the main thread, as one that arrives just before a wait."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def interrupt() -> None:
    """Send a Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


class Task:
    """A Trio task that waits, and the thread that it interrupts."""

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self.interrupt = interrupt
        self.has_begun = threading.Event()
        self.is_cancelled = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = threading.Event()

    async def run(self) -> None:
        try:
            self.has_begun.set()
            self.interrupt()
            await trio.sleep_forever()
        finally:
            self.is_cancelled.set()
            # A thread that has not waited for the end of the task would be ahead of it here.
            with trio.CancelScope(shield=True):
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            self.has_ended.set()


async def never_run() -> None:
    raise AssertionError


def refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        function(*args)
    assert type(error.value) is RuntimeError
    return str(error.value)


# Results


def test_results_are_those_of_numpy(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    w = b.xp.asarray(host) * 2
    np.testing.assert_allclose(b.get(x @ x), host @ host, rtol=1e-12)
    np.testing.assert_allclose(b.get(b.wait(x @ x)), host @ host, rtol=1e-12)
    np.testing.assert_allclose(b.get(w), host * 2)
    np.testing.assert_allclose(np.asarray(b.xp.sqrt(w * w) + 1), np.abs(host * 2) + 1)
    np.testing.assert_allclose(b.submit(x.to_host).result(WAIT), host)
    assert b.submit(x + x).result(WAIT).device is b.device


def test_a_call_with_several_results(b: BlockingDevice, x: ta.AccelRef) -> None:
    q, r = b.get(ta.linalg.qr(x))
    np.testing.assert_allclose(q @ r, b.get(x), rtol=1e-10)


def test_functions_get_their_arguments(b: BlockingDevice) -> None:
    async def joined(*parts: str) -> str:
        await trio.lowlevel.checkpoint()
        return "".join(parts)

    assert b.wait(joined, "a", "b") == b.submit(joined, "a", "b").result(WAIT) == "ab"
    assert b.wait(joined("c")) == "c"
    assert b.wait(b.device.statistics).generation == 1


def test_the_error_of_a_function_comes_as_it_is(b: BlockingDevice) -> None:
    async def fail(error: BaseException) -> None:
        raise error

    for error in (KeyError("mine"), CancelledError(), SystemExit(3), ExceptionGroup("two", [ValueError()])):
        with pytest.raises(type(error)) as raised:
            b.wait(fail, error)
        assert raised.value is error
    assert b.submit(fail, KeyError("mine")).exception(WAIT).args == ("mine",)


async def numbers() -> AsyncGenerator[int, None]:
    yield 1


# None is followed by a warning that a call or a coroutine was never awaited: warnings are errors here.
@pytest.mark.parametrize("ask", ["wait", "submit"])
def test_what_cannot_be_awaited(b: BlockingDevice, x: ta.AccelRef, ask: str) -> None:
    for wrong in (3, None, np.ones(2), x, b, numbers(), iter([x]), [x + 1.0]):
        with pytest.raises(TypeError) as error:
            getattr(b, ask)(wrong)
        text = f"{ask}: pass a call, or an async function and its arguments, got {wrong!r}"
        assert str(error.value) == text
    with pytest.raises(TypeError, match=r"got <Call linalg\.matmul, not run> with arguments$"):
        getattr(b, ask)(x @ x, 3)
    with pytest.raises(TypeError, match=r"got <coroutine object .*> with arguments$"):
        getattr(b, ask)(never_run(), never_run())


def test_functions_that_are_not_async(b: BlockingDevice) -> None:
    for function, args in ((len, ["abc"]), (numbers, []), (lambda: iter([1]), []), (range, [3])):
        with pytest.raises(TypeError, match=r"wait: <.*> is not an async function: it has returned"):
            b.wait(function, *args)


def test_get_takes_arrays_alone(b: BlockingDevice, x: ta.AccelRef) -> None:
    for wrong in (np.ones(2), never_run(), [x + 1.0], iter([x]), numbers(), b.submit(trio.sleep, 0)):
        with pytest.raises(TypeError) as error:
            b.get(wrong)
        text = f"get: array must be an array of a device, or a call that makes one, got {wrong!r}"
        assert str(error.value) == f"{text}; use wait for other awaitables"


def test_generators(b: BlockingDevice, x: ta.AccelRef) -> None:
    """They block where they are read: in a plain thread, and not in a Trio task."""

    def rows() -> Iterator[Any]:
        for row in range(3):
            yield b.get(x[row])

    np.testing.assert_array_equal(list(rows()), b.get(x))

    async def read() -> str:
        return refused(next, rows())

    assert "would block the Trio loop" in b.wait(read)

    async def collect() -> list[int]:
        return [number async for number in numbers()]

    assert b.wait(collect) == [1]


def test_it_stays_in_its_process(b: BlockingDevice) -> None:
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a BlockingDevice belongs to its process .*: ta\.blocking\("):
            copy_of(b)


def test_context_variables_of_the_caller(b: BlockingDevice) -> None:
    async def seen() -> str:
        return VARIABLE.get()

    token = VARIABLE.set("of the caller")
    try:
        assert b.wait(seen) == "of the caller"
    finally:
        VARIABLE.reset(token)
    assert b.wait(seen) == "of the run"


def test_threads(b: BlockingDevice, x: ta.AccelRef) -> None:
    host = b.get(x)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda factor: b.get(x * float(factor)), range(40)))
    for factor, result in enumerate(results):
        np.testing.assert_allclose(result, host * factor)


def test_another_device_of_the_system(own: BlockingDevice) -> None:
    second = own.wait(own.system.open_device(NAME, options=INLINE, name="second"))
    assert own.get(own.wait(second.put(np.ones(2))) + 1).tolist() == [2.0, 2.0]


# Cancellation


def test_a_future_cancels_its_task(b: BlockingDevice) -> None:
    task = Task()
    future = b.submit(task.run)
    assert task.has_begun.wait(WAIT)
    assert future.cancel()
    done, _ = concurrent.futures.wait([future], WAIT)
    assert done == {future}
    assert task.has_ended.is_set()


def test_a_future_that_is_done_is_not_cancelled(b: BlockingDevice) -> None:
    future = b.submit(trio.sleep, 0)
    assert future.result(WAIT) is None
    assert not future.cancel()


def test_asyncio(b: BlockingDevice, x: ta.AccelRef) -> None:
    task = Task()

    async def main() -> None:
        host = await asyncio.wrap_future(b.submit((x @ x).to_host))
        np.testing.assert_allclose(host, b.get(x) @ b.get(x), rtol=1e-12)
        waits = asyncio.wait_for(asyncio.wrap_future(b.submit(task.run)), 0.02)
        with pytest.raises(TimeoutError):
            await waits

    asyncio.run(main())
    assert task.has_ended.wait(WAIT)


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
    host[:] = 0  # nothing reads it any more
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
    out[:] = host[:] = 0  # nothing reads or writes them any more
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
    may_end.set()
    b.close()


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


# Where it refuses


async def test_in_a_trio_task(b: BlockingDevice, x: ta.AccelRef) -> None:
    for ask in (
        lambda: b.wait(x @ x),
        lambda: b.get(x @ x),
        lambda: b.wait(trio.sleep, 0),
        lambda: b.wait(never_run()),
        lambda: b.xp.asarray([1.0]),
        b.close,
    ):
        assert "would block the Trio loop" in refused(ask)
    assert "open a device: await system.open_device(...)" in refused(ta.blocking, NAME)
    # One that does not wait may be called.
    future = b.submit(x @ x)
    await trio.to_thread.run_sync(future.result)
    assert (await trio.to_thread.run_sync(b.get, x @ x)).shape == (3, 3)


def test_in_a_task_and_in_a_callback_of_its_own_run(b: BlockingDevice, x: ta.AccelRef) -> None:
    async def ask() -> str:
        return refused(b.get, x)

    assert "get: this blocking device waits for its device, which would block" in b.wait(ask)
    told: Future[str] = Future()
    may_end = threading.Event()
    future = b.submit(trio.to_thread.run_sync, may_end.wait, WAIT)
    future.add_done_callback(lambda _: told.set_result(refused(b.get, x)))
    may_end.set()
    assert "would block the Trio loop" in told.result(WAIT)


def test_in_a_listener_of_progress(b: BlockingDevice, x: ta.AccelRef) -> None:
    told: list[str] = []

    async def work() -> None:
        with ta.track_progress("mine") as report:
            report(1)

    with ta.watch_progress(lambda event: told.append(refused(b.get, x))):
        b.wait(work)
    assert len(told) == 2
    assert all(
        "get: this blocking device waits for its device, which would block the Tr" in one for one in told
    )


async def test_a_refused_call_can_be_awaited_as_the_error_says(own: BlockingDevice) -> None:
    x = await trio.to_thread.run_sync(own.wait, own.device.put(np.ones(2)))
    call = x + 1.0
    assert "await the call itself, or call it in a thread" in refused(own.get, call)
    assert (await trio.to_thread.run_sync(own.get, call)).tolist() == [2.0, 2.0]


def test_in_a_worker_thread_of_its_own_run(b: BlockingDevice, x: ta.AccelRef) -> None:
    assert b.wait(trio.to_thread.run_sync, b.get, x).shape == (3, 3)
    told = b.wait(trio.to_thread.run_sync, refused, b.close)
    assert told == "close: a task of this blocking device waits for this thread; close it in another thread"
    assert b.get(x).shape == (3, 3)


def test_in_a_worker_thread_of_another_run(b: BlockingDevice, x: ta.AccelRef) -> None:
    async def other() -> tuple[float, tuple[int, ...]]:
        return await trio.to_thread.run_sync(lambda: (float(b.xp.sum(b.xp.ones(3))), b.get(x).shape))

    assert trio.run(other) == (3.0, (3, 3))


def test_the_array_of_another_device(b: BlockingDevice, own: BlockingDevice, x: ta.AccelRef) -> None:
    theirs = b.xp.asarray([1.0])
    for ask in (
        lambda: own.get(x),
        lambda: own.get(x @ x),
        lambda: own.get(theirs),
        lambda: own.wait(x + x),
        lambda: own.xp.sqrt(theirs),
    ):
        assert "belongs to another thread or Trio run" in refused(ask)
    with pytest.raises(ValueError, match=f"x2 is on blocking/{NAME}, this runs on own/{NAME}"):
        own.xp.asarray([1.0]) + theirs
    # Neither is worse for it.
    assert own.get(own.xp.asarray([1.0])).tolist() == b.get(theirs).tolist() == [1.0]


def test_a_fork_is_refused(b: BlockingDevice, x: ta.AccelRef, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scripts have real ones.
    monkeypatch.setattr(b._calls, "_process", -1)
    for ask in (lambda: b.get(x @ x), lambda: b.submit(x @ x), lambda: b.wait(trio.sleep, 0)):
        assert "belongs to the process that this one was forked from" in refused(ask)
    b.close()
    monkeypatch.undo()
    assert b.get(x).shape == (3, 3)


# Its end


def test_after_the_close() -> None:
    b = ta.blocking(NAME, options=INLINE)
    x, array = b.wait(b.device.put(np.ones(2))), b.xp.asarray([1.0])
    b.close()
    assert not b._thread.is_alive()
    for ask in (
        lambda: b.get(x),
        lambda: b.submit(x + x),
        lambda: b.wait(never_run()),
        lambda: b.get(array),
    ):
        assert "this blocking device is closed, or its Trio run has ended; make another" in refused(ask)
    assert "this namespace is closed, or its Trio run has ended" in refused(lambda: array + 1)
    b.close()
    assert repr(b) == f"<BlockingDevice <Device blocking/{NAME}, closed, generation 1>>"


def test_close_cancels_what_is_in_flight() -> None:
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
            # The nursery is closed when its last task has ended; this comes after it.
            call_soon = own._calls.call_soon
            call_soon(lambda: call_soon(lambda: told.set_result(own.submit(trio.sleep, 0))))

    own.submit(late)
    own.wait(trio.sleep, 0)
    own.close()
    with pytest.raises((CancelledError, RuntimeError)):
        told.result(WAIT).result(WAIT)


def test_what_cannot_be_opened() -> None:
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


def test_the_end_of_its_run_is_told() -> None:
    b = ta.blocking(NAME, options=INLINE)

    async def fail() -> None:
        raise KeyError("mine")

    b.wait(_start_soon, b, fail)
    b._thread.join(WAIT)
    with pytest.raises(RuntimeError, match="its Trio run has ended") as error:
        b.wait(trio.sleep, 0)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="mine"):
        b.close()
    b.close()


async def _start_soon(b: BlockingDevice, function: Callable[[], Awaitable[None]]) -> None:
    b._tasks.start_soon(function)
