"""The backend of scipy.fft: results, the places of its calls, and its refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.signal
import trio
import trio.testing
from chosen import BACKEND, INLINE
from scipy._lib.uarray import BackendNotImplementedError

import trio_accel as ta
from trio_accel.interop import ScipyFftBackend, scipy_fft

pytestmark = pytest.mark.machine

FUNCTIONS = [
    f"{kind}{count}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for count in ("", "2", "n")
]


@pytest.fixture
async def backend(device: ta.Device) -> ScipyFftBackend:
    return scipy_fft(device)


async def in_thread(backend: ScipyFftBackend, function: Callable[[], Any], **options: bool) -> Any:
    """Call a function in a worker thread, with the backend as the only one unless requested otherwise."""

    def work() -> Any:
        with scipy.fft.set_backend(backend, **(options or {"only": True})):
            return function()

    return await trio.to_thread.run_sync(work)


def arrays(kind: str) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for dtype in ("float64", "float32"):
        x = rng.normal(size=(4, 6)).astype(dtype)
        yield x
        yield x.T[::2]
        if not kind.startswith(("rfft", "ihfft")):
            yield x + np.asarray(1j, np.result_type(dtype, "complex64")) * x[::-1]
    yield rng.integers(-9, 9, (4, 6))
    yield rng.normal(size=(4, 6)).astype(np.float16)
    yield rng.normal(size=(4, 6)) > 0
    yield rng.normal(size=(4, 6)).astype(">f8")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
async def test_results_match_scipy(backend: ScipyFftBackend, name: str, norm: str | None) -> None:
    await trio.lowlevel.checkpoint()  # the linter does not know that there are arrays
    function = getattr(scipy.fft, name)
    for calls, x in enumerate(arrays(name), 1):
        expected = function(x, norm=norm)
        result = await in_thread(backend, partial(function, x, norm=norm))
        assert type(result) is np.ndarray
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        tolerance = 1e-5 if result.dtype in (np.float32, np.complex64) else 1e-12
        assert np.linalg.norm(result - expected) <= tolerance * np.linalg.norm(expected)
        assert backend.calls == calls


async def test_arguments_by_place_and_by_name(backend: ScipyFftBackend) -> None:
    x = np.random.default_rng(1).normal(size=(3, 4, 6))
    for call in (
        lambda: scipy.fft.fft(x, 5, 0, "ortho", True, -1),
        lambda: scipy.fft.irfft(x=x, n=9, axis=1, overwrite_x=True, workers=1, plan=None),
        lambda: scipy.fft.fft2(x, (5, 5), (0, 2), "forward"),
        lambda: scipy.fft.fft2(x, axes=None),
        lambda: scipy.fft.fftn(x, 5, 0),
        lambda: scipy.fft.fftn(x, [5, -1], [1, 2]),
        lambda: scipy.fft.rfftn(x, s=(2, 2)),
        lambda: scipy.fft.irfftn(x, np.array([2, 3])),
        lambda: scipy.fft.hfft2(x.tolist(), axes=(1, 0)),
    ):
        np.testing.assert_allclose(await in_thread(backend, call), call(), rtol=1e-12, atol=1e-12)
    assert backend.calls == 9


@pytest.mark.parametrize("options", [{}, {"only": True}, {"coerce": True}], ids=str)
async def test_ways_to_set_it(backend: ScipyFftBackend, options: dict[str, bool]) -> None:
    x = np.arange(8.0)
    result = await in_thread(backend, lambda: scipy.fft.rfft(x), **options)
    np.testing.assert_allclose(result, np.fft.rfft(x), rtol=1e-12)
    assert backend.calls == 1


async def test_code_that_calls_scipy_fft_itself(backend: ScipyFftBackend) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=200), rng.normal(size=31)
    result = await in_thread(backend, lambda: scipy.signal.fftconvolve(a, b))
    np.testing.assert_allclose(result, np.convolve(a, b), rtol=1e-12, atol=1e-12)
    assert backend.calls == 3


async def test_the_source_is_unchanged_and_nothing_stays_on_the_device(
    backend: ScipyFftBackend, device: ta.Device
) -> None:
    x = np.random.default_rng(3).normal(size=100) + 0j
    before = x.copy()
    result = await in_thread(backend, lambda: scipy.fft.fft(x, overwrite_x=True))
    result += 1  # it belongs to the caller
    np.testing.assert_array_equal(x, before)
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0


async def test_unsupported_calls_are_left_to_scipy(backend: ScipyFftBackend) -> None:
    x = np.arange(8.0)
    expected = scipy.fft.fht(x, 0.1, 0.5)
    found = await in_thread(backend, lambda: scipy.fft.fht(x, 0.1, 0.5), only=False)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    with pytest.raises(BackendNotImplementedError):
        await in_thread(backend, lambda: scipy.fft.fht(x, 0.1, 0.5), only=True)
    # SciPy's own takes two transforms, which are there.
    assert backend.calls == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scipy.fft.fft(np.ones(8, np.longdouble)), TypeError, r"x: \w+ is not an element type"),
        (lambda: scipy.fft.fft(np.ones(8, np.clongdouble)), TypeError, r"x: \w+ is not an .*set_backend"),
        (lambda: scipy.fft.rfft(np.ones(8, complex)), TypeError, r"a must be real, got complex128; use fft"),
        (lambda: scipy.fft.fft(np.ones(8), 0), ValueError, r"n must be at least 1, got 0"),
        (lambda: scipy.fft.fft(np.ones(8), axis=1), ValueError, r"axis 1 is not there"),
        (lambda: scipy.fft.fftn(np.ones(8), axes=(0, 0)), ValueError, r"axes must be distinct"),
        (lambda: scipy.fft.fft(np.ones(8), norm="no"), ValueError, r"norm must be .*, got 'no'"),
        (lambda: scipy.fft.fft(np.ones(8), workers=0), ValueError, r"workers must not be zero"),
        (lambda: scipy.fft.fft(np.ones(8), workers=-4096), ValueError, r"workers value out of range"),
        (lambda: scipy.fft.fft(np.ones(8), plan=object()), NotImplementedError, r"plan: .*leave it out"),
        (lambda: scipy.fft.fft(["a"]), ValueError, r"could not convert string to float"),
    ],
)
async def test_wrong_arguments(
    backend: ScipyFftBackend, call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await in_thread(backend, call)
    result = await in_thread(backend, lambda: scipy.fft.fft([1.0, 1.0]))
    assert result.tolist() == [2.0, 0.0]


async def test_refused_in_trios_thread(backend: ScipyFftBackend) -> None:
    await trio.lowlevel.checkpoint()
    with (
        scipy.fft.set_backend(backend, only=True),
        pytest.raises(RuntimeError, match=r"scipy\.fft\.rfft: .* would block the Trio loop; .*to_thread"),
    ):
        scipy.fft.rfft([1.0, 2.0])
    assert backend.calls == 0


async def test_refused_after_the_device_was_closed(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        backend = scipy_fft(device)
    with pytest.raises(RuntimeError, match=r"this backend no longer has a device .*closed") as caught:
        await in_thread(backend, lambda: scipy.fft.rfft([1.0, 2.0]))
    assert isinstance(caught.value.__cause__, ta.DeviceLostError)


async def test_a_worker_thread_of_another_run_waits_as_any_thread(backend: ScipyFftBackend) -> None:
    async def other() -> None:
        assert (await in_thread(backend, lambda: scipy.fft.rfft([1.0, 2.0]))).tolist() == [3.0, -1.0]

    await trio.to_thread.run_sync(trio.run, other)
    assert backend.calls == 1


async def test_refused_in_a_forked_process(backend: ScipyFftBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real fork of a program with threads is a warning from Python 3.12 on.
    monkeypatch.setattr(backend._blocking, "_process", -1)
    with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
        await in_thread(backend, lambda: scipy.fft.rfft([1.0, 2.0]))


async def test_threads_of_the_program(backend: ScipyFftBackend) -> None:
    x = np.arange(64.0)
    results: list[Any] = []

    def work() -> None:
        with scipy.fft.set_backend(backend, only=True):
            results.append(scipy.fft.rfft(x))

    def start() -> None:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    await trio.to_thread.run_sync(start)
    assert backend.calls == 8
    for result in results:
        np.testing.assert_allclose(result, np.fft.rfft(x), rtol=1e-12, atol=1e-12)


async def test_worker_threads_at_once(backend: ScipyFftBackend) -> None:
    xs = np.random.default_rng(4).normal(size=(20, 50))
    results: dict[int, Any] = {}

    async def transform(index: int) -> None:
        results[index] = await in_thread(backend, lambda: scipy.fft.fft(xs[index]))

    async with trio.open_nursery() as nursery:
        for index in range(20):
            nursery.start_soon(transform, index)
    assert backend.calls == 20
    for index, result in results.items():
        np.testing.assert_allclose(result, np.fft.fft(xs[index]), rtol=1e-12, atol=1e-12)


async def test_a_cancelled_task_cancels_its_thread(backend: ScipyFftBackend) -> None:
    is_cancelled = threading.Event()
    ended: list[type[BaseException]] = []

    def work() -> None:
        is_cancelled.wait(30)
        try:
            scipy.fft.rfft([1.0, 2.0])
        except BaseException as error:
            ended.append(type(error))
            raise

    with trio.CancelScope() as scope:
        scope.cancel()
        is_cancelled.set()
        await in_thread(backend, work)
    assert not ended  # it was not even started

    async with trio.open_nursery() as nursery:
        is_cancelled.clear()
        nursery.start_soon(in_thread, backend, work)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        is_cancelled.set()
    assert ended == [trio.Cancelled]
    assert backend.calls == 0


async def test_made_in_a_worker_thread(device: ta.Device) -> None:
    def work() -> ScipyFftBackend:
        backend = scipy_fft(device)
        with scipy.fft.set_backend(backend, only=True):
            assert scipy.fft.rfft([1.0, 2.0]).tolist() == [3.0, -1.0]
        return backend

    backend = await trio.to_thread.run_sync(work)
    assert repr(backend) == f"<ScipyFftBackend of test/{device.name}, 1 calls>"


async def test_made_outside_of_the_run(device: ta.Device) -> None:
    errors: list[str] = []

    def work() -> None:
        with pytest.raises(RuntimeError) as caught:
            scipy_fft(device)
        errors.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    await trio.to_thread.run_sync(thread.join)
    assert errors == ["scipy_fft must be called in the Trio run of the device, or in a worker thread of it"]
