"""Shared memory of the CPU backend: the parts outside the protocol."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from chunk_files import UNFIT, sealed
from keepers import Keeper

from trio_accel.backends import resolve
from trio_accel.backends.base import DType, NotSupportedError, OutOfMemoryError
from trio_accel.backends.base.contract.ops import ArraySpec, MatmulSpec
from trio_accel.backends.base.kit import host
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cpu.runtime import _memory

pytestmark = [pytest.mark.no_device, pytest.mark.machine]

PATIENCE = 30
MIB = 1 << 20


@pytest.fixture
def keeper():
    with Keeper() as opened:
        yield opened


@pytest.fixture
def device(keeper):
    opened = CpuBackend().open_device(0, memory_limit=None, keeper=keeper)
    yield opened
    assert opened.close(PATIENCE)


def view(device, block, nbytes):
    return device.host_view(ArraySpec(block, 0, DType.uint8, (nbytes,), (1,)))


def mappings():
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:trio_accel")


def test_memory_is_given_when_it_is_touched_and_back_with_the_descriptors(device, keeper):
    device.allocate(1, 1024 * MIB)
    (descriptor,) = (kept for _, kept in keeper.kept.values())
    assert os.fstat(descriptor).st_blocks == 0
    view(device, 1, 1024 * MIB)[:MIB] = 1
    assert MIB <= os.fstat(descriptor).st_blocks * 512 <= 4 * MIB
    assert not os.get_inheritable(descriptor)
    before = mappings()
    device.free(1)
    assert keeper.dropped  # larger than what is kept
    assert mappings() == before - 1


def test_a_view_behaves_as_one_of_private_memory(device):
    private = CpuBackend().open_device(0, memory_limit=None)
    for opened in (device, private):
        opened.allocate(1, 1000)
        opened.allocate(2, 0)
        array = view(opened, 1, 1000)
        array[:] = 7
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0
        assert view(opened, 1, 1000).sum() == 7000
        assert view(opened, 2, 0).shape == (0,)
        with pytest.raises((ValueError, TypeError), match="buffer"):
            view(opened, 1, 1001)
    assert private.close(PATIENCE)


def test_stuck_work_keeps_its_mapping_when_the_device_is_closed(keeper):
    before = mappings()
    device = CpuBackend().open_device(0, memory_limit=None, keeper=keeper)
    device.allocate(1, 1000)
    place = device.placement(1)
    go = threading.Event()

    def work(target):
        assert go.wait(PATIENCE)
        target[:] = 5

    stream = device.open_stream("stuck")
    stream.enqueue(partial(work, view(device, 1, 1000)))
    assert not device.close(0.01)
    assert device.memory().blocks == 0
    assert mappings() == before + 1
    go.set()
    assert device.close(PATIENCE)
    gc.collect()
    assert mappings() == before
    assert (keeper.host(CpuBackend(), place.chunk)[place.offset :][:1000] == 5).all()
    assert not keeper.dropped


def test_more_than_the_machine_has_left_is_refused_at_once(device, keeper, monkeypatch):
    device.allocate(1, 100)
    monkeypatch.setattr(_memory, "available_bytes", lambda: 80 * MIB)
    with pytest.raises(OutOfMemoryError, match="100000000 bytes requested") as caught:
        device.allocate(2, 100_000_000)
    assert caught.value.free == 80 * MIB
    assert "80" in str(caught.value.__cause__)
    assert list(keeper.kept) == [1]
    device.allocate(2, 70 * MIB)
    assert device.memory().blocks == 2


def test_empty_chunks_are_given_back_before_memory_is_refused(device, keeper, monkeypatch):
    device.allocate(1, 100)
    device.free(1)
    answers = iter([10 * MIB, 100 * MIB])
    monkeypatch.setattr(_memory, "available_bytes", lambda: next(answers))
    device.allocate(2, 90 * MIB)
    assert keeper.dropped == [1]
    assert len(keeper.kept) == 1


def test_a_system_that_refuses_is_out_of_memory(device, monkeypatch):
    def refuse(name, flags):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate(1, 100)
    assert "Too many open files" in str(caught.value.__cause__)
    device.allocate(1, 100)


def test_a_descriptor_is_closed_when_its_memory_cannot_be_mapped(device, monkeypatch):
    def refuse(descriptor, nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host, "map_shared", refuse)
    with pytest.raises(OutOfMemoryError):
        device.allocate(1, 100)


def test_a_system_that_promises_no_more_than_it_has(device, keeper, monkeypatch, tmp_path):
    """Its pages are taken at once, because touching a missing page would raise SIGBUS."""
    (tmp_path / "overcommit_memory").write_text("2\n")
    monkeypatch.setattr(host, "_OVERCOMMIT", tmp_path / "overcommit_memory")

    def refuse(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    before, open_before = mappings(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate(1, 100)
    assert "No space left on device" in str(caught.value.__cause__)
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == (before, open_before)
    assert (device.memory().blocks, keeper.kept) == (0, {})
    device.allocate(1, 100)
    ((nbytes, descriptor),) = keeper.kept.values()
    assert os.fstat(descriptor).st_blocks * 512 >= nbytes


def test_a_keeper_that_fails_leaves_no_chunk_and_no_block(device, keeper, monkeypatch):
    def refuse(chunk, nbytes, descriptor):
        raise BrokenPipeError("nobody is there")

    before = mappings()
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "keep", refuse)
        with pytest.raises(BrokenPipeError):
            device.allocate(1, 100)
    gc.collect()
    assert mappings() == before
    assert (device.memory().blocks, device.memory().reserved) == (0, 0)
    device.allocate(1, 100)
    assert device.placement(1).chunk == 2  # the keeper may have reported 1 to others


def test_a_short_chunk_is_not_mapped():
    descriptor = sealed(4096)
    try:
        assert CpuBackend().map_host(descriptor, 4096).size == 4096
        for nbytes in (4097, 0, -1, 1 << 62):
            with pytest.raises(ValueError, match=rf"{nbytes} of a chunk whose memory has 4096"):
                CpuBackend().map_host(descriptor, nbytes)
    finally:
        os.close(descriptor)


def test_nobody_changes_the_size_of_a_chunk(device, keeper):
    device.allocate(1, 1000)
    ((nbytes, descriptor),) = keeper.kept.values()
    for size in (0, nbytes - 4096, 2 * nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(descriptor).st_size == nbytes
    view(device, 1, 1000)[:] = 1


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
def test_chunks_that_could_end_the_process_are_not_mapped(make, tmp_path):
    """SIGBUS is raised at the access, when it is too late to handle it."""
    descriptor = make(4096, tmp_path)
    try:
        with pytest.raises(ValueError, match="chunk"):
            CpuBackend().map_host(descriptor, 4096)
    finally:
        os.close(descriptor)


def test_a_system_without_such_memory_names_the_way_out(monkeypatch, keeper):
    monkeypatch.delattr(os, "memfd_create")
    assert resolve("cpu")[1].isolations == ("inline",)
    with pytest.raises(NotSupportedError, match="isolation='inline'") as caught:
        CpuBackend().open_device(0, memory_limit=None, keeper=keeper)
    assert (caught.value.backend, caught.value.device) == ("cpu", "cpu:0")
    with pytest.raises(NotSupportedError, match="isolation='inline'"):
        CpuBackend().map_host(0, 8)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    free = host.available_bytes()
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    entry = host.table_entry
    monkeypatch.setattr(host, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        host,
        "table_entry",
        lambda path, key: ":/outer/inner" if path.endswith("cgroup") else entry(path, key),
    )

    def limit(group, most, used, cache):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(
            f"anon 999\ninactive_file {cache}\nactive_file {cache}\nshmem 77\n"
        )

    assert host.available_bytes() > free // 2  # no limit: the machine's
    limit(inner, "max", 5 * MIB, 0)
    assert host.available_bytes() > free // 2
    limit(inner.parent, 100 * MIB, 70 * MIB, 5 * MIB)
    assert host.available_bytes() == 40 * MIB
    limit(inner, 50 * MIB, 20 * MIB, 0)
    assert host.available_bytes() == 30 * MIB
    limit(inner, 50 * MIB, 60 * MIB, 0)
    assert host.available_bytes() == 0


def test_shared_memory_computes_as_private_memory(device):
    stream, blas = device.open_stream("main"), device.open_library("blas")
    specs = []
    for block in (1, 2, 3):
        device.allocate(block, 64 * 64 * 8)
        specs.append(ArraySpec(block, 0, DType.float64, (64, 64), (512, 8)))
    a, b = (np.random.default_rng(seed).standard_normal((64, 64)) for seed in (1, 2))
    device.host_view(specs[0])[:], device.host_view(specs[1])[:] = a, b
    blas.enqueue(MatmulSpec(*specs), stream)
    stream.synchronize()
    np.testing.assert_allclose(device.host_view(specs[2]), a @ b, rtol=1e-12, atol=1e-12)
