"""Streams beyond the protocol: work of the test's own, held up and let go at will."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from functools import partial

import numpy as np
import pytest

from trio_accel.backends.cpu.runtime._stream import CpuStream

pytestmark = [pytest.mark.no_device, pytest.mark.machine]

PATIENCE = 30


class Gate:
    """Work that waits until it is let go."""

    def __init__(self):
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self._open.wait(PATIENCE)

    def open(self):
        self._open.set()


@pytest.fixture
def open_stream():
    streams = []

    def open_(name="stream"):
        streams.append(CpuStream(name))
        return streams[-1]

    yield open_
    for stream in streams:
        stream.close()
        stream.join()


def fail(error):
    raise error


def test_the_thread_starts_with_the_first_work_and_bears_the_name(open_stream):
    stream = open_stream("device/blas")
    assert "device/blas" not in {thread.name for thread in threading.enumerate()}
    seen = []
    stream.enqueue(lambda: seen.append(threading.current_thread()))
    stream.synchronize()
    (thread,) = seen
    assert thread.name == "device/blas"
    assert thread.daemon
    stream.close()
    stream.join()
    assert not thread.is_alive()


def test_without_a_thread_to_be_had_nothing_is_enqueued(open_stream, monkeypatch):
    stream, ran = open_stream(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            stream.enqueue(lambda: ran.append("lost"))
    stream.enqueue(lambda: ran.append("kept"))
    stream.synchronize()
    assert ran == ["kept"]


def test_work_runs_one_after_the_other_in_order(open_stream):
    stream, gate, ran = open_stream(), Gate(), []
    stream.enqueue(gate)
    for number in range(1000):
        stream.enqueue(lambda number=number: ran.append(number))
    event = stream.record()
    assert gate.entered.wait(PATIENCE)
    assert (ran, event.is_done) == ([], False)
    gate.open()
    stream.synchronize()
    assert (ran, event.is_done) == (list(range(1000)), True)


def test_an_error_is_reported_only_by_the_next_event(open_stream):
    stream, ran = open_stream(), []
    before = stream.record()
    first, second = OverflowError("first"), OverflowError("second")
    stream.enqueue(lambda: fail(first))
    stream.enqueue(lambda: ran.append("after"))
    stream.enqueue(lambda: fail(second))
    event, next_event = stream.record(), stream.record()
    stream.enqueue(lambda: ran.append("later"))
    last = stream.record()
    stream.synchronize()
    assert [point.error for point in (before, event, next_event, last)] == [None, first, None, None]
    assert ran == ["after", "later"]


def test_synchronize_leaves_the_error_for_the_next_event(open_stream):
    stream, error = open_stream(), ValueError("kept")
    stream.enqueue(lambda: fail(error))
    stream.synchronize()
    event = stream.record()
    stream.synchronize()
    assert event.error is error


def test_a_base_exception_does_not_end_the_stream(open_stream):
    stream = open_stream()
    stream.enqueue(lambda: fail(SystemExit(3)))
    event = stream.record()
    stream.synchronize()
    assert isinstance(event.error, RuntimeError)
    assert isinstance(event.error.__cause__, SystemExit)


def test_a_stream_waits_for_an_event_of_another(open_stream):
    first, second, gate, ran = open_stream("first"), open_stream("second"), Gate(), []
    first.enqueue(gate)
    first.enqueue(lambda: ran.append("first"))
    event = first.record()
    second.enqueue(lambda: ran.append("before"))
    reached = second.record()
    second.wait(event)
    second.enqueue(lambda: ran.append("second"))
    bell = threading.Event()
    second.notify(reached, _Ring(bell))
    assert bell.wait(PATIENCE)
    assert ran == ["before"]
    gate.open()
    second.synchronize()
    assert ran == ["before", "first", "second"]


class _Ring:
    def __init__(self, event):
        self.ring = event.set


def test_an_error_stays_with_its_own_stream(open_stream):
    first, second, gate = open_stream("first"), open_stream("second"), Gate()
    first.enqueue(gate)
    first.enqueue(lambda: fail(ValueError("of the first")))
    event = first.record()
    second.wait(event)
    after = second.record()
    gate.open()
    second.synchronize()
    assert isinstance(event.error, ValueError)
    assert after.error is None


def test_streams_that_wait_for_one_another_in_turn_go_on(open_stream):
    first, second, ran = open_stream("first"), open_stream("second"), []
    for number in range(200):
        first.enqueue(lambda number=number: ran.append(number))
        second.wait(first.record())
        second.enqueue(lambda number=number: ran.append(-number))
        first.wait(second.record())
    first.synchronize()
    assert ran == [sign * number for number in range(200) for sign in (1, -1)]


def test_waiting_for_a_closed_stream(open_stream):
    first, second, gate, ran = open_stream("first"), open_stream("second"), Gate(), []
    first.enqueue(gate)
    event = first.record()
    first.close()
    second.wait(event)
    second.enqueue(lambda: ran.append("second"))
    assert gate.entered.wait(PATIENCE)
    assert ran == []
    gate.open()
    second.synchronize()
    assert ran == ["second"]


def test_the_bell_rings_from_the_streams_thread(open_stream, make_bell):
    stream, gate = open_stream("ringer"), Gate()
    stream.enqueue(gate)
    event = stream.record()
    bell = make_bell(event)
    stream.notify(event, bell)
    assert bell.rings == []
    gate.open()
    bell.wait()
    stream.synchronize()
    assert bell.rings == [True]
    assert bell.thread == "ringer"


def test_each_bell_rings_once_whoever_comes_first(open_stream, make_bell):
    stream = open_stream()
    bells = []
    for _ in range(2000):
        event = stream.record()
        bells.append(make_bell(event))
        stream.notify(event, bells[-1])  # races with the stream's thread
    stream.synchronize()
    assert all(bell.rings == [True] for bell in bells)


def test_two_streams_run_at_the_same_time(open_stream):
    meeting = threading.Barrier(2)  # neither passes it without the other
    streams = [open_stream(name) for name in ("first", "second")]
    for stream in streams:
        stream.enqueue(lambda: meeting.wait(PATIENCE))
    for event, stream in [(stream.record(), stream) for stream in streams]:
        stream.synchronize()
        assert event.error is None


def test_nothing_of_the_work_is_kept_once_it_ran(open_stream, make_bell):
    stream = open_stream()

    class Held:
        def __call__(self):
            return self

    work, bell = Held(), make_bell()
    references = [weakref.ref(work), weakref.ref(bell)]
    stream.enqueue(work)
    event = stream.record()
    stream.notify(event, bell)
    stream.synchronize()
    del work, bell
    assert [reference() for reference in references] == [None, None]


def test_an_error_keeps_its_lines_but_not_the_works_locals(open_stream):
    stream = open_stream()

    class Array:
        pass

    array = Array()
    gone = weakref.ref(array)

    def kernel(held):
        try:
            fail(KeyError(str(type(held))))
        except KeyError as error:
            raise ValueError("the kernel failed") from error

    stream.enqueue(partial(kernel, array))
    event = stream.record()
    stream.synchronize()
    del array
    gc.collect()
    assert gone() is None
    assert event.error is not None
    text = "".join(traceback.format_exception(event.error))
    assert 'raise ValueError("the kernel failed")' in text
    assert "fail(KeyError(str(type(held))))" in text


def test_floating_point_trouble_is_a_result_and_no_warning(open_stream):
    stream, results = open_stream(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.enqueue(lambda: results.append(np.array([1e308]) * 10 / np.array([0.0])))
        event = stream.record()
        stream.synchronize()
    assert event.error is None
    assert np.isinf(results[0]).all()


def test_foreign_events_are_refused(open_stream):
    class Other:
        is_done, error = True, None

    with pytest.raises(TypeError, match="event"):
        open_stream().wait(Other())
    with pytest.raises(TypeError, match="event"):
        open_stream().notify(Other(), None)


def test_a_program_ends_while_a_stream_multiplies():
    """With plain NumPy in a thread it does not, because OpenBLAS then waits for its own threads for ever."""
    program = """
import sys, threading, numpy as np
from trio_accel.backends.cpu.runtime._stream import CpuStream

a, entered = np.ones((4000, 4000)), threading.Event()

def multiply():
    entered.set()
    a @ a

CpuStream("stream").enqueue(multiply)
assert entered.wait(30)
print("told", end="")
sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=PATIENCE, check=False, stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (3, b"told")
