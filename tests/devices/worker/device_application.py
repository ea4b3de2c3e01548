"""A program that keeps a device in a worker busy: it reports its processes, and waits for its end.

The words on its command line select more events: ``hang`` and ``stop``, its worker does not answer; ``lose``,
it loses its worker again and again; ``fork``, a forked child holds the same descriptors; ``stage``, host
arrays are copied through host memory, as if it could not map the device's.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np
import trio

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend

GRACE = 0.5


def say(**facts: object) -> None:
    # In one piece, whatever the buffering.
    os.write(1, f"{json.dumps(facts)}\n".encode())


def fork() -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            signal.pause()
    return child


async def multiply(device: ta.Device) -> None:
    a = np.eye(64)
    while True:
        try:
            ref = await device.ask(ta.linalg.Matmul(a, 2.0 * a))
            assert (await ref.to_host() == 2.0 * a).all()
        except (ta.ContextLostError, ta.InputFailedError, ta.StaleRefError):
            await trio.lowlevel.checkpoint()


async def carry(device: ta.Device) -> None:
    """Large arrays, there and back."""
    host = np.arange(1 << 21, dtype=float)
    while True:
        try:
            ref = await device.put(host)
            assert (await ref.to_host())[-1] == host[-1]
        except (ta.ContextLostError, ta.InputFailedError, ta.StaleRefError):
            await trio.lowlevel.checkpoint()


async def lose(device: ta.Device) -> None:
    while True:
        process = device.dispatch.process
        if process is not None:
            process.kill()
        await trio.sleep(0.05)


async def main(words: list[str]) -> None:
    options = ta.DeviceOptions(
        isolation="process",
        spares=int("spare" in words),
        cancel_grace=GRACE,
        close_grace=GRACE,
        intensity=ta.Intensity(1000, 60.0),
        backoff=ta.Backoff(base=0.0),
    )
    if "stage" in words:
        CpuBackend.shares_memory_with_host = property(lambda self: False)  # type: ignore[assignment,method-assign]
    say(at="opening")
    async with (
        ta.open_system("application") as system,
        system.open_device("cpu", options=options) as device,
        trio.open_nursery() as nursery,
    ):
        ref = await device.put(np.ones(1 << 20))
        for _ in range(3):
            nursery.start_soon(multiply, device)
        nursery.start_soon(carry, device)
        if "hang" in words:
            ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
            nursery.start_soon(ta.linalg.scal, 2.0, ref)
        if "stop" in words:
            device.dispatch.process.send_signal(signal.SIGSTOP)
        if "lose" in words:
            nursery.start_soon(lose, device)
        say(at="working", child=fork() if "fork" in words else 0)
        await trio.sleep_forever()


status = 0
try:
    trio.run(main, sys.argv[1:])
except* KeyboardInterrupt:
    # As a shell would: any other error ends with a traceback and 1. Not from here, because with Python 3.11.2
    # an exit would be raised as a group.
    status = 128 + signal.SIGINT
sys.exit(status)
