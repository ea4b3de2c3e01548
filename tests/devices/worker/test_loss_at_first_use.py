"""A library is opened while others work, and the context is lost: each request has its outcome, and soon."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import broken_library
import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND
from isolated import options

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base import Isolation
from trio_accel.testing import inject_fault

_FFT = "trio_accel.fft:FftActor"
VALUES = 2.0 * np.eye(8)
SPECTRUM = np.fft.fft(VALUES)


async def hanging(device: ta.Device) -> tuple[ta.AccelRef, ta.Pending[ta.AccelRef]]:
    """Return an array and its spectrum, which is in flight and does not end with this context."""
    x = await device.put(VALUES + 0j)
    await ta.fft.fft(x)
    inject_fault(device, ta.fft.Fft, hang=True)
    spectrum = device.submit(ta.fft.Fft(x))
    while True:
        queue = (await device.statistics()).queues.get(_FFT)
        if queue is not None and queue.in_flight:
            return x, spectrum


async def test_an_opening_in_a_lost_context_ends_the_work_in_flight(
    system: ta.System, isolation: Isolation
) -> None:
    chosen = options(isolation=isolation, retry=0)
    async with system.open_device(BACKEND, options=chosen) as device:
        x, spectrum = await hanging(device)
        with trio.fail_after(60):
            with pytest.raises(ta.ContextPoisonedError, match="waited for its library to be opened"):
                await device.ask(broken_library.Negate(x))
            with pytest.raises(ta.ContextLostError, match="in flight"):
                await spectrum.wait()
            await device.zeros(1)
        assert device.generation == 2


async def test_an_opening_is_a_suspect_next_to_the_work_in_flight(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        x, spectrum = await hanging(device)
        squares = [device.submit(broken_library.Square(x)) for _ in range(3)]
        with trio.fail_after(60):
            # The spectrum has run again without a fault, so it was the opening.
            with pytest.raises(ta.ContextPoisonedError, match="no other operation can have") as caught:
                await squares[0].wait()
            assert caught.value.is_to_blame
            for square in squares[1:]:
                await square.wait()
                np.testing.assert_array_equal(await square.value.to_host(), 2.0 * VALUES)
            await spectrum.wait()
        np.testing.assert_allclose(await spectrum.value.to_host(), SPECTRUM)
        assert device.generation == 2


async def test_an_opening_that_loses_each_context_ends_no_other_request(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        x, spectrum = await hanging(device)
        with trio.fail_after(60):
            with pytest.raises(ta.ContextLostError):
                await device.ask(broken_library.SquareInVain(x))
            await spectrum.wait()
        np.testing.assert_allclose(await spectrum.value.to_host(), SPECTRUM)
        assert device.generation <= 3


@pytest.mark.skipif(BACKEND == "cuda", reason="cuBLAS is opened anew when what is in flight has ended (D50)")
async def test_a_library_with_too_many_failures_ends_the_work_in_flight(
    system: ta.System, isolation: Isolation
) -> None:
    chosen = options(isolation=isolation, retry=0, intensity=ta.Intensity(1, 60.0))
    async with system.open_device(BACKEND, options=chosen) as device:
        x, spectrum = await hanging(device)
        inject_fault(device, ta.linalg.Matmul, fail=RuntimeError("a bug"), count=2)
        with trio.fail_after(60):
            for _ in range(2):
                with pytest.raises(ta.ActorFailedError, match="a bug"):
                    await ta.linalg.matmul(x, x)
            with pytest.raises(ta.ContextLostError, match="in flight"):
                await spectrum.wait()
            await device.zeros(1)
        assert device.generation == 2


async def _triangle(device: ta.Device, x: ta.AccelRef) -> ta.AccelRef:
    return await linalg.cholesky(x)


async def _sparse(device: ta.Device, x: ta.AccelRef) -> ta.AccelRef:
    matrix = await ta.sparse.csr(device, scipy.sparse.csr_array(VALUES))
    return await ta.sparse.spmv(matrix, x[0])


async def _random(device: ta.Device, x: ta.AccelRef) -> ta.AccelRef:
    return await ta.random.Generator(device, seed=1).uniform((8,))


async def _expression(device: ta.Device, x: ta.AccelRef) -> ta.AccelRef:
    return await ta.jit.elementwise("x + x")(x)


async def _product(device: ta.Device, x: ta.AccelRef) -> ta.AccelRef:
    return await linalg.matmul(x, x)


FIRST_USES: dict[str, Callable[[ta.Device, ta.AccelRef], Awaitable[ta.AccelRef]]] = {
    "blas": _product,
    "solver": _triangle,
    "sparse": _sparse,
    "random": _random,
    "jit": _expression,
}


@pytest.mark.parametrize("first_use", FIRST_USES)
async def test_first_uses_while_bad_requests_lose_the_context(system: ta.System, first_use: str) -> None:
    """The fault hits another step of the opening each time, and sometimes the time before or after it."""
    ask: Any = FIRST_USES[first_use]
    chosen = options(retry=1, spares=1)
    async with system.open_device(BACKEND, options=chosen) as device:
        try:
            result = await ask(device, await device.put(VALUES))
        except ta.NotSupportedError as error:
            # The stand-in for the driver does not have all libraries.
            pytest.skip(str(error))
        wanted = await result.to_host()
    for late in (0.0, 0.003, 0.01, 0.03):
        async with system.open_device(BACKEND, options=chosen) as device:
            x, y = await device.put(VALUES), await device.put(VALUES + 0j)
            bad = ta.fft.Fft(y)
            await device.ask(bad)
            inject_fault(device, ta.fft.Fft, poison=True, repeat=True, count=2)
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:

                    async def ask_bad(late: float = late, device: ta.Device = device, bad: Any = bad) -> None:
                        # clock: any moment will do
                        await trio.sleep(late)
                        with pytest.raises(ta.ContextPoisonedError):
                            await device.ask(bad)

                    nursery.start_soon(ask_bad)
                    nursery.start_soon(ask_bad)
                    results = [await ask(device, x) for _ in range(4)]
            for result in results:
                found = await result.to_host()
                assert first_use == "random" or np.array_equal(found, wanted)
            assert device.generation <= 5
