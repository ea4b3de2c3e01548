"""The pool of host memory: disjoint regions, which come back when the last array is released."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base.kit.host import make_shared
from trio_accel.devices.base import _host_pool
from trio_accel.devices.base._host_pool import HostPool, HostRegistrar, Slab
from trio_accel.devices.worker import _memory
from trio_accel.devices.worker._memory import WorkerSlabs

pytestmark = pytest.mark.machine

MIB = 1 << 20


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:trio_accel")


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB, however much this machine has."""
    monkeypatch.setattr(_host_pool, "total_bytes", lambda: 1 << 30)


@pytest.fixture
async def pool() -> AsyncGenerator[HostPool, None]:
    pool = HostPool(is_shared=True)
    yield pool
    pool.close()


def array(pool: HostPool, *shape: int, dtype: str = "u1") -> np.ndarray:
    return pool.empty(shape, np.dtype(dtype))


async def test_arrays_have_the_requested_form(pool: HostPool) -> None:
    for dtype in ta.DType:
        made = pool.empty((3, 5), dtype.dtype)
        assert (made.shape, made.dtype) == ((3, 5), dtype.dtype)
        assert made.flags.c_contiguous
        assert made.flags.writeable
        assert made.ctypes.data % 4096 == 0
        assert pool.find(made) is not None
    assert pool.empty((3, 0), np.dtype("f8")).shape == (3, 0)
    assert pool.empty((), np.dtype("f8")).shape == ()
    assert len(pool.slabs) == 1


async def test_every_view_keeps_the_memory(pool: HostPool) -> None:
    made = array(pool, 4, 1024, dtype="f8")
    made[...] = np.arange(4096.0).reshape(4, 1024)
    view = made.reshape(-1).view("c16")[::2].real[3:]
    expected = view.copy()
    del made
    gc.collect()
    pool.drain()
    assert pool.used == 4 * 1024 * 8
    other = array(pool, 4, 1024, dtype="f8")
    other[...] = -1.0
    np.testing.assert_array_equal(view, expected)
    del view
    pool.drain()
    assert pool.used == 4 * 1024 * 8
    del other
    pool.drain()
    assert pool.used == 0


async def test_an_array_is_found_by_any_of_its_views(pool: HostPool) -> None:
    first, made = array(pool, 100), array(pool, 8, 1024, dtype="f4")
    slab, start = pool.find(made) or (0, 0)
    assert (slab, start) == ((pool.find(first) or (0, 0))[0], 4096)
    assert pool.find(made[2]) == (slab, start + 2 * 4096)
    assert pool.find(made[::-1]) == (slab, start + 7 * 4096)
    assert pool.find(made[1:].T[3:, ::-2]) == (slab, start + 7 * 4096 + 12)
    assert pool.find(np.broadcast_to(made[3], (5, 1024))) == (slab, start + 3 * 4096)
    assert pool.find(made[:0]) is None
    assert pool.find(np.ones(5)) is None
    assert pool.find(np.frombuffer(bytes(5), "u1")) is None
    # They begin in the slab, and lie there in part only.
    whole = pool.slabs[slab].memory
    assert pool.find(np.lib.stride_tricks.as_strided(whole[-8:], (16,), (1,))) is None
    assert pool.find(np.lib.stride_tricks.as_strided(whole[:8], (2,), (-8,))) is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.integers(1, 3 * MIB).map(lambda size: ("make", size)),
            st.integers(0, 30).map(lambda which: ("drop", which)),
            st.integers(0, 30).map(lambda which: ("view", which)),
        ),
        max_size=40,
    )
)
def test_regions_never_meet_and_all_come_back(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        pool = HostPool(is_shared=False)
        kept: list[tuple[np.ndarray, int]] = []
        made = held = None
        for stamp, (what, value) in enumerate(steps):
            if what == "make":
                made = array(pool, value)
                made[...] = stamp % 251
                kept.append((made, stamp % 251))
            elif kept:
                held, stamped = kept.pop(value % len(kept))
                if what == "view":
                    # The remainder of the slab is at its end.
                    kept.append((held[len(held) // 2 :], stamped))
            for held, stamped in kept:
                assert held[0] == held[-1] == stamped
                assert pool.find(held) is not None
        spans = sorted((held.ctypes.data, held.ctypes.data + held.nbytes) for held, _ in kept)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        del held, made
        kept.clear()
        gc.collect()
        pool.drain()
        assert pool.used == 0
        assert pool.reserved <= 256 * MIB
        pool.close()

    trio.run(main)


async def test_slabs_come_and_go(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for many arrays double; a large array has its own; empty ones are dropped but for a reserve."""
    monkeypatch.setattr(_host_pool, "available_bytes", lambda: 1 << 60)
    seen: list[tuple[str, int, int]] = []

    def note(what: str, slab: Slab) -> None:
        assert slab.descriptor is not None
        assert os.fstat(slab.descriptor).st_size == slab.nbytes
        seen.append((what, slab.number, slab.nbytes // MIB))

    pool.on_make = lambda slab: note("made", slab)
    pool.on_drop = lambda slab: note("dropped", slab)
    before = mappings()
    kept = [array(pool, 30 * MIB) for _ in range(3)]
    kept.append(array(pool, 700 * MIB))
    assert seen == [("made", 1, 64), ("made", 2, 128), ("made", 3, 700)]
    assert mappings() == before + 3
    kept.clear()
    pool.drain()
    # Slabs are kept up to a total size.
    assert seen[3:] == [("dropped", 3, 700)]
    assert pool.slabs.keys() == {1, 2}
    assert mappings() == before + 2
    pool.close()
    gc.collect()
    assert mappings() == before


async def test_large_arrays_come_back_on_their_own(pool: HostPool) -> None:
    made = [array(pool, 2 * MIB), array(pool, 100)]
    del made[0]
    await wait_all_tasks_blocked()
    assert pool.used == 4096


async def test_the_last_array_may_go_in_any_thread(pool: HostPool) -> None:
    count = 300
    made = [array(pool, 5000) for _ in range(count)]

    def drop() -> None:
        while True:
            try:
                made.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await trio.to_thread.run_sync(thread.join)
    pool.drain()
    assert pool.used == 0


async def test_arrays_outlive_the_pool(pool: HostPool) -> None:
    made = array(pool, 1000)
    made[...] = 7
    pool.close()
    pool.close()
    assert pool.find(made) is None
    view = made[5:]
    del made
    assert view.sum() == 7 * 995
    del view
    pool.drain()


async def test_more_than_the_machine_has_is_refused(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match=r"1125899906842624 bytes of host memory, \d+ available"):
        array(pool, 1 << 50)

    def refuse(nbytes: int) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(_host_pool, "make_shared", refuse)
        with pytest.raises(MemoryError, match="Too many open files"):
            array(pool, 10)

    def refuse_to_send(slab: Slab) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "on_make", refuse_to_send)
        with pytest.raises(MemoryError, match="Too many open files"):
            array(pool, 10)
    assert not pool.slabs
    assert pool.reserved == 0
    assert array(pool, 10).size == 10


async def test_without_shared_memory_it_is_the_process_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pool = HostPool(is_shared=False)
    made = array(pool, 3000)
    made[...] = 3
    assert pool.find(made[2:]) == (1, 2)
    assert [slab.descriptor for slab in pool.slabs.values()] == [None]
    pool.close()
    assert made.sum() == 9000


async def test_memory_open_to_a_lost_devices_writes_is_not_given_out_again(pool: HostPool) -> None:
    before, early = array(pool, 5000), array(pool, 5000)
    kept = pool.find(before)
    del early
    pool.hold_back()
    after = array(pool, 5000)
    del before, after
    pool.hold_back()
    pool.drain()
    # Only what was made after the loss, or had been dropped before, is there again.
    assert pool.used == 8192
    made = [array(pool, 5000) for _ in range(5)]
    assert kept not in [pool.find(other) for other in made]
    pool.let_go()
    assert pool.used == 5 * 8192
    assert pool.find(array(pool, 5000)) == kept


class Stuck:
    """A device that ends on request."""

    def __init__(self) -> None:
        self.has_ended = False
        self.registered: list[int] = []

    def register_host(self, memory: np.ndarray) -> None:
        self.registered.append(memory.nbytes)

    def unregister_host(self, memory: np.ndarray) -> None:
        self.registered.remove(memory.nbytes)

    def close(self, grace: float) -> bool:
        assert grace == 0.0
        if not self.has_ended:
            raise ta.ContextPoisonedError("a stream is stuck")
        return True


async def test_a_stuck_device_keeps_memory_open_to_its_writes() -> None:
    pool = HostPool(is_shared=False)
    registrar = HostRegistrar(pool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        lost, following = Stuck(), Stuck()
        registrar.attach(lost)  # type: ignore[arg-type]
        made = array(pool, 5000)
        registrar.detach()
        registrar.detach()
        del made
        registrar.attach(following)  # type: ignore[arg-type]
        while following.registered != [64 * MIB]:  # noqa: ASYNC110  # a thread tells
            await trio.sleep(0.001)
        pool.drain()
        assert pool.used == 8192
        lost.has_ended = True
        large = array(pool, 300 * MIB)
        while following.registered != [64 * MIB, 300 * MIB]:  # noqa: ASYNC110  # a thread tells
            await trio.sleep(0.001)
        assert pool.used == 300 * MIB
        del large
        while following.registered != [64 * MIB]:  # noqa: ASYNC110  # a thread tells
            await trio.sleep(0.001)
        registrar.detach()
        nursery.cancel_scope.cancel()
    pool.close()


class Slow:
    """A device that registers memory slowly, and returns the requests."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_go_on = threading.Event()

    def register_host(self, memory: np.ndarray) -> None:
        assert self.may_go_on.wait(10)
        self.told.append("register")

    def unregister_host(self, memory: np.ndarray) -> None:
        self.told.append("unregister")

    async def wait(self, *expected: str) -> None:
        with trio.fail_after(60):
            while self.told != list(expected):  # noqa: ASYNC110  # a thread tells
                await trio.sleep(0.001)


async def test_memory_dropped_before_its_registration_is_unregistered_after_it() -> None:
    """Otherwise it would be registered after its unmapping, and the next memory there be taken for it."""
    pool, device = HostPool(is_shared=False), Slow()
    registrar = HostRegistrar(pool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        registrar.attach(device)  # type: ignore[arg-type]
        large = array(pool, 300 * MIB)
        del large
        pool.drain()
        await wait_all_tasks_blocked()
        device.may_go_on.set()
        await device.wait("register", "unregister")
        nursery.cancel_scope.cancel()
    pool.close()


async def test_memory_dropped_before_a_worker_knows_it_is_forgotten_after_that() -> None:
    device, slabs = Slow(), WorkerSlabs()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slabs.run)
        _, descriptor = make_shared(MIB)
        slabs.add(device, 1, MIB, descriptor)  # type: ignore[arg-type]
        slabs.remove(device, 1, trio.lowlevel.checkpoint)  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        device.may_go_on.set()
        await device.wait("register", "unregister")
        nursery.cancel_scope.cancel()


async def test_arrays_in_a_slab_are_made_once_and_released_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_MOST_ARRAYS", 3)
    device, slabs = Slow(), WorkerSlabs()
    device.may_go_on.set()
    memory, descriptor = make_shared(MIB)
    memory[:] = np.arange(MIB, dtype=np.uint8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slabs.run)
        slabs.add(device, 1, MIB, descriptor)  # type: ignore[arg-type]
        # The thread is over, and whoever has waited for it holds the slab no more.
        with trio.fail_after(60):
            while not slabs._slabs[1].registered.is_over:  # noqa: ASYNC110  # as in `Slow.wait`
                await trio.sleep(0.001)

        def made(offset: int, dtype: str = "uint8", shape: tuple[int, ...] = (2,)) -> np.ndarray:
            return slabs.array([], 1, offset, dtype, shape, None)

        assert made(3) is made(3)
        for other in (made(4), made(3, "int8"), made(3, shape=(3,)), made(3, shape=(1, 2))):
            assert other is not made(3)
        for offset in range(8):
            assert made(offset).tolist() == [offset, offset + 1]
        gone = weakref.ref(made(3))
        slabs.remove(device, 1, trio.lowlevel.checkpoint)  # type: ignore[arg-type]
        assert gone() is None
        await device.wait("register", "unregister")
        nursery.cancel_scope.cancel()
