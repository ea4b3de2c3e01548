"""A device for code that blocks: errors that handlers of signals raise, such as a deadline by SIGALRM."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

import numpy as np
import pytest
import trio
from blocking_tasks import WAIT, Task
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import BlockingDevice

pytestmark = pytest.mark.machine


class OwnError(BaseException):
    """An error that only programs know."""


ERRORS = (
    TimeoutError,
    concurrent.futures.CancelledError,
    RuntimeError,
    ValueError,
    StopIteration,
    AttributeError,
    ta.DeviceLostError,
    SystemExit,
    KeyboardInterrupt,
    OwnError,
)
Alarm = Callable[[BaseException], Callable[[], None]]


@pytest.fixture
def alarm() -> Generator[Alarm, None, None]:
    """Make functions with a handler raise an error in the main thread."""
    errors: list[BaseException] = []

    def handle(number: int, frame: FrameType | None) -> None:
        raise errors.pop(0)

    def make(error: BaseException) -> Callable[[], None]:
        def send() -> None:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGUSR1)

        return send

    earlier = signal.signal(signal.SIGUSR1, handle)
    yield make
    signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("way", ["wait", "get", "xp"])
def test_the_error_ends_the_wait_and_cancels_the_task(
    b: BlockingDevice, x: ta.AccelRef, alarm: Alarm, way: str, kind: type[BaseException]
) -> None:
    raised = kind("by a handler")
    task = Task(alarm(raised))
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: b.wait(task.run),
        "get": lambda: b.get(task.run()),
        "xp": lambda: b.xp.call("wait", task.run),
    }
    with pytest.raises(kind) as caught:
        calls[way]()
    assert caught.value is raised
    assert task.has_ended.is_set()
    assert b.get(x + 1.0).shape == (3, 3)


@pytest.mark.parametrize("way", ["wait", "get", "xp"])
def test_the_error_ends_a_wait_that_has_begun(b: BlockingDevice, alarm: Alarm, way: str) -> None:
    """A future's own wait with a limit ends by the same class of error as a deadline by SIGALRM."""
    raised = TimeoutError("by a handler")
    send, thread = alarm(raised), threading.get_ident()

    async def run() -> None:
        while sys._current_frames()[thread].f_code.co_name != "wait":  # noqa: ASYNC110  # see below
            await trio.sleep(0.001)  # clock: polls until the thread waits, because a frame sets no event
        send()
        with trio.move_on_after(WAIT):
            await trio.sleep_forever()

    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: b.wait(run),
        "get": lambda: b.get(run()),
        "xp": lambda: b.xp.call("wait", run),
    }
    with pytest.raises(TimeoutError) as caught:
        calls[way]()
    assert caught.value is raised


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError])
def test_a_second_error_ends_the_wait_for_the_task(
    b: BlockingDevice, alarm: Alarm, kind: type[BaseException]
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()
    first, second = alarm(kind("first")), alarm(kind("second"))

    async def stay() -> None:
        try:
            first()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                second()
                await trio.to_thread.run_sync(may_end.wait, WAIT)
            has_ended.set()

    with pytest.raises(kind, match="second"):
        b.wait(stay)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(WAIT)


@pytest.mark.parametrize("kind", ERRORS)
def test_the_error_ends_a_repr(
    b: BlockingDevice, monkeypatch: pytest.MonkeyPatch, alarm: Alarm, kind: type[BaseException]
) -> None:
    a = b.xp.ones(3)
    raised = kind("by a handler")
    task = Task(alarm(raised))
    monkeypatch.setattr(ta.AccelRef, "to_host", lambda _: task.run())
    with pytest.raises(kind) as caught:
        repr(a)
    assert caught.value is raised
    monkeypatch.undo()
    assert "1., 1., 1." in repr(a)


def test_a_lost_array_has_a_repr(b: BlockingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    a = b.xp.ones(3)

    async def lost(_: ta.AccelRef) -> np.ndarray:
        await trio.lowlevel.checkpoint()
        raise TimeoutError

    monkeypatch.setattr(ta.AccelRef, "to_host", lost)
    assert repr(a) == f"<Array float64 (3,) on {b.device.path}>"


def test_the_error_ends_a_close(alarm: Alarm) -> None:
    b = ta.blocking(NAME, options=INLINE)
    may_end, has_begun = threading.Event(), threading.Event()
    send = alarm(TimeoutError("by a handler"))

    async def stay() -> None:
        has_begun.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                send()
                await trio.to_thread.run_sync(may_end.wait, WAIT)

    b.submit(stay)
    assert has_begun.wait(WAIT)
    with pytest.raises(TimeoutError, match="by a handler"):
        b.close()
    may_end.set()
    b.close()
    assert "closed" in repr(b)


def test_the_error_ends_the_opening(monkeypatch: pytest.MonkeyPatch, alarm: Alarm) -> None:
    threads = set(threading.enumerate())
    task = Task(alarm(TimeoutError("by a handler")))
    monkeypatch.setattr(ta.System, "open_device", lambda *_, **__: task.run())
    with pytest.raises(TimeoutError, match="by a handler"):
        ta.blocking(NAME)
    assert task.has_ended.is_set()
    assert {thread for thread in threading.enumerate() if "trio_accel" in thread.name} <= threads


def test_the_own_timeout_of_a_task_is_raised_unchanged(b: BlockingDevice) -> None:
    own = TimeoutError("its own")

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise own

    with pytest.raises(TimeoutError) as caught:
        b.wait(fail)
    assert caught.value is own
    with pytest.raises(TimeoutError) as caught:
        b.get(fail())
    assert caught.value is own
