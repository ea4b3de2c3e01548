from __future__ import annotations

import numpy as np
import pytest

from trio_accel import linalg
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import CopySpec, FillSpec, MatmulSpec


def test_work_runs_in_the_order_of_its_enqueueing(rig):
    x, one = rig.put(np.zeros(1000)), rig.put(np.ones(1000))
    expected = 0.0
    for step in range(50):
        rig.enqueue("blas", linalg.axpy.spec(step, one, x))
        rig.enqueue("blas", linalg.scal.spec(0.75, x))
        expected = (expected + step) * 0.75
    np.testing.assert_allclose(rig.get(x), expected, rtol=1e-12)


def test_an_event_is_done_after_all_earlier_work(rig, make_bell):
    a = rig.put(np.ones((700, 700)))
    out = rig.empty((700, 700), DType.float64)
    for _ in range(3):
        rig.enqueue("blas", MatmulSpec(a, a, out))
    event = rig.stream.record()
    bell = make_bell(event)
    rig.stream.notify(event, bell)
    bell.wait()
    assert bell.rings == [True]
    assert event.is_done
    assert event.error is None
    assert (rig.get(out) == 700.0).all()


def test_a_bell_on_a_done_event_rings_at_once(rig, make_bell):
    event = rig.stream.record()
    rig.stream.synchronize()
    assert event.is_done
    bell = make_bell(event)
    rig.stream.notify(event, bell)
    assert bell.rings == [True]


def test_every_bell_of_an_event_rings_once(rig, make_bell):
    a = rig.put(np.ones((500, 500)))
    rig.enqueue("blas", MatmulSpec(a, a, rig.empty((500, 500), DType.float64)))
    event = rig.stream.record()
    bells = [make_bell(event) for _ in range(5)]
    for bell in bells:
        rig.stream.notify(event, bell)
    for bell in bells:
        bell.wait()
    rig.stream.synchronize()
    assert [bell.rings for bell in bells] == [[True]] * 5


def test_a_stream_waits_for_another(rig):
    other = rig.device.open_stream("other")
    a = rig.put(np.ones((600, 600)))
    out, copied = rig.empty((600, 600), DType.float64), rig.empty((600, 600), DType.float64)
    rig.stream.synchronize()
    for step in range(1, 6):
        rig.enqueue("memory", FillSpec(step, a))
        rig.enqueue("blas", MatmulSpec(a, a, out))
        other.wait(rig.stream.record())
        rig.enqueue("memory", CopySpec(out, copied), other)
        rig.stream.wait(other.record())
        assert (rig.get(copied) == 600.0 * step * step).all()


def test_a_stream_waits_for_work_of_a_closed_one(rig):
    other = rig.device.open_stream("other")
    a = rig.put(np.ones((600, 600)))
    out = rig.empty((600, 600), DType.float64)
    rig.stream.synchronize()
    rig.enqueue("blas", MatmulSpec(a, a, out), other)
    event = other.record()
    other.close()
    rig.stream.wait(event)
    assert (rig.get(out) == 600.0).all()
    rig.stream.wait(event)  # long done
    rig.stream.synchronize()


def test_a_closed_stream_runs_its_work_and_accepts_no_more(rig):
    other = rig.device.open_stream("other")
    x = rig.put(np.zeros(10))
    rig.stream.synchronize()
    rig.enqueue("memory", FillSpec(7.0, x), other)
    event = other.record()
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.record()
    with pytest.raises(RuntimeError, match="closed"):
        rig.enqueue("memory", FillSpec(8.0, x), other)
    other.synchronize()
    assert event.is_done
    assert (rig.get(x) == 7.0).all()


def test_a_stream_without_work_can_be_synchronized_and_closed(rig):
    idle = rig.device.open_stream("idle")
    idle.synchronize()
    event = idle.record()
    idle.synchronize()
    assert event.is_done
    idle.close()
    idle.synchronize()
    with pytest.raises(RuntimeError, match="closed"):
        idle.record()
    unused = rig.device.open_stream("unused")
    unused.close()
    unused.synchronize()
    with pytest.raises(RuntimeError, match="closed"):
        unused.record()


def test_a_stream_has_the_name_that_it_was_given(rig):
    assert rig.device.open_stream("device/blas").name == "device/blas"


def test_a_refused_operation_leaves_nothing_on_the_stream(rig):
    x = rig.put(np.zeros(4, np.int64))
    rig.finish(rig.stream)
    with pytest.raises(Exception, match="int64"):
        rig.enqueue("blas", linalg.scal.spec(2, x))
    assert rig.stream.record().error is None
    assert (rig.get(x) == 0).all()
