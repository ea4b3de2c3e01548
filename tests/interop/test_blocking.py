"""A device for code that blocks: results, and places where it refuses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import pickle
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from blocking_tasks import WAIT, Task, never_run, refused
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import BlockingDevice

pytestmark = pytest.mark.machine

RNG = np.random.default_rng(0)
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("tests.blocking", default="of the run")


# Results


def test_results_match_numpy(b: BlockingDevice, x: ta.AccelRef) -> None:
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


def test_layouts_of_calls_before_they_run(b: BlockingDevice, x: ta.AccelRef) -> None:
    """In any thread; a run of Trio must not block."""
    host = b.get(x)
    product = x @ x
    assert (product.shape, product.dtype) == (host.shape, "float64")
    w, v = ta.linalg.eigh(x + x.T)
    np.testing.assert_allclose(b.get(v * w @ v.T), host + host.T, atol=1e-10)
    with ThreadPoolExecutor(1) as pool:
        flat = pool.submit(lambda: product.reshape(-1)).result(WAIT)
        assert pool.submit(lambda: flat.shape).result(WAIT) == (host.size,)
    with pytest.raises(ValueError, match=r"linalg\.matmul: the last axis of a"):
        _ = (x @ x[:1]).shape

    async def in_other_run() -> None:
        with pytest.raises(RuntimeError, match="shape: this blocking device waits for its device"):
            _ = (x + x).shape

    trio.run(in_other_run)
    np.testing.assert_allclose(b.get(flat), (host @ host).ravel())


def test_functions_get_their_arguments(b: BlockingDevice) -> None:
    async def joined(*parts: str) -> str:
        await trio.lowlevel.checkpoint()
        return "".join(parts)

    assert b.wait(joined, "a", "b") == b.submit(joined, "a", "b").result(WAIT) == "ab"
    assert b.wait(joined("c")) == "c"
    assert b.wait(b.device.statistics).generation == 1


def test_the_error_of_a_function_is_raised_unchanged(b: BlockingDevice) -> None:
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
def test_objects_that_cannot_be_awaited(b: BlockingDevice, x: ta.AccelRef, ask: str) -> None:
    for wrong in (3, None, np.ones(2), b, numbers(), iter([x]), [x + 1.0]):
        with pytest.raises(TypeError) as error:
            getattr(b, ask)(wrong)
        text = f"{ask}: pass a call, or an async function and its arguments, got {wrong!r}"
        assert str(error.value) == text
    with pytest.raises(TypeError, match=r"got <Call linalg\.matmul, not run> with arguments$"):
        getattr(b, ask)(x @ x, 3)
    with pytest.raises(TypeError, match=r"got <coroutine object .*> with arguments$"):
        getattr(b, ask)(never_run(), never_run())


def test_synchronous_functions(b: BlockingDevice) -> None:
    for function, args in ((len, ["abc"]), (numbers, []), (lambda: iter([1]), []), (range, [3])):
        with pytest.raises(TypeError, match=r"wait: <.*> is not an async function: it has returned"):
            b.wait(function, *args)


def test_get_accepts_only_arrays(b: BlockingDevice, x: ta.AccelRef) -> None:
    for wrong in (np.ones(2), never_run, numbers(), b.submit(trio.sleep, 0)):
        for given in (wrong, [wrong, x + 1.0]):
            with pytest.raises(TypeError) as error:
                b.get(given)
            text = (
                "get: array must be an array of a device, a call or coroutine that makes one, or a list, "
                "tuple or dict of these"
            )
            assert str(error.value) == f"{text}, got {wrong!r}; use wait for other awaitables"


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


def test_a_finished_future_is_not_cancelled(b: BlockingDevice) -> None:
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


# Its refusals


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


async def test_a_refused_call_can_be_awaited_as_the_error_advises(own: BlockingDevice) -> None:
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
        lambda: own.xp.asarray(x),
        lambda: own.wait(x.copy_to, own.device),
    ):
        assert "belongs to another thread or Trio run" in refused(ask)
    with pytest.raises(ValueError, match=f"x2 is on {b.device.path}, this runs on own/{NAME}"):
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
