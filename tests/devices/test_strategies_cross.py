"""Stream and completion strategies work where the context is, with the same results."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND
from crossing_strategies import LockedUp, LoggedCompletion, LoggedStreams

import trio_accel as ta
from trio_accel.backends.base import Isolation


async def _use_four_libraries(device: ta.Device) -> None:
    x = await device.put(np.arange(4.0))
    await ta.linalg.scal(2.0, x)
    spectrum = await ta.fft.fft(x)
    np.testing.assert_allclose(await spectrum.to_host(), np.fft.fft(2.0 * np.arange(4.0)), atol=1e-12)
    matrix = await ta.sparse.csr(device, scipy.sparse.eye_array(4, format="csr"))
    np.testing.assert_array_equal(await (await ta.sparse.spmv(matrix, x)).to_host(), [0, 2, 4, 6])
    await ta.random.Generator(device, seed=1).bits(3)


@pytest.mark.parametrize(
    ("strategy", "streams"),
    [
        (ta.PerActorStreams(), 5),
        (ta.PerLibraryStreams(), 5),
        (ta.SingleStream(), 1),
        (ta.StreamPool(2), 2),
        (ta.StreamPool(4), 4),
    ],
    ids=["own", "by library", "single", "pool of 2", "pool of 4"],
)
async def test_exactly_so_many_streams_are_used(
    system: ta.System,
    isolation: Isolation,
    strategy: ta.StreamPool,
    streams: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ta.DeviceOptions(isolation=isolation, streams=LoggedStreams(strategy))
    async with system.open_device(BACKEND, options=options) as device:
        await _use_four_libraries(device)
        await device.synchronize()
    given = re.findall(r"process (\d+) gives stream (\d+) to (\w+)", caplog.text)
    assert {library for _, _, library in given} == {"memory", "blas", "fft", "sparse", "random"}
    assert len({stream for _, stream, _ in given}) == streams
    [process] = {int(process) for process, _, _ in given}
    assert (process == os.getpid()) == (isolation == "inline")


@pytest.mark.parametrize(
    "completion",
    [
        ta.HostCallbackCompletion(),
        ta.PolledCompletion(interval=0.002),
        ta.AdaptiveCompletion(),
        ta.SyncCompletion(),
        LoggedCompletion(),
    ],
    ids=["host callback", "polled", "adaptive", "sync", "of a module"],
)
async def test_every_completion_gives_the_same_results(
    system: ta.System, isolation: Isolation, completion: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = ta.DeviceOptions(isolation=isolation, completion=completion, close_grace=0.5)
    with trio.fail_after(60):
        async with system.open_device(BACKEND, options=options) as device:
            await _use_and_lose(device, completion)
    if isinstance(completion, LoggedCompletion):
        opened = {int(process) for process in re.findall(r"process (\d+) completes", caplog.text)}
        assert (opened == {os.getpid()}) == (isolation == "inline")
        assert len(opened) == (1 if isolation == "inline" else 2)


async def _use_and_lose(device: ta.Device, completion: Any) -> None:
    await _use_four_libraries(device)
    large = np.random.default_rng(1).standard_normal((200, 200))
    ref = await device.put(large)
    submitted = [device.submit(ta.linalg.Matmul(ref, ref)) for _ in range(5)]
    for pending in submitted:
        product = await (await pending.wait()).to_host()
        np.testing.assert_allclose(product, large @ large, rtol=1e-10, atol=1e-10)
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("injected"))
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(2.0, ref)
    if isinstance(completion, ta.SyncCompletion):
        return  # see below
    # A poisoned context hangs no wait.
    ta.testing.inject_fault(device, ta.linalg.Scal, poison=True)
    with pytest.raises(ta.ContextLostError):
        await ta.linalg.scal(2.0, await device.put(np.ones(3)))
    await _use_four_libraries(device)
    assert device.generation == 2


@pytest.mark.timeout(30)
async def test_a_poisoned_context_is_seen_by_who_blocks(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, completion=ta.SyncCompletion(), close_grace=0.5)
    async with system.open_device(BACKEND, options=options) as device:
        ta.testing.inject_fault(device, ta.linalg.Scal, poison=True)
        ref = await device.put(np.ones(3))
        with trio.fail_after(60), pytest.raises(ta.ContextLostError):
            await ta.linalg.scal(2.0, ref)
        # A new worker may take longer to start where many do.
        await _use_four_libraries(device)
        assert device.generation == 2


def _of_main(base: type[Any]) -> Any:
    return type("Mine", (base,), {"__module__": "__main__"})()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"streams": _of_main(ta.SingleStream)},
            r"streams=Mine.* class is defined in __main__",
        ),
        ({"completion": _of_main(ta.SyncCompletion)}, r"completion=Mine.* class is defined in __main__"),
        ({"completion": LockedUp()}, r"completion=LockedUp.* cannot be given to a worker process"),
    ],
    ids=["streams of main", "completion of main", "no pickle"],
)
async def test_strategies_that_cannot_cross_are_refused(
    system: ta.System, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ta.NotSupportedError, match=text) as caught:
        await system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process", **options))
    assert "isolation='inline'" in str(caught.value)
    assert [child.name for child in system.tree().children] == []
