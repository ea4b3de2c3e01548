"""A repeated product is not planned again, unless something has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trio_accel.backends.base.contract.ops import CopyFromHostSpec, MatmulSpec

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]


@pytest.fixture
def spec(rig: Any) -> MatmulSpec:
    """A product launched as a graph by now."""
    rng = np.random.default_rng(1)
    a, b = (rig.put(rng.standard_normal(shape).astype(np.float32)) for shape in ((5, 6), (6, 7)))
    spec = MatmulSpec(a, b, rig.empty((5, 7), "float32"))
    for _ in range(4):
        rig.apply("blas", spec)
    assert len(rig.device.graphs) == 1
    return spec


def clear(rig: Any, spec: MatmulSpec) -> None:
    rig.apply("memory", CopyFromHostSpec(np.zeros((5, 7), np.float32), spec.out))


def check(rig: Any, spec: MatmulSpec) -> None:
    a, b = (rig.get(array).astype(np.float64) for array in (spec.a, spec.b))
    np.testing.assert_allclose(rig.get(spec.out), a @ b, rtol=1e-4, atol=1e-4)


def test_when_its_blocks_are_elsewhere(rig: Any, spec: MatmulSpec) -> None:
    """A freed block is made again under its id, and another takes its address."""
    rig.device.free(spec.out.block)
    other = rig.put(np.full((5, 7), 3, np.float32))
    rig.device.allocate(spec.out.block, spec.out.size * spec.out.dtype.itemsize)
    for _ in range(5):
        clear(rig, spec)
        rig.apply("blas", spec)
        check(rig, spec)
    np.testing.assert_array_equal(rig.get(other), np.full((5, 7), 3, np.float32))


def test_on_another_stream(rig: Any, spec: MatmulSpec) -> None:
    other = rig.device.open_stream("other")
    for _ in range(5):
        clear(rig, spec)
        # There it waits, and is not done because the first stream is.
        hold = other.hold()
        rig.enqueue("blas", spec, other)
        event = other.record()
        rig.finish(rig.stream)
        assert not event.is_done
        np.testing.assert_array_equal(rig.get(spec.out), np.zeros((5, 7)))
        hold.release()
        rig.finish(other)
        check(rig, spec)
    # Each has its own graph: the position of the stream shows whether a graph is in flight.
    assert len(rig.device.graphs) == 2
