"""Leases of CUDA arrays: other libraries use the memory itself, and the device keeps the order both ways.

The other library's work is held back by a gate that only the test opens: whatever waited for it on the host
would wait for ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import DriverError, NotSupportedError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(BACKEND != "cuda", reason="TRIO_ACCEL_BACKEND names another backend"),
]

LEGACY, PER_THREAD = 1, 2  # handles of the default streams

if BACKEND == "cuda":
    from foreign_library import Library, Tensor


@pytest.fixture(scope="module", autouse=True)
def the_driver_is_open() -> Generator[None, None, None]:
    """What a driver keeps of its first use until the process ends is there before the first test."""
    library = Library()
    yield
    library.close()


@pytest.fixture
def library() -> Generator[Library, None, None]:
    library = Library()
    yield library
    library.close()


@pytest.fixture
async def device(library: Library, system: ta.System) -> AsyncGenerator[ta.Device, None]:
    # Opened with the device: to open a library beside what is held would take as long as that.
    options = attrs.evolve(INLINE, libraries=("trio_accel.linalg:BlasActor",))
    async with system.open_device("cuda", options=options) as device:
        (await ones(device)).release()
        yield device
        library.gate.open()


async def ones(device: ta.Device, count: int = 1000) -> ta.AccelRef:
    return await device.put(np.ones(count, np.float32))


async def elsewhere(device: ta.Device) -> None:
    """The loop and other streams go on; what does not wait has long been done by then."""
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
    async def test_later_operations_follow_what_was_enqueued_meanwhile(
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

    async def test_the_next_lease_waits_for_what_the_last_has_enqueued(
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

    async def test_readers_are_there_together_and_a_writer_comes_after_them(
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
        """What is slow at the end of one lease holds back nobody at the end of another."""
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
    async def test_it_is_kept_until_what_was_enqueued_is_done(
        self, device: ta.Device, library: Library
    ) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
            ref.release()
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
        while not opened._is_closed:
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
            counts.add(len(opened._streams))
        assert len(counts) == 1


class TestEnds:
    async def test_an_error_in_the_body_leaves_the_order_as_it_is(
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

    async def test_a_body_that_is_cancelled(self, device: ta.Device, library: Library) -> None:
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

    async def test_a_context_that_is_lost_meanwhile(self, device: ta.Device, library: Library) -> None:
        ref, other, stream = await ones(device), await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            ta.testing.poison(device, "by a test")
            with pytest.raises(ta.ContextPoisonedError):
                await ta.linalg.scal(1.0, other)
            # It is nobody else's, so what comes too late does no harm.
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
        with trio.fail_after(5):
            while not lost._is_closed:  # noqa: ASYNC110  # it has no event
                await trio.sleep(0.001)
        # What comes too late writes to memory that is still there.
        assert not lost.close(0.1)
        assert lost.memory().blocks == 1
        # The libraries of the next context wait for what runs.
        library.gate.open()
        with trio.fail_after(5):
            async with aclosing(device.watch_generation()) as generations:
                async for generation in generations:
                    if generation == 2:
                        break
        assert lost.close(5.0)
        assert lost.memory().blocks == 0
        ref = await ones(device)
        ta.testing.poison(device, "again")
        with pytest.raises(ta.ContextPoisonedError, match="again"):
            async with ref.lease():
                pass
        await elsewhere(device)
        assert device.generation == 3

    async def test_one_that_waits_when_the_context_is_lost(self, device: ta.Device, library: Library) -> None:
        ref, stream = await ones(device), library.stream()
        async with ref.lease(write=True, stream=stream) as array:
            library.gate.hold(stream)
            library.fill(array, 3.0, stream)
        outcomes: list[BaseException] = []

        async def lease() -> None:
            with pytest.raises(
                ta.ContextPoisonedError, match="while this operation was waited for"
            ) as caught:
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
    async def test_what_is_no_stream(self, device: ta.Device, stream: object) -> None:
        ref = await ones(device)
        with pytest.raises(TypeError, match="lease: stream must be a handle, or an object with"):
            async with ref.lease(stream=stream):
                pass
        await ta.linalg.scal(2.0, ref)

    async def test_a_negative_handle(self, device: ta.Device) -> None:
        ref = await ones(device)
        with pytest.raises(ValueError, match="-1 is no handle"):
            async with ref.lease(stream=-1):
                pass

    async def test_one_that_is_refused_is_refused_at_once(
        self, device: ta.Device, refusing: list[int]
    ) -> None:
        ref = await ones(device)
        refusing.append(1)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
            async with ref.lease(write=True):
                raise AssertionError("it must not begin")
        assert (await ref.to_host()).sum() == 1000.0

    @pytest.mark.parametrize("write", [False, True])
    async def test_one_that_is_gone_at_the_end(
        self, device: ta.Device, refusing: list[int], write: bool
    ) -> None:
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

        from trio_accel.backends.cuda.runtime import _foreign

        refusing: list[int] = []

        class Refusing:
            def __getattr__(self, name: str) -> Any:
                if name == "cuEventRecord" and refusing:
                    return lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)
                return getattr(driver, name)

        monkeypatch.setattr(_foreign, "driver", Refusing())
        return refusing


View = Callable[[Any], Any]
_VIEWS: dict[str, View] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "part": lambda x: x[1:3, ::2],
    "backwards": lambda x: x[::-1, 1:4],
    "row": lambda x: x[2],
    "element": lambda x: x[1, 2, ...],
    "new axis": lambda x: x[:, None, 1],
    "nothing": lambda x: x[2:2],
}


class TestPut:
    """The other direction: an array of the other library becomes one of the device."""

    async def test_the_copy_follows_the_stream_that_the_array_names(
        self, device: ta.Device, library: Library
    ) -> None:
        theirs = library.array((4, 5), stream=library.stream())
        put: list[ta.AccelRef] = []
        other = await device.put(np.arange(4.0))
        # What is used for the first time may be loaded only when nothing is held.
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

    async def test_one_that_names_no_stream_is_not_waited_for(
        self, device: ta.Device, library: Library
    ) -> None:
        theirs = library.array((10,), named={"version": 3, "stream": None})
        library.fill(theirs, 7.0, LEGACY)
        library.read(theirs.address, 10, LEGACY)
        library.gate.hold(LEGACY)
        assert (await (await device.put(theirs)).to_host()).tolist() == [7.0] * 10

    @pytest.mark.parametrize("view", _VIEWS)
    async def test_layouts_and_another_devices_array(self, device: ta.Device, view: str) -> None:
        host = np.arange(20, dtype=np.int16).reshape(4, 5)
        ref = _VIEWS[view](await device.put(host))
        async with ref.lease() as array:
            copied = await device.put(array)
        assert copied.spec.block != ref.spec.block
        np.testing.assert_array_equal(await copied.to_host(), _VIEWS[view](host))

    async def test_what_is_refused(self, device: ta.Device, library: Library) -> None:
        theirs = library.array((4,))
        with pytest.raises(TypeError, match="a masked array"):
            await device.put(library.array((4,), named={"version": 3, "mask": theirs}))
        with pytest.raises(TypeError, match="is no element type of a device"):
            await device.put(library.array((4,), named={"version": 3, "typestr": "|V4"}))
        with pytest.raises(NotSupportedError, match="on no memory of this device"):
            await device.put(library.array((4,), named={"version": 3, "data": (4096, False)}))
        assert (await device.statistics()).memory.blocks == 0

    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    async def test_where_the_memory_is_another(self, system: ta.System, library: Library, where: str) -> None:
        options = ta.DeviceOptions(isolation="process" if where == "cuda" else "inline")
        async with system.open_device(where, options=options) as device:
            with pytest.raises(NotSupportedError, match='isolation="inline"'):
                await device.put(library.array((4,)))


# Type code and bits by dlpack.h.
_TYPES = {
    "float64": (2, 64),
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "bool": (6, 8),
}
_NOT_NUMPYS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class TestProtocols:
    def test_all_types_are_here(self) -> None:
        assert set(_TYPES) == {str(dtype) for dtype in ta.DType}

    @pytest.mark.parametrize("name", _TYPES)
    async def test_element_types(self, device: ta.Device, name: str) -> None:
        dtype = ta.DType.of(name).dtype
        ref = await device.put(np.arange(6).reshape(2, 3).astype(dtype))
        async with ref.lease(write=True) as array:
            tensor = Tensor.of(array)
            assert Tensor.of(array, None) == attrs.evolve(tensor, is_read_only=None)
            assert tensor.type == (*_TYPES[name], 1)
            assert tensor.device == array.__dlpack_device__() == (2, 0)
            assert (array.shape, array.strides, array.dtype) == (
                (2, 3),
                (3 * dtype.itemsize, dtype.itemsize),
                dtype,
            )
            assert array.nbytes == 6 * dtype.itemsize
            if name in _NOT_NUMPYS:
                assert not hasattr(array, "__cuda_array_interface__")
                with pytest.raises(AttributeError, match=f"no {name}; DLPack has"):
                    array.__cuda_array_interface__  # noqa: B018
            else:
                assert array.__cuda_array_interface__ == {
                    "shape": (2, 3),
                    "strides": None,
                    "typestr": np.dtype(name).str,
                    "data": (tensor.address, False),
                    "version": 3,
                    "stream": None,
                }

    @pytest.mark.parametrize("view", _VIEWS)
    async def test_views_lie_where_those_of_numpy_do(self, device: ta.Device, view: str) -> None:
        host = np.arange(20, dtype=np.float32).reshape(4, 5)
        base = await device.put(host)
        ref, expected = _VIEWS[view](base), _VIEWS[view](host)
        async with base.lease() as whole, ref.lease() as array:
            assert array.shape == expected.shape
            start = Tensor.of(whole).address
            for address, strides in (
                (Tensor.of(array).address, Tensor.of(array).strides),
                (array.__cuda_array_interface__["data"][0], array.__cuda_array_interface__["strides"]),
            ):
                if not expected.size:
                    continue
                assert address - start == _offset(expected, host)
                if strides is None:
                    assert expected.flags.c_contiguous
                else:
                    assert strides == expected.strides

    async def test_an_array_without_elements(self, device: ta.Device) -> None:
        ref = await device.put(np.empty((0, 3), np.float32))
        async with ref.lease(write=True) as array:
            assert array.__cuda_array_interface__["data"] == (0, False)
            assert Tensor.of(array).shape == (0, 3)

    async def test_a_lease_for_reading_says_so_or_refuses(self, device: ta.Device) -> None:
        ref = await ones(device)
        async with ref.lease() as array:
            assert array.is_read_only
            assert array.__cuda_array_interface__["data"][1] is True
            assert Tensor.of(array).is_read_only is True
            for version in (None, (0, 8)):
                with pytest.raises(BufferError, match="read-only, which DLPack can say"):
                    array.__dlpack__(max_version=version)
        async with ref.lease(write=True) as array:
            assert Tensor.of(array).is_read_only is False

    async def test_it_is_neither_copied_nor_moved(self, device: ta.Device) -> None:
        ref = await ones(device)
        async with ref.lease(write=True) as array:
            with pytest.raises(BufferError, match="copy: a lease hands out the memory itself"):
                array.__dlpack__(copy=True)
            with pytest.raises(BufferError, match=r"dl_device: the array is on \(2, 0\), not on \(1, 0\)"):
                array.__dlpack__(dl_device=(1, 0))
            assert array.__dlpack__(copy=False, dl_device=(2, 0), stream=-1) is not None
            with pytest.raises(TypeError, match="in the memory of a GPU"):
                np.asarray(array)

    async def test_capsules_that_outlive_the_lease_keep_nothing_open(self, device: ta.Device) -> None:
        ref = await ones(device)
        async with ref.lease() as array:
            capsule = array.__dlpack__(max_version=(1, 0))
        ref.release()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0
        del capsule

    async def test_nvidias_own_view_takes_it(self, device: ta.Device, library: Library) -> None:
        from cuda.core.utils import StridedMemoryView

        ref, stream = await device.put(np.arange(12.0).reshape(3, 4)), library.stream()
        async with ref.T[1:3].lease(write=True, stream=stream) as array:
            view = StridedMemoryView.from_any_interface(array, stream_ptr=stream)
            assert (view.ptr, view.readonly) == (array.__cuda_array_interface__["data"][0], False)
            assert (view.shape, view.strides, view.dtype) == ((2, 3), (1, 4), np.dtype(np.float64))


async def test_in_a_worker_process_the_error_names_the_other_isolation(system: ta.System) -> None:
    async with system.open_device("cuda", options=ta.DeviceOptions(isolation="process")) as device:
        ref = await ones(device)
        with pytest.raises(NotSupportedError, match="isolation='inline'"):
            async with ref.lease():
                pass


def _offset(view: npt.NDArray[Any], base: npt.NDArray[Any]) -> int:
    first = view.__array_interface__["data"][0]
    return int(first) - int(base.__array_interface__["data"][0])
