"""Arrays: copies bit for bit, release, limits, and statistics that balance."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, NAME
from garbage import without_collection
from isolations import inline, isolated
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.dispatch import WorkerDispatch
from trio_accel.devices.dispatch._inline_dispatch import InlineDispatch
from trio_accel.devices.engine import _context_state

pytestmark = pytest.mark.conformance

DTYPES = tuple(ta.DType)


def bits(dtype: ta.DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An array of arbitrary bit patterns, NaNs of all kinds among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(size).integers(0, 2 if dtype is ta.DType.bool else 256, size, np.uint8)
    return raw.view(dtype.dtype).reshape(shape)


def same_bits(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (5,), (3, 0, 2), (2, 3, 4)]


@inline
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_every_dtype_and_shape_is_copied_back_bit_for_bit(
    device: ta.Device, dtype: ta.DType, shape: tuple[int, ...]
) -> None:
    await _check_copies(device, dtype, shape)


@isolated
async def test_every_dtype_and_shape_comes_back_from_a_worker(device: ta.Device) -> None:
    # Small ones travel with the messages, large ones lie in memory that both sides see.
    for shape in (*SHAPES, (333, 257)):
        for dtype in DTYPES:
            await _check_copies(device, dtype, shape)


async def _check_copies(device: ta.Device, dtype: ta.DType, shape: tuple[int, ...]) -> None:
    host = bits(dtype, shape)
    ref = await device.put(host)
    assert (ref.dtype, ref.shape, ref.size, ref.ndim) == (dtype, shape, host.size, host.ndim)
    assert ref.nbytes == host.nbytes
    if host.size:
        assert ref.strides == host.strides
    back = await ref.to_host()
    assert same_bits(back, host)
    assert back.flags.writeable
    assert back.flags.owndata
    out = np.empty(shape, dtype.dtype)
    assert await (await ref.copy()).to_host(out=out) is out
    assert same_bits(out, host)


async def test_all_codes_of_the_small_floats(device: ta.Device) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        ref = await device.put(codes.view(dtype))
        assert same_bits((await ref.to_host()).view(np.uint8), codes)
        with np.errstate(invalid="ignore"):
            expected = codes.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(await (await ref.cast("float32")).to_host(), expected)


LAYOUTS: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "transposed": lambda a: a.T,
    "every other": lambda a: a[::2, ::3],
    "backwards": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[0], (4, a.shape[1])),
    "Fortran": np.asfortranarray,
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
}


@inline
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", ["float64", "complex64", "bfloat16", "int8"])
async def test_host_arrays_of_any_layout(
    device: ta.Device, layout: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], dtype: str
) -> None:
    await _check_layout(device, layout(bits(ta.DType.of(dtype), (6, 8))))


@isolated
async def test_host_arrays_of_any_layout_cross_to_a_worker_and_back(device: ta.Device) -> None:
    for layout in LAYOUTS.values():
        for dtype in ("float64", "complex64", "bfloat16", "int8"):
            for shape in ((6, 8), (601, 901)):
                await _check_layout(device, layout(bits(ta.DType.of(dtype), shape)))


async def _check_layout(device: ta.Device, host: npt.NDArray[Any]) -> None:
    ref = await device.put(host)
    back = await ref.to_host()
    assert same_bits(back, np.ascontiguousarray(host))
    if host.flags.writeable:
        host[...] = 0
        await ref.to_host(out=host)
        assert same_bits(np.ascontiguousarray(host), back)


async def test_the_host_array_may_be_changed_after_put(device: ta.Device) -> None:
    host = np.arange(1000.0)
    ref = await device.put(host)
    host[:] = -1.0
    np.testing.assert_array_equal(await ref.to_host(), np.arange(1000.0))


async def test_arguments_of_put(device: ta.Device) -> None:
    assert (await device.put([1, 2, 3])).dtype is ta.DType.int64
    assert (await device.put(2.5)).shape == ()
    assert await (await device.put(np.float32(2.5))).item() == 2.5


async def test_making_arrays(device: ta.Device) -> None:
    assert (await (await device.zeros(3)).to_host()).tolist() == [0.0, 0.0, 0.0]
    assert (await device.zeros(3)).dtype is ta.DType.float64
    assert (await (await device.empty((2, 0), "int8")).to_host()).shape == (2, 0)
    full = await device.full([2, 2], 1 + 2j, "complex64")
    assert same_bits(await full.to_host(), np.full((2, 2), 1 + 2j, np.complex64))
    big = await device.full((np.int64(1),), 2**63 - 1, np.int64)
    assert await big.item() == 2**63 - 1


@inline
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_fill_and_item(device: ta.Device, dtype: ta.DType) -> None:
    await _check_fill(device, dtype)


@isolated
async def test_fill_and_item_of_every_dtype_in_a_worker(device: ta.Device) -> None:
    for dtype in DTYPES:
        await _check_fill(device, dtype)


async def _check_fill(device: ta.Device, dtype: ta.DType) -> None:
    ref = await device.zeros((2, 2), dtype)
    assert await ref.fill(1) is ref
    np.testing.assert_array_equal(await ref.to_host(), np.ones((2, 2), dtype.dtype))
    assert await (await device.full((), 1, dtype)).item() == 1


@inline
@pytest.mark.parametrize("value", [np.float32(2.0), np.int8(2), 2, 2.0, True])
async def test_arguments_of_fill(device: ta.Device, value: float) -> None:
    assert await (await device.full((), value, "int16")).item() == int(value)


CASTS = [
    ("float64", "float32"),
    ("float64", "bfloat16"),
    ("float32", "float16"),
    ("float16", "float64"),
    ("bfloat16", "float32"),
    ("int64", "float64"),
    ("float64", "int32"),
    ("float64", "complex128"),
    ("complex64", "complex128"),
    ("uint8", "int16"),
    ("bool", "float32"),
    ("float64", "bool"),
    ("complex64", "bool"),
]


@inline
@pytest.mark.parametrize(("source", "target"), CASTS, ids=str)
async def test_casts_match_numpy(device: ta.Device, source: str, target: str) -> None:
    await _check_cast(device, source, target)


@isolated
async def test_casts_in_a_worker_match_numpy(device: ta.Device) -> None:
    for source, target in CASTS:
        await _check_cast(device, source, target)


async def _check_cast(device: ta.Device, source: str, target: str) -> None:
    host = np.arange(6).reshape(2, 3).astype(ta.DType.of(source).dtype)
    ref = await (await device.put(host)).cast(target)
    assert ref.dtype == target
    assert same_bits(await ref.to_host(), host.astype(ta.DType.of(target).dtype))


async def test_infinities_and_nan(device: ta.Device) -> None:
    x = await device.zeros(2, "float32")
    assert (await (await x.fill(-np.inf)).to_host()).tolist() == [-np.inf] * 2
    assert np.isnan(await (await device.full((), np.nan, "float16")).item())
    assert await (await device.full((), 65504 + 10, "float16")).item() == 65504  # rounds down
    assert await (await (await device.put(np.array(1e300))).cast("float32")).item() == np.inf


Wrong = Callable[[ta.Device, ta.AccelRef], Awaitable[object]]

WRONG: dict[str, tuple[Wrong, type[Exception], str]] = {
    "put text": (lambda d, x: d.put("text"), TypeError, r"put: host: dtype: <U4 is .* allowed: float64"),
    "put objects": (lambda d, x: d.put(np.array([None])), TypeError, r"put: host: dtype: object is"),
    "put big-endian": (lambda d, x: d.put(np.ones(2, ">f8")), TypeError, r"put: host: dtype: .*'>f8'"),
    "negative size": (
        lambda d, x: d.zeros((2, -1)),
        ValueError,
        r"zeros: shape must hold sizes from 0 to 2\*\*63 - 1, got \(2, -1\)",
    ),
    "size true": (lambda d, x: d.zeros((True,)), ValueError, r"zeros: shape"),
    "size 2.5": (
        lambda d, x: d.zeros(2.5),
        TypeError,
        r"shape must be a size or a sequence of sizes, got 2\.5",
    ),  # type: ignore[arg-type]
    "sizes 2.5": (lambda d, x: d.zeros((2.5,)), ValueError, r"zeros: shape"),  # type: ignore[arg-type]
    "65 axes": (lambda d, x: d.zeros((1,) * 65), ValueError, r"at most 64 axes, got 65"),
    "beyond the address space": (
        lambda d, x: d.zeros((2**62, 0)),
        ValueError,
        r"shape \(4611686018427387904, 0\) of float64 is larger than any memory",
    ),
    "a dtype": (lambda d, x: d.zeros(2, "float128"), TypeError, r"dtype: 'float128' .* allowed: float64"),
    "fill complex": (lambda d, x: x.fill(1j), TypeError, r"fill: value 1j is complex, the array is float64"),
    "fill text": (lambda d, x: x.fill("1"), TypeError, r"fill: value must be a number, got '1'"),  # type: ignore[arg-type]
    "fill 10**400": (
        lambda d, x: x.fill(10**400),
        ValueError,
        r"fill: value 1000000.*0000 is outside the range of float64",
    ),
    "1e300 in float32": (
        lambda d, x: d.full(1, -1e300, "float32"),
        ValueError,
        r"full: value -1e\+300 is outside the range of float32",
    ),
    "1e5 in float16": (lambda d, x: d.full(1, 1e5, "float16"), ValueError, r"outside the range of float16"),
    "1e3 in float8": (lambda d, x: d.full(1, 1e3, "float8_e4m3fn"), ValueError, r"range of float8_e4m3fn"),
    "1e300j": (lambda d, x: d.full(1, 1e300j, "complex64"), ValueError, r"outside the range of complex64"),
    "300 in int8": (lambda d, x: d.full(1, 300, "int8"), ValueError, r"300 is outside -128 to 127"),
    "1.5 in int8": (lambda d, x: d.full(1, 1.5, "int8"), ValueError, r"1\.5 is not an integer"),
    "nan in int8": (lambda d, x: d.full(1, float("nan"), "int8"), ValueError, r"nan is not an integer"),
    "out of another shape": (
        lambda d, x: x.to_host(out=np.empty(4)),
        ValueError,
        r"to_host: out must be a writable array of shape \(3,\) and dtype float64, got shape \(4,\)",
    ),
    "out of another dtype": (
        lambda d, x: x.to_host(out=np.empty(3, np.float32)),
        ValueError,
        r"to_host: out .* got shape \(3,\), dtype float32",
    ),
    "out read-only": (
        lambda d, x: x.to_host(out=np.broadcast_to(0.0, 3)),
        ValueError,
        r"to_host: out .* got a read-only array",
    ),
    "out a list": (lambda d, x: x.to_host(out=[0.0] * 3), TypeError, r"out must be a NumPy array, got list"),  # type: ignore[arg-type]
    "cast to real": (
        lambda d, x: _cast_complex(d),
        TypeError,
        r"cast: dtype: complex128 to float32 would drop the imaginary parts",
    ),
    "cast to text": (lambda d, x: x.cast("str"), TypeError, r"dtype: 'str' is not an element type"),
    "item of three": (lambda d, x: x.item(), ValueError, r"exactly one element, got shape \(3,\)"),
    "ask for nothing": (lambda d, x: d.ask(None), TypeError, r"ask: None is not an operation"),  # type: ignore[arg-type]
}


async def _cast_complex(device: ta.Device) -> ta.AccelRef:
    ref = await device.zeros(2, complex)
    return await ref.cast("float32")


@inline
@pytest.mark.parametrize("case", WRONG)
async def test_wrong_arguments_are_refused_before_anything_is_launched(device: ta.Device, case: str) -> None:
    await _check_refusal(device, case)


@isolated
async def test_wrong_arguments_are_refused_before_a_worker_hears_of_them(device: ta.Device) -> None:
    for case in WRONG:
        await _check_refusal(device, case)


async def _check_refusal(device: ta.Device, case: str) -> None:
    wrong, error, message = WRONG[case]
    x = await device.put(np.ones(3))
    await device.synchronize()
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(device, x)
    await device.synchronize()
    after = await device.statistics()
    extra = 1 if case == "cast to real" else 0  # its own results
    assert after.launched == before.launched + extra
    assert after.generation == 1
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))


async def test_a_reference_is_not_a_host_array(device: ta.Device) -> None:
    x = await device.put(np.ones((3, 2)))
    assert len(x) == 3
    with pytest.raises(TypeError, match=r"await ref\.item\(\)"):
        bool(x)
    with pytest.raises(TypeError, match=r"await ref\.to_host\(\)"):
        np.asarray(x)
    with pytest.raises(TypeError, match="without axes"):
        len(await device.put(1.0))


class TestRelease:
    async def test_dropping_the_last_reference_gives_memory_back(self, device: ta.Device) -> None:
        ref = await device.put(np.ones(1000))
        assert (await device.statistics()).memory.used == 8000
        del ref
        await device.synchronize()
        assert (await device.statistics()).memory.used == 0

    async def test_explicitly_and_twice(self, device: ta.Device) -> None:
        ref = await device.put(np.ones(1000))
        ref.release()
        ref.release()
        await device.synchronize()
        assert (await device.statistics()).memory.used == 0
        assert repr(ref) == f"<AccelRef float64 (1000,) on {NAME}, released>"
        for use in (ref.to_host, ref.copy, lambda: ref.fill(0)):
            with pytest.raises(ta.StaleRefError, match="its memory was released"):
                await use()
        with pytest.raises(ta.StaleRefError, match=r"linalg\.matmul: b: its memory was released") as caught:
            await ta.linalg.matmul(np.ones((1, 1000)), ref)
        assert (caught.value.device, caught.value.generation) == (NAME, 1)

    async def test_while_a_request_is_queued(
        self, system: ta.System, backend: ManualBackend, nursery: trio.Nursery
    ) -> None:
        async with system.open_device(options=ta.DeviceOptions(in_flight=1)) as device:
            x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
            backend.device.is_held = True
            nursery.start_soon(ta.linalg.scal, 2.0, x)
            await wait_all_tasks_blocked()
            caught: list[Exception] = []

            async def ask() -> None:
                try:
                    await ta.linalg.nrm2(y)
                except ta.StaleRefError as error:
                    caught.append(error)

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            y.release()
            await wait_all_tasks_blocked()
            backend.device.release()
            await wait_all_tasks_blocked()
            assert "linalg.nrm2: x: its memory was released" in str(caught[0])
            assert system.tree().find("test/manual:0/context/blas").restarts == 0

    async def test_of_an_array_being_written(self, manual: ta.Device, backend: ManualBackend) -> None:
        x = await manual.put(np.ones(3))
        backend.device.is_held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ta.linalg.scal, 2.0, x)
            await wait_all_tasks_blocked()
            x.release()
            x.release()
            await wait_all_tasks_blocked()
            assert backend.device.memory().used == 24
            backend.device.release()
        await wait_all_tasks_blocked()
        assert backend.device.memory().used == 0


@pytest.fixture
async def small(system: ta.System, isolation: Isolation) -> AsyncGenerator[ta.Device, None]:
    """A device with a limit of 1000 bytes."""
    options = ta.DeviceOptions(memory_limit=1000, isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


async def test_too_little_memory_is_reported_in_numbers_and_harms_nothing(small: ta.Device) -> None:
    x = await small.put(np.ones(100))
    with pytest.raises(ta.OutOfMemoryError) as caught:
        await x.copy()
    error = caught.value
    assert (error.requested, error.free, error.total) == (800, 200, 1000)
    assert (error.device, error.operation, error.generation) == (NAME, "devices.Copy", 1)
    assert "800 bytes requested, 200 free of 1000" in str(error)
    # Operands that fit until the product does not: all of it is given back.
    y = await small.zeros((5, 1))
    with pytest.raises(ta.OutOfMemoryError):
        await ta.linalg.matmul(y, np.ones((1, 5)), out=None)
    del y
    await small.synchronize()
    statistics = await small.statistics()
    assert (statistics.memory.used, statistics.memory.blocks, statistics.memory.limit) == (800, 1, 1000)
    x.release()
    z = await small.full(124, 3.0)
    assert (await ta.linalg.nrm2(await small.put(np.ones(0)))).device is small
    assert (await z.to_host()).sum() == 372.0
    assert statistics.generation == 1


async def test_no_garbage_is_collected_for_more_than_all_memory(small: ta.Device) -> None:
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            collected.append(phase)

    kept = await small.put(np.ones(100))
    gc.callbacks.append(note)
    try:
        with pytest.raises(ta.OutOfMemoryError):
            await small.zeros(2000)
        assert collected == []
        # It would have fitted without what is kept.
        with pytest.raises(ta.OutOfMemoryError):
            await small.zeros(100)
        assert collected
    finally:
        gc.callbacks.remove(note)
    assert kept.nbytes == 800


async def test_dropped_memory_serves_the_next_array(small: ta.Device) -> None:
    for value in range(20):
        ref = await small.full(120, value)
        assert (await ref.to_host())[0] == value
        del ref


async def test_ten_thousand_operations_leave_nothing(device: ta.Device) -> None:
    x = await device.put(np.ones(16))
    matrix = await device.put(np.eye(16))
    await device.synchronize()

    async def work(count: int) -> None:
        for number in range(count):
            match number % 5:
                case 0:
                    await ta.linalg.matmul(matrix, np.ones((16, 2)))
                case 1:
                    await ta.linalg.scal(1.0, x)
                case 2:
                    await (await ta.fft.rfft(x)).to_host()
                case 3:
                    with pytest.raises(ValueError, match="y must have shape"):
                        await ta.linalg.dot(x, np.ones(3))
                case _:
                    (await ta.linalg.dot(x, x)).release()

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(work, 1250)
    gc.collect()
    await device.synchronize()
    statistics = await device.statistics()
    assert statistics.launched == statistics.completed == 2 + 8 * (4 * 250 + 250)
    assert statistics.in_flight == 0
    assert (statistics.memory.used, statistics.memory.blocks) == (128 + 2048, 2)
    assert statistics.queues == {}
    if isinstance(device.dispatch, WorkerDispatch):
        assert set(device.dispatch._chunks.blocks) == {x.block.id, matrix.block.id}
        assert len(device.dispatch._requests) == 0
        # One alarm reports that the context has been whole for a second.
        assert set(device.dispatch._alarms._alarms) <= {device.dispatch._pool}
    else:
        assert isinstance(device.dispatch, InlineDispatch)
        assert device.dispatch.session is not None
        engine = device.dispatch.session.engine
        memory = engine._memory_in_use
        for use in memory.uses.values():
            assert (use.is_allocated, use.pins, use.is_dropped, use.writer) == (True, 0, False, None)
        assert set(engine.alarms._alarms) <= {device.dispatch}
        assert len(engine.streams.all) == 3
    np.testing.assert_array_equal(await x.to_host(), np.ones(16))


async def test_statistics_are_the_truth(manual: ta.Device, backend: ManualBackend) -> None:
    first = await manual.statistics()
    assert (first.generation, first.launched, first.completed, first.in_flight) == (1, 0, 0, 0)
    assert first.memory.used == first.memory.peak == first.memory.blocks == 0
    x = await manual.put(np.ones(4))
    y = await manual.put(np.ones(4))
    y.release()
    await manual.synchronize()
    second = await manual.statistics()
    assert (second.launched, second.completed) == (2, 2)
    assert (second.memory.used, second.memory.peak, second.memory.blocks) == (32, 64, 1)
    assert x.nbytes == 32


async def test_arrays_in_reference_cycles_are_collected_before_memory_runs_out(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(memory_limit=8000, isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        with without_collection():
            for _ in range(5):
                cycle: list[object] = [await device.zeros(500)]
                cycle.append(cycle)
                del cycle
        # 4000 bytes each: at the third there was no room but by collecting the first two.
        assert (await device.statistics()).memory.blocks <= 2


async def test_an_array_is_neither_pickled_nor_copied_by_accident(device: ta.Device) -> None:
    ref = await device.put(np.ones(3))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="bound to its device"):
            attempt(ref)


async def test_a_mask_is_not_dropped_silently(device: ta.Device) -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(TypeError, match=r"host is a masked array; fill it first: array\.filled\(value\)"):
        await device.put(masked)
    with pytest.raises(TypeError, match="x is a masked array"):
        await ta.linalg.dot(masked, await device.put(np.ones(2)))


async def test_another_thread_is_refused_and_harms_nothing(device: ta.Device) -> None:
    ref = await device.put(np.ones(3))
    with pytest.raises(RuntimeError, match=f"ask: device test/{NAME} belongs to another thread or Trio run"):
        await trio.to_thread.run_sync(trio.run, ref.to_host)
    with pytest.raises(RuntimeError, match=f"submit: device test/{NAME} belongs"):
        await trio.to_thread.run_sync(device.submit, ta.linalg.Scal(2.0, ref))
    np.testing.assert_array_equal(await ref.to_host(), [1, 1, 1])


LARGE = 1 << 20


async def test_a_large_dropped_array_wakes_the_engine_unless_it_looks_soon_anyway(
    manual: ta.Device, backend: ManualBackend
) -> None:
    notifier, device = manual.state.blocks._notifier, backend.device

    async def until(holds: Callable[[], bool]) -> None:
        with trio.fail_after(60):
            while not holds():  # noqa: ASYNC110  # nobody tells of it
                await trio.sleep(0.001)

    ref = await manual.put(np.ones(LARGE))
    block = ref.block.id
    assert manual.state.blocks.is_watched
    del ref
    assert notifier.notifications == 0
    await until(lambda: block in device.freed)
    # By now nobody looks.
    ref = await manual.put(np.ones(LARGE))
    block = ref.block.id
    await until(lambda: not manual.state.blocks.is_watched)
    del ref
    assert notifier.notifications == 1
    await until(lambda: block in device.freed)


async def test_a_small_dropped_array_is_freed_when_the_engine_comes_to_rest(
    manual: ta.Device, backend: ManualBackend
) -> None:
    ref = await manual.put(np.ones(3))
    block = ref.block.id
    del ref
    with trio.fail_after(60):
        while block not in backend.device.freed:  # noqa: ASYNC110  # nobody tells of it
            await trio.sleep(0.01)
    assert manual.state.blocks._notifier.notifications == 0


async def test_who_asks_again_and_again_for_something_large_rings_nobody(
    manual: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise it may come to rest in between on a busy machine.
    monkeypatch.setattr(_context_state, "_INTERVAL", 60.0)
    ref = await manual.put(np.ones(LARGE))
    notifier = manual.state.blocks._notifier
    before = notifier.notifications
    for _ in range(10):
        await ref.copy()
    assert notifier.notifications == before
    assert (await manual.statistics()).memory.used == 8 * LARGE
