"""Everything at once, at random: each request has one outcome, and in the end nothing is missing or left."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND
from processes import LAUNCHER, children, command, descriptors, launcher, until, workers
from recovery_load import AT_ONCE

import trio_accel as ta
from trio_accel.devices import Put, ToHost

pytestmark = pytest.mark.own_launcher

LOST = (
    ta.ActorFailedError,
    ta.ContextLostError,
    ta.CompletionTimeoutError,
    ta.InputFailedError,
    ta.StaleRefError,
)
OPERATIONS = [ta.linalg.Matmul, ta.linalg.Scal, ta.fft.Rfft, Put, ToHost]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
FAULTS: dict[str, dict[str, Any]] = {
    "poison": {"poison": True},
    "segfault": {"segfault": True},
    "kill": {"kill": True},
    "hang": {"hang": True},
    "delay": {"delay": 0.05},
    "lost": {"fail": ta.ContextPoisonedError("it is lost")},
    "refused": {"fail": ta.InputFailedError("it cannot be")},
    "crash": {"fail": RuntimeError("a broken handle")},
}
TASKS = 8
# Nothing waits for longer: endless work is given up after `stuck_after`, and a worker comes in a second.
PATIENCE = 30.0


@attrs.define(eq=False)
class Array:
    """An array of one task, and its expected contents."""

    ref: ta.AccelRef
    host: npt.NDArray[np.float64]


@attrs.define(eq=False)
class Client:
    """One task: uses arrays of its own, and knows the results."""

    device: ta.Device
    random: random.Random
    outcomes: Counter[str]
    arrays: list[Array] = attrs.field(factory=list)

    async def run(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [
            self.put,
            self.read,
            self.scale,
            self.add,
            self.multiply,
            self.chain,
            self.forget,
        ]
        if BACKEND == "cpu":
            # The host can address the memory.
            steps.append(self.lease)
        while True:
            step = self.random.choice(steps) if self.arrays else self.put
            self.outcomes["begun"] += 1
            try:
                # A request without an outcome by then fails the test.
                with trio.fail_after(PATIENCE):
                    if self.random.random() < 0.1:
                        with trio.move_on_after(self.random.uniform(0.0, 0.02)) as scope:
                            await step()
                        self.outcomes["cancelled" if scope.cancelled_caught else "done"] += 1
                    else:
                        await step()
                        self.outcomes["done"] += 1
            except LOST as error:
                self.outcomes[type(error).__name__] += 1
            except trio.Cancelled:
                self.outcomes["ended"] += 1
                raise

    def any(self) -> Array:
        return self.random.choice(self.arrays)

    async def changing(self, array: Array, host: npt.NDArray[np.float64], change: Awaitable[Any]) -> None:
        """Change an array in place; while it is not known whether it was, nobody is to use it."""
        self.arrays.remove(array)
        await change
        self.arrays.append(Array(array.ref, host))

    async def put(self) -> None:
        if len(self.arrays) > 6:
            self.arrays.pop(0)
        size = self.random.choice([8, 8, 8, 64, 256])
        host = np.random.default_rng(self.random.getrandbits(32)).integers(-9, 9, (size, size)).astype(float)
        self.arrays.append(Array(await self.device.put(host), host.copy()))

    async def read(self) -> None:
        array = self.any()
        out = np.zeros_like(array.host) if self.random.random() < 0.5 else None
        np.testing.assert_array_equal(await array.ref.to_host(out=out), array.host)

    async def scale(self) -> None:
        array = self.any()
        await self.changing(array, -array.host, ta.linalg.scal(-1.0, array.ref.reshape(-1)))

    async def add(self) -> None:
        array = self.any()
        ones = np.ones(array.host.size)
        await self.changing(array, array.host + 1.0, ta.linalg.axpy(1.0, ones, array.ref.reshape(-1)))

    async def multiply(self) -> None:
        array = self.any()
        product = await ta.linalg.matmul(array.ref, array.ref)
        np.testing.assert_array_equal(await product.to_host(), array.host @ array.host)

    async def chain(self) -> None:
        array = self.any()
        try:
            transform = self.device.submit(ta.fft.Rfft(array.ref))
            again = self.device.submit(ta.fft.Irfft(transform.value))
            product = self.device.submit(ta.linalg.Matmul(again.value, array.ref))
        except ta.QueueFullError:
            # clock: any moment will do
            await trio.sleep(0.01)
            return
        np.testing.assert_allclose(
            await (await product.wait()).to_host(), array.host @ array.host, rtol=1e-9, atol=1e-7
        )
        np.testing.assert_allclose(await again.value.to_host(), array.host, atol=1e-9)

    async def lease(self) -> None:
        array = self.any()
        async with array.ref.lease() as view:
            # clock: any moment will do
            await trio.sleep(self.random.choice([0.0, 0.001]))
            np.testing.assert_array_equal(view, array.host)

    async def forget(self) -> None:
        self.arrays.remove(self.any())
        await trio.lowlevel.checkpoint()


def harm_from_outside(device: ta.Device, kind: str) -> None:
    """A signal, to whom it may concern."""
    process = device.dispatch.process
    for found in [pid for pid in children() if LAUNCHER in command(pid)]:
        if kind == "launcher":
            _kill(found)
        elif kind == "spare" and process is not None:
            for pid in workers(found) - {process.pid}:
                _kill(pid)
    if process is not None and kind in SIGNALS:
        process.send_signal(SIGNALS[kind])


async def strike(device: ta.Device, source: random.Random, hits: Counter[str]) -> None:
    """Do harm of every kind, at random moments."""
    kinds = [*SIGNALS, "launcher", "spare", *FAULTS]
    while True:
        for kind in source.sample(kinds, len(kinds)):
            # It is to have done something in between.
            await until(lambda: device.state.availability.is_ready)
            await trio.sleep(source.uniform(0.0, 0.3))
            hits[kind] += 1
            if kind in FAULTS:
                ta.testing.inject_fault(device, source.choice(OPERATIONS), **FAULTS[kind])
            else:
                harm_from_outside(device, kind)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


LONG = pytest.mark.skipif("TRIO_ACCEL_SOAK" not in os.environ, reason="takes a minute; set TRIO_ACCEL_SOAK=1")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seconds", [10.0, pytest.param(60.0, marks=LONG)])
async def test_everything_at_once(system: ta.System, seconds: float) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    options = ta.DeviceOptions(
        isolation="process",
        spares=1,
        retry=1,
        retry_suspects=True,
        in_flight=8,
        stuck_after=0.5,
        cancel_grace=2.0,
        close_grace=2.0,
        heartbeat_timeout=1.0,
        intensity=ta.Intensity(10_000, 60.0),
        backoff=AT_ONCE,
    )
    outcomes: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    async with system.open_device(BACKEND, options=options) as device:
        await until(lambda: device.dispatch.spares == 1)
        before = descriptors()
        clients = [Client(device, random.Random(seed + number), outcomes) for number in range(TASKS)]
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(client.run)
                nursery.start_soon(strike, device, random.Random(seed), hits)
        print(dict(outcomes), dict(hits), f"generation {device.generation}")
        check_outcomes(outcomes, parts=1)
        assert device.generation > 3
        with trio.fail_after(60):
            await settled(device)
            for client in clients:
                for array in client.arrays:
                    if "damaged" not in repr(array.ref):
                        np.testing.assert_array_equal(await array.ref.to_host(), array.host)
        held = sum(array.ref.nbytes for client in clients for array in client.arrays)
        blocks = sum(len(client.arrays) for client in clients)
        gc.collect()
        with trio.fail_after(60):
            await wait_idle(device)
        await device.synchronize()
        found = await device.statistics()
        assert found.memory.blocks == blocks
        assert found.memory.used >= held
        clients.clear()
        del client, array, nursery
        gc.collect()
        await device.synchronize()
        found = await device.statistics()
        assert (found.memory.blocks, found.memory.used) == (0, 0)
        # Chunks come and go with the arrays; there is one worker, one spare, and their holders.
        await until(lambda: len(workers(launcher())) == 2 and device.dispatch.spares == 1)
        without_chunks = [
            target for target in descriptors().values() if target != "/memfd:trio_accel (deleted)"
        ]
        assert len(without_chunks) <= len(before) + 1


def check_outcomes(outcomes: Counter[str], *, parts: int) -> None:
    """Each has one outcome, and more is done than lost; at the end of a part each task has one open."""
    assert outcomes["begun"] == sum(outcomes.values()) - outcomes["begun"]
    assert outcomes["done"] > outcomes["begun"] / 2
    assert outcomes["ended"] <= TASKS * parts


async def wait_idle(device: ta.Device) -> None:
    """Wait until nothing is in flight and nothing waits, because submissions continue without their task."""
    while True:
        found = await device.statistics()
        if (found.in_flight, device.pending, dict(found.queues)) == (0, 0, {}):
            return
        await trio.sleep(0.01)


async def settled(device: ta.Device) -> None:
    """Waiting faults hit nobody, and the device serves."""
    for plan in tuple(device.state.faults.waiting):
        device.state.faults.remove(plan)
    while True:
        try:
            await (await device.put(np.ones(3))).to_host()
            await device.synchronize()
            return
        except LOST:
            await trio.sleep(0.01)
