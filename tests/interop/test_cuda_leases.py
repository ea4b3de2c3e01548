"""Leases of CUDA arrays: other libraries use the memory itself, and the device keeps the order both ways.

The other library's work is held back by a gate that only the test opens: whatever waited for it on the host
would wait for ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from trio.testing import wait_all_tasks_blocked
from views import VIEWS

import trio_accel as ta
from trio_accel.backends.base import DriverError, NotSupportedError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(BACKEND != "cuda", reason="TRIO_ACCEL_BACKEND names another backend"),
    pytest.mark.usefixtures("the_driver_is_open"),
]

LEGACY, PER_THREAD = 1, 2  # handles of the default streams

if BACKEND == "cuda":
    from foreign_library import Library, Tensor


@pytest.fixture
async def device(library: Library, system: ta.System) -> AsyncGenerator[ta.Device, None]:
    # Opened with the device, because opening a library next to a held stream would take as long as the hold.
    options = attrs.evolve(INLINE, libraries=("trio_accel.linalg:BlasActor",))
    async with system.open_device("cuda", options=options) as device:
        (await ones(device)).release()
        yield device
        library.gate.open()


async def ones(device: ta.Device, count: int = 1000) -> ta.AccelRef:
    return await device.put(np.ones(count, np.float32))


async def elsewhere(device: ta.Device) -> None:
    """The loop and other streams continue; work without a wait has long been done by then."""
    other = await device.put(np.arange(4.0))
    for _ in range(20):
        other = await other.copy()
    np.testing.assert_array_equal(await other.to_host(), np.arange(4.0))


class WithProtocol:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class LikeCuPy:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class LikePyTorch:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class TestOrder:
    @pytest.mark.parametrize("form", [int, WithProtocol, LikeCuPy, LikePyTorch])
    async def test_later_operations_follow_work_enqueued_meanwhile(
        self, device: ta.Device, library: Library, form: Callable[[int], object]
    ) -> None:
        await self._follow(device, library, library.stream(), form)

    @pytest.mark.parametrize(
        ("used", "named"),
        [(LEGACY, lambda _: None), (0, int), (LEGACY, LikePyTorch), (PER_THREAD, int)],
        ids=["unnamed", "0", "1", "per thread"],
    )
    async def test_default_streams(
        self, device: ta.Device, library: Library, used: int, named: Callable[[int], object]
    ) -> None:
        await self._follow(device, library, used, named)

    async def _follow(
        self, device: ta.Device, library: Library, stream: int, form: Callable[[int], object]
    ) -> None:
        ref = await ones(device)
        async with ref.lease(write=True, stream=form(stream)) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
        pending = device.submit(ta.linalg.Scal(2.0, ref))
        copied = device.submit(ta.linalg.Axpy(1.0, ref, await ones(device)))
        await elsewhere(device)
        assert not pending.is_done
        assert not copied.is_done
        library.gate.open()
        await pending.wait()
        assert (await ref.to_host()).tolist() == [6.0] * 1000
        assert (await copied.value.to_host()).tolist() == [7.0] * 1000

    async def test_a_lease_begins_when_earlier_operations_are_done(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        for _ in range(20):
            device.submit(ta.linalg.Scal(2.0, ref))
        async with ref.lease(stream=stream) as array:
            copied = library.copy(array, stream)
            assert array.__cuda_array_interface__["stream"] is None
        assert library.read(copied, 1000, stream) == [2.0**20] * 1000

    async def test_a_reader_holds_back_writers_and_no_readers(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(stream=stream) as array:
            library.gate.hold(stream)
            copied = library.copy(array, stream)
        assert (await (await ref.copy()).to_host()).sum() == 1000.0
        pending = device.submit(ta.linalg.Scal(5.0, ref))
        await elsewhere(device)
        assert not pending.is_done
        library.gate.open()
        await pending.wait()
        assert library.read(copied, 1000, stream) == [1.0] * 1000
        assert (await ref.to_host()).tolist() == [5.0] * 1000

    async def test_the_next_lease_waits_for_enqueued_work_of_the_last(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, first, second = await ones(device), library.stream(), library.stream()
        async with ref.lease(write=True, stream=first) as array:
            library.gate.hold(first)
            library.fill(array, 3.0, first)
        seen: list[float] = []

        async def lease() -> None:
            async with ref.lease(stream=second) as array:
                seen.extend(library.read(library.copy(array, second), 1000, second))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lease)
            await elsewhere(device)
            assert not seen
            library.gate.open()
        assert seen == [3.0] * 1000

    async def test_readers_overlap_and_a_writer_follows_them(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        log: list[str] = []

        async def write() -> None:
            async with ref.lease(write=True, stream=stream) as array:
                log.append("writer")
                library.fill(array, 2.0, stream)

        async with trio.open_nursery() as nursery, ref.lease() as one, ref.lease() as other:
            assert Tensor.of(one) == Tensor.of(other)
            nursery.start_soon(write)
            await elsewhere(device)
            log.append("readers")
        assert log == ["readers", "writer"]
        assert (await ref.to_host()).tolist() == [2.0] * 1000

    async def test_leases_on_different_streams_do_not_wait_for_each_other(
        self, device: ta.Device, library: Library
    ) -> None:
        """A slow end of one lease does not delay the end of another."""
        first, second = await ones(device), await ones(device)
        slow, quick = library.stream(), library.stream()
        async with first.lease(write=True, stream=slow) as array:
            library.gate.hold(slow)
            library.fill(array, 2.0, slow)
        async with second.lease(write=True, stream=quick) as array:
            library.fill(array, 3.0, quick)
        await ta.linalg.scal(2.0, second)
        assert (await second.to_host()).tolist() == [6.0] * 1000
        library.gate.open()
        assert (await first.to_host()).tolist() == [2.0] * 1000


class TestMemory:
    async def test_it_is_kept_until_its_enqueued_work_is_done(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
            ref.release()
        del array
        await elsewhere(device)
        assert (await device.statistics()).memory.blocks == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.synchronize)
            await wait_all_tasks_blocked()
            library.gate.open()
        assert (await device.statistics()).memory.blocks == 0

    async def test_closing_waits_for_it(self, system: ta.System, library: Library) -> None:
        stream = library.stream()
        async with trio.open_nursery() as nursery:
            async with system.open_device("cuda", options=INLINE) as device:
                ref = await ones(device)
                async with ref.lease(write=True, stream=stream) as array:
                    library.gate.hold(stream)
                    library.fill(array, 3.0, stream)
                opened = device.dispatch.session.engine.device  # type: ignore[union-attr]
                nursery.start_soon(trio.to_thread.run_sync, self._open_when_closing, opened, library)
            assert opened._has_ended

    def _open_when_closing(self, opened: Any, library: Library) -> None:
        while not opened.is_closed:
            pass
        assert not opened._has_ended
        library.gate.open()

    async def test_streams_are_used_again(self, device: ta.Device, library: Library) -> None:
        ref, stream = await ones(device), library.stream()
        opened = device.dispatch.session.engine.device  # type: ignore[union-attr]
        counts = set[int]()
        for _ in range(10):
            async with ref.lease(stream=stream):
                pass
            await device.synchronize()
            counts.add(len(opened.streams))
        assert len(counts) == 1


class TestEnds:
    async def test_an_error_in_the_body_leaves_the_order_unchanged(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()

        async def fail() -> None:
            async with ref.lease(write=True, stream=stream) as array:
                library.gate.hold(stream)
                library.fill(array, 3.0, stream)
                raise LookupError

        with pytest.raises(LookupError):
            await fail()
        pending = device.submit(ta.linalg.Scal(2.0, ref))
        await elsewhere(device)
        assert not pending.is_done
        library.gate.open()
        assert (await ref.to_host()).tolist() == [6.0] * 1000

    async def test_a_cancelled_body(self, device: ta.Device, library: Library) -> None:
        ref, stream = await ones(device), library.stream()
        with trio.CancelScope() as scope:
            async with ref.lease(write=True, stream=stream) as array:
                library.gate.hold(stream)
                library.fill(array, 3.0, stream)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        library.gate.open()
        assert (await ref.to_host()).tolist() == [3.0] * 1000

    async def test_cancelled_while_it_waits(self, device: ta.Device, library: Library) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
        with trio.move_on_after(0) as scope:
            async with ref.lease():
                raise AssertionError("it was being written")
        assert scope.cancelled_caught
        library.gate.open()
        await ta.linalg.scal(2.0, ref)
        assert (await ref.to_host()).tolist() == [6.0] * 1000

    async def test_a_context_lost_meanwhile(self, device: ta.Device, library: Library) -> None:
        ref, other, stream = await ones(device), await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            ta.testing.poison(device, "by a test")
            with pytest.raises(ta.ContextLostError):
                await ta.linalg.scal(1.0, other)
            # It is nobody else's, so a late write does no harm.
            library.fill(array, 3.0, stream)
        with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
            async with ref.lease():
                pass
        await elsewhere(device)

    async def test_a_loss_that_nothing_else_has_noticed(self, device: ta.Device, library: Library) -> None:
        ref, stream = await ones(device), library.stream()
        lost = device.dispatch.session.engine.device  # type: ignore[union-attr]
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
            ref.release()
            ta.testing.poison(device, "by a test")
        with trio.fail_after(60):
            while not lost.is_closed:  # noqa: ASYNC110  # it has no event
                await trio.sleep(0.001)
        # A late write reaches memory that still exists.
        assert not lost.close(0.1)
        assert lost.memory().blocks == 1
        # The libraries of the next context wait for the running work.
        library.gate.open()
        with trio.fail_after(60):
            async with aclosing(device.watch_generation()) as generations:
                async for generation in generations:
                    if generation == 2:
                        break
        assert lost.close(5.0)
        assert lost.memory().blocks == 0
        ref = await ones(device)
        ta.testing.poison(device, "again")
        with pytest.raises(ta.ContextLostError, match="again"):
            async with ref.lease():
                pass
        await elsewhere(device)
        assert device.generation == 3

    async def test_a_waiting_lease_when_the_context_is_lost(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
        outcomes: list[BaseException] = []

        async def lease() -> None:
            with pytest.raises(ta.ContextLostError, match="while this operation was waited for") as caught:
                async with ref.lease():
                    pass
            outcomes.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lease)
            await wait_all_tasks_blocked()
            ta.testing.poison(device, "by a test")
        assert len(outcomes) == 1
        library.gate.open()

    async def test_it_cannot_be_taken_when_it_is_over(self, device: ta.Device) -> None:
        ref = await ones(device)
        async with ref.lease() as array:
            assert array.shape == (1000,)
        for use in (
            lambda: array.__cuda_array_interface__,
            lambda: array.__dlpack__(max_version=(1, 0)),
        ):
            with pytest.raises(ta.StaleRefError, match="the lease of this array is over"):
                use()
        assert "lease over" in repr(array)


class TestStreamsThatAreNone:
    @pytest.mark.parametrize(
        "stream", ["0", 1.0, True, object(), np.arange(3)], ids=lambda value: type(value).__name__
    )
    async def test_invalid_streams(self, device: ta.Device, stream: object) -> None:
        ref = await ones(device)
        with pytest.raises(TypeError, match="lease: stream must be a handle, or an object with"):
            async with ref.lease(stream=stream):
                pass
        await ta.linalg.scal(2.0, ref)

    async def test_a_negative_handle(self, device: ta.Device) -> None:
        ref = await ones(device)
        with pytest.raises(ValueError, match="-1 is not a handle"):
            async with ref.lease(stream=-1):
                pass

    async def test_a_refused_lease_is_refused_at_once(self, device: ta.Device, refusing: list[int]) -> None:
        ref = await ones(device)
        refusing.append(1)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
            async with ref.lease(write=True):
                raise AssertionError("it must not begin")
        assert (await ref.to_host()).sum() == 1000.0

    @pytest.mark.parametrize("write", [False, True])
    async def test_a_lease_gone_at_the_end(self, device: ta.Device, refusing: list[int], write: bool) -> None:
        """Nobody knows when its work is over: the memory is not given to anybody else, nor its contents."""
        ref = await ones(device)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
            async with ref.lease(write=write):
                refusing.append(1)
        if write:
            with pytest.raises(ta.StaleRefError, match="spoiled by lease"):
                await ref.to_host()
        else:
            assert (await ref.to_host()).sum() == 1000.0
        ref.release()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 1

    @pytest.fixture
    def refusing(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """While it is not empty, no event can be recorded; of a bad handle a driver may die."""
        from cuda.bindings import driver

        from trio_accel.backends.cuda.runtime import _context

        refusing: list[int] = []

        class Refusing:
            def __getattr__(self, name: str) -> Any:
                if name == "cuEventRecord" and refusing:
                    return lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)
                return getattr(driver, name)

        monkeypatch.setattr(_context, "driver", Refusing())
        return refusing


class TestPut:
    """The other direction: an array of the other library becomes one of the device."""

    async def test_the_copy_follows_the_stream_that_the_array_names(
        self, device: ta.Device, library: Library
    ) -> None:
        theirs = library.array((4, 5), stream=library.stream())
        put: list[ta.AccelRef] = []
        other = await device.put(np.arange(4.0))
        # Code used for the first time may be loaded only when nothing is held.
        await ta.linalg.scal(1.0, other)
        (await device.put(theirs)).release()
        library.gate.hold(theirs.stream)
        library.fill(theirs, 7.0, theirs.stream)

        async def work() -> None:
            put.append(await device.put(theirs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            for _ in range(20):
                await ta.linalg.scal(1.0, other)
            assert not put
            library.gate.open()
        library.fill(theirs, 8.0, theirs.stream)
        np.testing.assert_array_equal(await put[0].to_host(), np.full((4, 5), 7.0, np.float32))
        assert put[0].dtype == "float32"

    @pytest.mark.parametrize(
        "named", [{"version": 2}, {"version": 3, "stream": 1}, {"version": 3, "stream": 0}]
    )
    async def test_by_default_it_follows_the_legacy_default_stream(
        self, device: ta.Device, library: Library, named: dict[str, int]
    ) -> None:
        theirs = library.array((1000,), named=named)
        library.gate.hold(LEGACY)
        library.fill(theirs, 7.0, LEGACY)
        other = await ones(device)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.put, theirs)
            for _ in range(20):
                await ta.linalg.scal(1.0, other)
            library.gate.open()
        assert (await (await device.put(theirs)).to_host()).tolist() == [7.0] * 1000

    async def test_a_lease_without_a_stream_is_not_waited_for(
        self, device: ta.Device, library: Library
    ) -> None:
        theirs = library.array((10,), named={"version": 3, "stream": None})
        library.fill(theirs, 7.0, LEGACY)
        library.read(theirs.address, 10, LEGACY)
        library.gate.hold(LEGACY)
        assert (await (await device.put(theirs)).to_host()).tolist() == [7.0] * 10

    @pytest.mark.parametrize("view", VIEWS)
    async def test_layouts_and_another_devices_array(self, device: ta.Device, view: str) -> None:
        host = np.arange(20, dtype=np.int16).reshape(4, 5)
        ref = VIEWS[view](await device.put(host))
        async with ref.lease() as array:
            copied = await device.put(array)
        assert copied.spec.block != ref.spec.block
        np.testing.assert_array_equal(await copied.to_host(), VIEWS[view](host))

    async def test_invalid_leases_are_refused(self, device: ta.Device, library: Library) -> None:
        theirs = library.array((4,))
        with pytest.raises(TypeError, match="masked arrays are not supported"):
            await device.put(library.array((4,), named={"version": 3, "mask": theirs}))
        with pytest.raises(TypeError, match="is not an element type of a device"):
            await device.put(library.array((4,), named={"version": 3, "typestr": "|V4"}))
        with pytest.raises(NotSupportedError, match="on no memory of this device"):
            await device.put(library.array((4,), named={"version": 3, "data": (4096, False)}))
        assert (await device.statistics()).memory.blocks == 0

    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    async def test_another_kind_of_memory(self, system: ta.System, library: Library, where: str) -> None:
        options = ta.DeviceOptions(isolation="process" if where == "cuda" else "inline")
        async with system.open_device(where, options=options) as device:
            with pytest.raises(NotSupportedError, match='isolation="inline"'):
                await device.put(library.array((4,)))


async def test_in_a_worker_process_the_error_names_the_other_isolation(system: ta.System) -> None:
    async with system.open_device("cuda", options=ta.DeviceOptions(isolation="process")) as device:
        ref = await ones(device)
        with pytest.raises(NotSupportedError, match="isolation='inline'"):
            async with ref.lease():
                pass
