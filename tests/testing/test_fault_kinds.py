"""Each kind of fault, inline and in a worker process: the program's view, and the device's recovery."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, for_ever

import trio_accel as ta
from trio_accel.testing import FaultInjection, inject_fault

ROOT = Path(ta.__file__).parents[1]
OPTIONS: dict[str, Any] = {"cancel_grace": 0.2, "close_grace": 0.2, "in_flight": 1}
LOSSES = [
    {"poison": True},
    {"poison": True, "how": "trap"},
    {"poison": True, "how": "assert"},
    {"segfault": True},
    {"kill": True},
    {"kill": True, "how": "writing"},
]


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def device(system: ta.System, isolation: Any) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=isolation, **OPTIONS)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


@pytest.fixture
async def isolated(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="process", **OPTIONS)
    ) as device:
        yield device


async def norm(device: ta.Device) -> float:
    with trio.fail_after(60):
        value: float = await (await device.ask(ta.linalg.Nrm2(np.ones(4)))).item()
    return value


def counts(fault: FaultInjection) -> tuple[int, int]:
    return fault.hit, fault.remaining


async def test_an_error_that_the_library_raises(device: ta.Device) -> None:
    fault = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7), count=2)
    assert fault.operation == "linalg.Nrm2"
    for number in (1, 2):
        with pytest.raises(ta.LibraryError, match="no") as caught:
            await norm(device)
        assert (caught.value.library, caught.value.code) == ("blas", 7)
        assert counts(fault) == (number, 2 - number)
    assert await norm(device) == 2.0
    assert device.generation == 1


async def test_an_error_that_makes_the_library_suspect(system: ta.System, device: ta.Device) -> None:
    inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("broken handle"))
    with pytest.raises(ta.ActorFailedError, match="broken handle"):
        await norm(device)
    assert await norm(device) == 2.0
    assert device.generation == 1


async def test_a_delay_takes_its_time_and_the_stream_keeps_its_order(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    fault = inject_fault(device, ta.linalg.Scal, delay=0.15)
    order: list[str] = []

    async def ask(name: str, factor: float) -> None:
        await ta.linalg.scal(factor, x)
        order.append(name)

    async with trio.open_nursery() as nursery:
        start = time.monotonic()
        nursery.start_soon(ask, "delayed", 2.0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "next", 3.0)
    assert time.monotonic() - start >= 0.15
    assert order == ["delayed", "next"]
    assert counts(fault) == (1, 0)
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 6.0))
    assert device.generation == 1


@pytest.mark.parametrize("how", [None, "kernel", "writing"])
async def test_a_hung_operation_is_found(system: ta.System, isolation: Any, how: Any) -> None:
    options = ta.DeviceOptions(isolation=isolation, stuck_after=0.1, **OPTIONS)
    async with system.open_device(BACKEND, options=options) as device:
        assert await norm(device) == 2.0
        fault = inject_fault(device, ta.linalg.Nrm2, hang=True, how=how)
        with pytest.raises(ta.CompletionTimeoutError, match=r"stuck_after = 0\.1 s"):
            await norm(device)
        assert await norm(device) == 2.0
        assert counts(fault) == (1, 0)
        assert device.generation == 2


async def test_writes_of_an_endless_kernel_are_damaged_and_nothing_else(isolated: ta.Device) -> None:
    x, y = [await isolated.put(np.arange(1000.0)) for _ in range(2)]
    inject_fault(isolated, ta.linalg.Scal, kill=True, how="writing")
    with pytest.raises(ta.ContextLostError):
        await ta.linalg.scal(2.0, x)
    with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
        await x.to_host()
    np.testing.assert_array_equal(await y.to_host(), np.arange(1000.0))
    assert await norm(isolated) == 2.0


async def test_a_hung_operation_outlives_its_asker_and_ends_with_the_context(device: ta.Device) -> None:
    # Code loaded at a first use would wait for the hanging operation, and the fault after it.
    assert await norm(device) == 2.0
    inject_fault(device, ta.linalg.Nrm2, hang=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(norm, device)
        while not (await device.statistics()).in_flight:  # noqa: ASYNC110  # nobody tells of a launch
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    # Its buffers stay reserved, until the context ends.
    assert (await device.statistics()).in_flight == 1
    assert device.generation == 1
    ta.testing.poison(device)
    while device.generation == 1:  # noqa: ASYNC110  # nobody tells of it
        await trio.sleep(0.001)
    assert await norm(device) == 2.0
    assert device.generation == 2


async def test_a_poisoned_context_is_replaced(device: ta.Device) -> None:
    fault = inject_fault(device, ta.linalg.Nrm2, poison=True, count=2)
    for generation in (1, 2):
        with pytest.raises(ta.ContextLostError) as caught:
            await norm(device)
        assert caught.value.generation == generation
    assert await norm(device) == 2.0
    assert counts(fault) == (2, 0)
    assert device.generation == 3


@pytest.mark.parametrize(
    ("kind", "death"),
    [
        ({"segfault": True}, "SIGSEGV"),
        ({"kill": True}, "SIGKILL"),
        ({"kill": True, "how": "writing"}, "SIGKILL"),
    ],
    ids=["segfault", "kill", "kill-writing"],
)
async def test_a_worker_that_dies_is_replaced_and_arrays_survive(
    isolated: ta.Device, kind: dict[str, Any], death: str
) -> None:
    x = await isolated.put(np.arange(5.0))
    fault = inject_fault(isolated, ta.linalg.Nrm2, **kind)
    with pytest.raises(ta.ContextLostError) as caught:
        await norm(isolated)
    cause = str(caught.value.__cause__)
    # Its end of the channel may be closed a good while before it is dead: nobody waits for that.
    assert f"the worker process was killed by {death}" in cause or "the worker process ended" in cause
    assert counts(fault) == (1, 0)
    np.testing.assert_array_equal(await x.to_host(), np.arange(5.0))
    assert await norm(isolated) == 2.0
    assert isolated.generation == 2


@pytest.mark.parametrize(
    "kind", LOSSES, ids=lambda kind: "-".join([next(iter(kind)), *filter(None, [kind.get("how")])])
)
async def test_a_repeated_operation_is_hit_once(system: ta.System, kind: dict[str, Any]) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True, **OPTIONS)
    async with system.open_device(BACKEND, options=options) as device:
        fault = inject_fault(device, ta.linalg.Nrm2, **kind)
        assert await norm(device) == 2.0
        assert counts(fault) == (1, 0)
        assert device.generation == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "number"),
    [("segfault", signal.SIGSEGV), ("kill", signal.SIGKILL)],
    ids=["segfault", "kill"],
)
def test_inline_the_program_itself_dies(fault: str, number: int) -> None:
    program = f"""
import numpy as np, trio, trio_accel as ta

async def main():
    async with ta.open_system("s") as system:
        device = await system.open_device({BACKEND!r}, options=ta.DeviceOptions(isolation="inline"))
        ta.testing.inject_fault(device, ta.linalg.Nrm2, {fault}=True)
        print("asking", flush=True)
        await device.ask(ta.linalg.Nrm2(np.ones(3)))
        print("still here", flush=True)

trio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, "asking\n", "")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ({"fail": ta.LibraryError("no", library="blas", code=7)}, ta.LibraryError),
        ({"fail": RuntimeError("no")}, ta.ActorFailedError),
        ({"poison": True}, ta.ContextLostError),
    ],
    ids=["library", "crash", "poison"],
)
async def test_a_submission_is_hit_and_invalidates_its_successors(
    device: ta.Device, kind: dict[str, Any], error: type[Exception]
) -> None:
    await norm(device)
    fault = inject_fault(device, ta.linalg.Nrm2, **kind)
    pending = device.submit(ta.linalg.Nrm2(np.ones(4)))
    assert fault.remaining == 0
    with pytest.raises(error):
        await pending.wait()
    assert fault.hit == 1
    with pytest.raises(ta.StaleRefError):
        await pending.value.to_host()
    await device.synchronize()
    again = device.submit(ta.linalg.Nrm2(np.ones(4)))
    assert await (await again.wait()).item() == 2.0


@pytest.mark.parametrize("kind", [{"segfault": True}, {"kill": True}], ids=["segfault", "kill"])
async def test_a_submission_to_a_worker_is_hit(isolated: ta.Device, kind: dict[str, Any]) -> None:
    fault = inject_fault(isolated, ta.linalg.Nrm2, **kind)
    pending = isolated.submit(ta.linalg.Nrm2(np.ones(4)))
    with pytest.raises(ta.ContextLostError):
        await pending.wait()
    assert counts(fault) == (1, 0)
    assert await norm(isolated) == 2.0


async def test_faults_of_different_kinds_follow_one_another(device: ta.Device) -> None:
    first = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7))
    second = inject_fault(device, ta.linalg.Nrm2, poison=True)
    third = inject_fault(device, ta.linalg.Nrm2, delay=0.05)
    with pytest.raises(ta.LibraryError):
        await norm(device)
    assert (counts(first), counts(second), counts(third)) == ((1, 0), (0, 1), (0, 1))
    with pytest.raises(ta.ContextLostError):
        await norm(device)
    assert (counts(second), counts(third)) == ((1, 0), (0, 1))
    start = time.monotonic()
    assert await norm(device) == 2.0
    assert time.monotonic() - start >= 0.05
    assert counts(third) == (1, 0)


async def test_a_request_cancelled_in_the_queue_gives_its_fault_back(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    await norm(device)  # the library is there: nobody waits for a thread
    inject_fault(device, ta.linalg.Scal, delay=1.0)
    fault = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7))
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ta.linalg.scal, 2.0, x)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(_cancel_when_blocked, scope)
        with scope:
            # The window is full, so it waits.
            await norm(device)
        assert scope.cancelled_caught
        assert counts(fault) == (0, 1)
    with pytest.raises(ta.LibraryError):
        await norm(device)
    assert counts(fault) == (1, 0)


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_a_request_cancelled_without_a_context_gives_its_fault_back(
    system: ta.System, isolation: Any
) -> None:
    options = ta.DeviceOptions(isolation=isolation, backoff=ta.Backoff(initial=0.3, jitter=0.0), **OPTIONS)
    async with system.open_device(BACKEND, options=options) as device:
        inject_fault(device, ta.fft.Fft, poison=True)
        with pytest.raises(ta.ContextLostError):
            await device.ask(ta.fft.Fft(np.ones(2)))
        assert not device.state.availability.is_ready
        fault = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7))
        with trio.move_on_after(0.02) as scope:
            await norm(device)
        assert scope.cancelled_caught
        assert counts(fault) == (0, 1)
        with pytest.raises(ta.LibraryError):
            await norm(device)


async def test_a_refused_request_gives_its_fault_back(device: ta.Device) -> None:
    fault = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7))
    with pytest.raises(TypeError):
        await device.ask(ta.linalg.Nrm2("no array"))  # type: ignore[arg-type]
    x = await device.put(np.ones(3))
    x.release()
    with pytest.raises(ta.StaleRefError):
        await ta.linalg.nrm2(x)
    assert counts(fault) == (0, 1)


async def test_a_request_with_a_failed_input_gives_its_fault_back(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    inject_fault(device, ta.linalg.Scal, fail=ta.LibraryError("no", library="blas", code=7))
    fault = inject_fault(device, ta.fft.Fft, fail=ta.LibraryError("no", library="fft", code=7))
    scaled = device.submit(ta.linalg.Scal(2.0, x))
    spectrum = device.submit(ta.fft.Fft(scaled.value))
    with pytest.raises(ta.LibraryError):
        await scaled.wait()
    with pytest.raises(ta.InputFailedError):
        await spectrum.wait()
    assert counts(fault) == (0, 1)


async def test_a_removed_fault_hits_no_more(device: ta.Device) -> None:
    fault = inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("no"), count=3)
    with pytest.raises(ta.ActorFailedError):
        await norm(device)
    fault.remove()
    assert counts(fault) == (1, 0)
    assert await norm(device) == 2.0
    assert counts(fault) == (1, 0)


async def test_a_removed_fault_stays_so_when_a_request_gives_it_back(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    inject_fault(device, ta.linalg.Scal, delay=0.1)
    fault = inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("no"))
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ta.linalg.scal, 2.0, x)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(_cancel_when_blocked, scope)
        nursery.start_soon(_remove, fault)
        with scope:
            await norm(device)
    assert counts(fault) == (0, 0)
    assert await norm(device) == 2.0


async def _remove(fault: FaultInjection) -> None:
    fault.remove()


async def test_poison_without_an_operation(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    assert await norm(device) == 2.0
    ta.testing.poison(device, "for a reason")
    with pytest.raises(ta.ContextLostError) as caught:
        await for_ever(lambda: norm(device))
    # A real one is reported in the driver's words.
    why = "CUDA_ERROR" if BACKEND == "cuda" and device.isolation == "process" else "for a reason"
    assert why in f"{caught.value} {caught.value.__cause__}"
    assert await norm(device) == 2.0
    if device.isolation == "process":
        np.testing.assert_array_equal(await x.to_host(), np.ones(3))
    else:
        with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
            await x.to_host()
    await device.close()
    with pytest.raises(ta.DeviceLostError):
        ta.testing.poison(device)
