from __future__ import annotations

import numpy as np
import pytest

from trio_accel.backends.base import DType, OutOfMemoryError
from trio_accel.backends.base.contract.ops import FillSpec

KIB = 1024


def test_a_request_beyond_the_limit_is_refused_with_the_numbers(backend):
    device = backend.open_device(0, memory_limit=100 * KIB)
    device.allocate(1, 60 * KIB)
    with pytest.raises(OutOfMemoryError) as caught:
        device.allocate(2, 60 * KIB)
    error = caught.value
    assert (error.requested, error.free, error.total) == (60 * KIB, 40 * KIB, 100 * KIB)
    assert error.device == device.info.name
    for number in (60 * KIB, 40 * KIB, 100 * KIB):
        assert str(number) in str(error)
    device.allocate(2, 40 * KIB)  # the device stays usable, up to the last byte
    device.free(1)
    device.allocate(3, 60 * KIB)
    assert device.close(10)


def test_statistics_balance(backend):
    device = backend.open_device(0, memory_limit=1 << 20)
    sizes = {1: 0, 2: 1, 3: 4097, 4: 300_000}
    for block, nbytes in sizes.items():
        device.allocate(block, nbytes)
    full = device.memory()
    assert (full.blocks, full.limit) == (4, 1 << 20)
    assert sum(sizes.values()) <= full.used == full.peak <= full.reserved
    device.free(4)
    assert device.memory().used <= full.used - 300_000
    for block in (1, 2, 3):
        device.free(block)
    empty = device.memory()
    assert (empty.used, empty.blocks, empty.peak) == (0, 0, full.peak)
    assert device.close(10)


def test_a_renewed_block_keeps_its_memory(backend):
    device = backend.open_device(0, memory_limit=1 << 20)
    for block in (1, 2):
        device.allocate(block, 4097)
    before = device.memory()
    device.renew(1)
    assert device.memory() == before
    with pytest.raises((KeyError, RuntimeError), match="1"):
        device.allocate(1, 4097)
    for block in (1, 2):
        device.free(block)
    assert device.memory().blocks == 0
    assert device.close(10)


def test_a_size_no_machine_has_is_out_of_memory_without_a_limit_too(backend):
    device = backend.open_device(0, memory_limit=None)
    with pytest.raises(OutOfMemoryError) as caught:
        device.allocate(1, 1 << 60)
    assert caught.value.requested == 1 << 60
    assert 0 <= caught.value.free <= caught.value.total == device.memory().limit
    assert device.memory().blocks == 0
    device.allocate(1, 8)
    assert device.close(10)


def test_ids_belong_to_the_caller_and_are_checked(backend):
    device = backend.open_device(0, memory_limit=None)
    device.allocate(7, 8)
    with pytest.raises((KeyError, RuntimeError), match="7"):
        device.allocate(7, 8)
    with pytest.raises((KeyError, RuntimeError), match="8"):
        device.free(8)
    device.free(7)
    with pytest.raises((KeyError, RuntimeError), match="7"):
        device.free(7)
    assert device.close(10)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), ()])
def test_small_and_empty_arrays(rig, shape):
    array = rig.empty(shape, DType.float32)
    rig.apply("memory", FillSpec(1.5, array))
    result = rig.get(array)
    assert result.shape == shape
    assert (result == 1.5).all()


def test_blocks_do_not_overlap(rig):
    arrays = [rig.put(np.full(size, size, np.uint8)) for size in range(1, 200)]
    for array in arrays:
        assert (rig.get(array) == array.size).all()


def test_a_negative_size_is_refused(backend):
    device = backend.open_device(0, memory_limit=None)
    with pytest.raises(ValueError, match="-1"):
        device.allocate(1, -1)
    assert device.close(10)


def test_a_closed_device_takes_nothing(backend):
    device = backend.open_device(0, memory_limit=None)
    device.allocate(1, 8)
    assert device.close(10)
    assert device.memory().blocks == 0
    with pytest.raises(RuntimeError, match="closed"):
        device.allocate(2, 8)
    with pytest.raises(RuntimeError, match="closed"):
        device.open_stream("late")
    with pytest.raises(RuntimeError, match="closed"):
        device.open_library("memory")
    assert device.close(10)
