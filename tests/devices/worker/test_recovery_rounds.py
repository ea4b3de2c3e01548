"""Every way that a worker can be lost, several times each, under a load of which every outcome is known."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
import trio
from chosen import BACKEND
from processes import until
from recovery_load import AT_ONCE, IN_FLIGHT, MANY, TRIGGER, Base, Load, Times, play

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend

# A round repeats the one before in the next worker. Each is over in a second, and many are for a soak.
ROUNDS = 20 if "TRIO_ACCEL_SOAK" in os.environ else 6
BARE_IMPORTS = 0.33
"""Seconds, on 2 quiet cores of an AMD EPYC."""
MIB = 1 << 20


async def kill(load: Load) -> None:
    load.device.dispatch.process.kill()


async def segfault(load: Load) -> None:
    process = load.device.dispatch.process
    ta.testing.inject_fault(load.device, ta.random.Bits, segfault=True)
    with pytest.raises(ta.ContextLostError) as caught:
        await load.device.ask(TRIGGER)
    assert caught.value.operation == "random.Bits"
    cause = str(caught.value.__cause__)
    # Its end of the channel may be closed a good while before it is dead: the error does not wait for that.
    assert "was killed by SIGSEGV" in cause or "the worker process ended" in cause
    assert await process.wait() == "was killed by SIGSEGV"


async def poison(load: Load) -> None:
    ta.testing.inject_fault(load.device, ta.random.Bits, poison=True)
    with pytest.raises(ta.ContextPoisonedError):
        await load.device.ask(TRIGGER)


async def stop(load: Load) -> None:
    load.device.dispatch.process.send_signal(signal.SIGSTOP)


async def hang(load: Load) -> None:
    """It does already."""
    await trio.lowlevel.checkpoint()


KINDS = pytest.mark.parametrize(
    ("strike", "spares"),
    [(kill, 0), (segfault, 0), (poison, 0), (stop, 0), (hang, 0), (kill, 1), (poison, 1)],
)


@pytest.fixture(scope="module")
def measured() -> dict[object, Times]:
    """The durations of the rounds, by their events."""
    return {}


async def rounds(
    system: ta.System,
    strike: Callable[[Load], Awaitable[None]],
    spares: int,
    count: int = ROUNDS,
    nbytes: int = 64 * MIB,
) -> Times:
    options = ta.DeviceOptions(
        isolation="process",
        in_flight=IN_FLIGHT,
        spares=spares,
        intensity=MANY,
        backoff=AT_ONCE,
        heartbeat_timeout=0.5 if strike is stop else 15.0,
        stuck_after=0.5 if strike is hang else None,
    )
    lost = ta.ContextPoisonedError if strike is poison else ta.ContextLostError
    times = Times()
    async with system.open_device(BACKEND, options=options) as device:
        base = await Base.make(device, nbytes)
        for _ in range(count):
            await until(lambda: device.dispatch.spares == spares)
            await play(base, times, is_hang=strike is hang, strike=strike, lost=lost)
    return times


@pytest.mark.slow
@pytest.mark.alone
@KINDS
async def test_each_request_has_the_fate_of_its_class(
    system: ta.System,
    measured: dict[object, Times],
    strike: Callable[[Load], Awaitable[None]],
    spares: int,
) -> None:
    measured[strike, spares] = await rounds(system, strike, spares)


@pytest.mark.slow
@KINDS
async def test_and_through_host_memory_if_host_arrays_are_sent(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, strike: Callable[[Load], Awaitable[None]], spares: int
) -> None:
    if BACKEND != "cpu":
        pytest.skip("all host arrays of this device do")
    monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))
    await rounds(system, strike, spares, count=3)


@pytest.mark.slow
async def test_a_large_array_survives(system: ta.System) -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 4 << 30:
        pytest.skip(f"needs 4 GiB of free memory, there are {free / 2**30:.1f} GiB")
    await rounds(system, kill, 0, count=2, nbytes=1 << 30)


@pytest.fixture(scope="module")
def slowness() -> float:
    """The ratio of a bare worker's import time to that on the quiet machine of the bounds."""
    took: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "import trio_accel, trio_accel.backends.cpu.libraries.blas"], check=True
        )
        took.append(time.perf_counter() - start)
    return max(1.0, statistics.median(took) / BARE_IMPORTS)


@pytest.mark.slow
@pytest.mark.alone
@KINDS
async def test_the_device_is_back_in_time(
    system: ta.System,
    measured: dict[object, Times],
    strike: Callable[[Load], Awaitable[None]],
    spares: int,
    slowness: float,
) -> None:
    times = measured.get((strike, spares)) or await rounds(system, strike, spares)
    gemm = statistics.median(times.gemms)
    print(
        f"in flight {statistics.median(times.errors):.3f} (at most {max(times.errors):.3f}), gemm {gemm:.3f}"
    )
    assert len(times.gemms) == ROUNDS
    # Machines are shared: where the bare imports take longer, so does all this.
    assert statistics.median(times.errors) <= 0.1 * slowness
    assert gemm <= (0.15 if spares else 0.6) * slowness
