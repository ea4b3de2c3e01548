"""A lost context: enqueued work is done with the error, and nothing else runs."""

from __future__ import annotations

import threading
import time

import pytest

from trio_accel.backends.base import ContextPoisonedError
from trio_accel.backends.base.contract.ops import FillSpec


def test_streams_report_it_and_run_nothing_more(backend):
    device = backend.open_device(0, memory_limit=None)
    streams = [device.open_stream(f"stream {number}") for number in range(2)]
    memory = device.open_library("memory")
    assert [stream.failure for stream in streams] == [None, None]
    before = streams[0].record()
    streams[0].synchronize()
    device.poison("a stray write")
    event = streams[0].record()
    streams[1].wait(event)
    other = streams[1].record()
    deadline = time.monotonic() + 10
    while not (event.is_done and other.is_done) and time.monotonic() < deadline:
        time.sleep(0.001)
    for reported in (event.error, other.error, streams[0].failure, device.open_stream("late").failure):
        assert isinstance(reported, ContextPoisonedError)
        assert "a stray write" in str(reported)
    assert before.error is None
    assert streams[0].failure is not streams[0].failure
    device.allocate(1, 8)
    with pytest.raises(ContextPoisonedError):
        memory.enqueue(_fill(), streams[0])
    assert device.close(10)


def _fill() -> FillSpec:
    from trio_accel.backends.base import DType
    from trio_accel.backends.base.contract.ops import ArraySpec

    return FillSpec(1, ArraySpec(1, 0, DType.float64, (1,), (8,)))


def test_one_device_is_not_another(backend):
    first, second = (backend.open_device(0, memory_limit=None) for _ in range(2))
    first.poison("gone")
    stream = second.open_stream("healthy")
    done = threading.Event()

    class Ring:
        def ring(self) -> None:
            done.set()

    stream.notify(stream.record(), Ring())
    assert done.wait(10)
    assert stream.failure is None
    assert first.close(10)
    assert second.close(10)
