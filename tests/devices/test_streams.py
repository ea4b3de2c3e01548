"""Which stream a library works on is a choice, and the results do not depend on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation

STRATEGIES = {
    "own": ta.PerActorStreams(),
    "by library": ta.PerLibraryStreams(),
    "single": ta.SingleStream(),
    "pool of 2": ta.StreamPool(2),
    "pool of 4": ta.StreamPool(4),
}


async def _use_five_libraries(device: ta.Device) -> None:
    import scipy.sparse

    x = await device.put(np.arange(4.0))
    await ta.linalg.scal(2.0, x)
    await ta.fft.fft(x)
    matrix = await ta.sparse.csr(device, scipy.sparse.eye_array(4, format="csr"))
    product = await ta.sparse.spmv(matrix, x)
    np.testing.assert_array_equal(await product.to_host(), [0, 2, 4, 6])


@pytest.mark.parametrize(
    ("strategy", "streams"),
    [("own", 4), ("by library", 4), ("single", 1), ("pool of 2", 2), ("pool of 4", 4)],
)
async def test_so_many_streams_are_used(
    system: ta.System, backend: ManualBackend, strategy: str, streams: int
) -> None:
    async with system.open_device(options=ta.DeviceOptions(streams=STRATEGIES[strategy])) as device:
        await _use_five_libraries(device)
        assert len(backend.device.streams) == streams
        # A restart takes a new stream only where each actor has its own.
        ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("crash"))
        with pytest.raises(ta.ActorFailedError):
            await ta.linalg.scal(2.0, await device.put(np.ones(3)))
        await ta.linalg.scal(2.0, await device.put(np.ones(3)))
        assert len(backend.device.streams) == (streams + 1 if strategy == "own" else streams)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_results_do_not_depend_on_it(system: ta.System, strategy: str) -> None:
    rng = np.random.default_rng(3)
    host = rng.standard_normal((16, 16))
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="inline", streams=STRATEGIES[strategy])
    ) as device:
        ref = await device.put(host)

        async def client() -> None:
            product = await ta.linalg.matmul(ref, ref)
            spectrum = await ta.fft.fft(product)
            np.testing.assert_allclose(await spectrum.to_host(), np.fft.fft(host @ host), atol=1e-10)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client)
        pending = [device.submit(ta.linalg.Scal(0.5, ref)) for _ in range(20)]
        for operation in pending:
            await operation.wait()
        np.testing.assert_allclose(await ref.to_host(), host * 0.5**20, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ta.StreamPool(0), ValueError, "size must be an integer of at least 1, got 0"),
        (lambda: ta.StreamPool(2.5), ValueError, "got 2.5"),  # type: ignore[arg-type]
        (
            lambda: ta.PerActorStreams(priorities={"blas": "high"}),
            TypeError,
            "integers, got {'blas': 'high'}",
        ),  # type: ignore[dict-item]
        (lambda: ta.PerActorStreams(priorities=["blas"]), TypeError, "must map library names"),  # type: ignore[arg-type]
        (lambda: ta.DeviceOptions(streams=4), TypeError, r"such as StreamPool\(4\), got 4"),  # type: ignore[arg-type]
        (lambda: ta.DeviceOptions(streams=ta.SingleStream), TypeError, "streams must be a stream strategy"),  # type: ignore[arg-type]
    ],
)
def test_wrong_choices_are_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


async def test_no_stream_has_more_than_256_operations_however_many_share_it(
    system: ta.System, isolation: Isolation
) -> None:
    """The windows would let 400 in; the others wait, and all are done."""
    options = ta.DeviceOptions(isolation=isolation, streams=ta.SingleStream(), in_flight=200)
    async with system.open_device(BACKEND, options=options) as device:
        x, y = await device.put(np.ones(4)), await device.put(np.ones(4))
        await ta.linalg.scal(1.0, x)
        await ta.fft.fft(y)
        # The first holds the others back long enough for all to be there meanwhile, also on a busy machine.
        for delay in (0.2, 0.8, 3.2):
            ta.testing.inject_fault(device, ta.linalg.Scal, delay=delay)
            submitted = [device.submit(ta.linalg.Scal(1.0, x)) for _ in range(200)]
            submitted += [device.submit(ta.fft.Fft(y)) for _ in range(200)]
            most = 0
            with trio.fail_after(60):
                while not all(pending.is_done for pending in submitted):
                    most = max(most, (await device.statistics()).in_flight)
                for pending in submitted:
                    await pending.wait()
            if most >= 256:
                break
        assert most == 256
        assert (await device.statistics()).in_flight == 0


async def test_a_busy_device_counts_as_idle_after_its_operations_in_flight(
    system: ta.System, backend: ManualBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_accel.devices.engine._engine._MOST_PATIENCE", 0.0)
    async with system.open_device("manual") as device:
        ref = await device.put(np.ones(3))
        await ta.linalg.scal(2.0, ref)
        stream, idle = backend.device.stream("blas"), trio.Event()

        async def wait() -> None:
            await device.dispatch.session.engine.wait_idle()  # type: ignore[union-attr]
            idle.set()

        backend.device.is_held = True
        first = device.submit(ta.linalg.Scal(3.0, ref))
        async with trio.open_nursery() as nursery:
            await wait_all_tasks_blocked()
            steps = len(stream.items)
            assert steps > 0
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            second = device.submit(ta.linalg.Scal(5.0, ref))
            await wait_all_tasks_blocked()
            assert not idle.is_set()
            for _ in range(steps):
                stream.step()
            with trio.fail_after(60):
                await first.wait()
                await idle.wait()
            assert not second.is_done
            backend.device.release()
        await second.wait()
        assert (await ref.to_host()).tolist() == [30.0] * 3
