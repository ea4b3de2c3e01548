"""A stream under a hold."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from trio_accel.backends.base import ContextPoisonedError, DType
from trio_accel.backends.base.contract.ops import CopySpec, CopyToHostSpec, FillSpec


@pytest.fixture
def other(rig):
    return rig.device.open_stream("other")


def fill(rig, value, array, stream=None):
    rig.enqueue("memory", FillSpec(value, array), stream)


def test_later_work_runs_after_the_release_and_earlier_work_at_once(rig, other, make_bell):
    array, seen = rig.put(np.zeros(10)), rig.empty((10,), DType.float64)
    fill(rig, 1.0, array)
    before = rig.stream.record()
    hold = rig.stream.hold()
    fill(rig, 2.0, array)
    behind = rig.stream.record()
    bell = make_bell(behind)
    rig.stream.notify(behind, bell)
    other.wait(before)
    rig.enqueue("memory", CopySpec(array, seen), other)
    rig.finish(other)  # other streams continue
    assert before.is_done
    assert not behind.is_done
    assert bell.rings == []
    hold.release()
    bell.wait()
    assert (behind.is_done, behind.error) == (True, None)
    assert (rig.get(seen) == 1.0).all()
    assert (rig.get(array) == 2.0).all()


def test_a_release_counts_once_and_may_precede_the_hold(rig, make_bell):
    array = rig.put(np.zeros(10))
    hold = rig.stream.hold()
    hold.release()
    hold.release()
    fill(rig, 1.0, array)
    rig.finish(rig.stream)
    second = rig.stream.hold()
    fill(rig, 2.0, array)
    event = rig.stream.record()
    bell = make_bell(event)
    rig.stream.notify(event, bell)
    hold.release()  # of the first: the second still holds
    assert not event.is_done
    threads = [threading.Thread(target=second.release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bell.wait()
    assert (rig.get(array) == 2.0).all()


def test_a_stream_waiting_for_a_held_stream_is_held_too(rig, other):
    array = rig.put(np.zeros(10))
    hold = rig.stream.hold()
    event = rig.stream.record()
    other.wait(event)
    fill(rig, 3.0, array, other)
    behind = other.record()
    assert not behind.is_done
    hold.release()
    rig.finish(other)
    assert behind.is_done
    assert (rig.get(array) == 3.0).all()


def test_a_held_device_closes_within_its_grace(backend):
    device = backend.open_device(0, memory_limit=None)
    stream = device.open_stream("held")
    hold = stream.hold()
    event = stream.record()
    assert not device.close(0.05)
    assert not event.is_done
    hold.release()
    assert device.close(30)
    assert event.is_done
    with pytest.raises(RuntimeError, match="closed"):
        stream.hold()


def test_a_context_is_lost_while_a_stream_is_held(backend):
    device = backend.open_device(0, memory_limit=None)
    stream = device.open_stream("held")
    hold = stream.hold()
    event = stream.record()
    device.poison("a stray write")
    assert isinstance(stream.failure, ContextPoisonedError)  # known at once
    for refused in (stream.hold, stream.crash):
        with pytest.raises(ContextPoisonedError, match="a stray write"):
            refused()
    hold.release()
    assert device.close(30)
    assert isinstance(event.error, ContextPoisonedError)


def test_nothing_crashes_after_a_lost_context(backend):
    device = backend.open_device(0, memory_limit=None)
    stream = device.open_stream("held")
    hold = stream.hold()
    stream.crash()
    device.poison("gone before")
    hold.release()
    assert device.close(30)


def test_a_device_that_works_without_end_does_so_until_the_release(rig, other):
    array, elsewhere = rig.put(np.zeros(10)), rig.put(np.zeros(10))
    rig.finish(rig.stream)
    hold = rig.device.spin(rig.stream)
    fill(rig, 2.0, array)
    behind = rig.stream.record()
    fill(rig, 1.0, elsewhere, other)
    rig.finish(other)  # other streams continue
    assert not behind.is_done
    hold.release()
    rig.finish(rig.stream)
    assert (behind.is_done, behind.error) == (True, None)
    assert (rig.get(array) == 2.0).all()
    assert (rig.get(elsewhere) == 1.0).all()


def test_memory_under_endless_writes_changes(rig, other):
    array, untouched = (rig.put(np.zeros(512, np.uint32)) for _ in range(2))
    rig.finish(rig.stream)
    hold = rig.device.spin(rig.stream, array.block)
    found = set()
    deadline = time.monotonic() + 30
    while len(found) < 3 and time.monotonic() < deadline:
        host = np.empty(512, np.uint32)
        rig.enqueue("memory", CopyToHostSpec(host, array), other)
        rig.finish(other)
        found.add(host.tobytes())
    hold.release()
    rig.finish(rig.stream)
    assert len(found) >= 3
    assert (rig.get(untouched) == 0).all()
    with pytest.raises(TypeError, match="stream"):
        rig.device.spin(None)


def test_memory_comes_and_goes_while_a_stream_is_held(rig):
    """Who lets the stream go is the one who allocates and frees: it must not wait for the stream."""
    hold = rig.stream.hold()
    event = rig.stream.record()
    for block in range(10**6, 10**6 + 3):
        rig.device.allocate(block, 300 << 20)  # in a chunk of its own
        rig.device.free(block)
    rig.device.register_host(host := np.zeros(1 << 16, np.uint8))
    assert not event.is_done
    hold.release()
    rig.finish(rig.stream)
    rig.device.unregister_host(host)
