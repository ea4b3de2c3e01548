"""Gradients after the death of a worker: kept plans serve the next worker with the same bits."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays
NAMES = [name for name, number in NUMBERED if number == 0]
PARTS = 8

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="kills the worker of a device of the CPU")


async def slopes(device: ta.Device, case: Case) -> list[Any]:
    """Return the value and the gradients of a case, on the host."""
    values = [await device.put(host) for host in case.values()]
    shape = (await (case.f(*values) * 1.0)).shape
    weights = await device.put(numbers(shape, 99))
    value, found = await ta.value_and_grad(lambda x: a.sum(case.f(*x) * weights))(values)
    return [await value.to_host(), *[await slope.to_host() for slope in found]]


async def kill(device: ta.Device) -> None:
    """Kill the worker, and wait for the next one."""
    generation = device.generation
    os.kill((await device.statistics()).pid, signal.SIGKILL)
    with trio.fail_after(60):
        while device.generation == generation or not device.is_ready:  # noqa: ASYNC110  # nothing tells of it
            # clock: it waits for a process to end and another one to start
            await trio.sleep(0.01)


@pytest.mark.parametrize("part", range(PARTS))
async def test_gradients_have_the_same_bits_after_a_kill(system: ta.System, part: int) -> None:
    options = ta.DeviceOptions(isolation="process")
    cases = [CASES[name][0] if isinstance(CASES[name], list) else CASES[name] for name in NAMES[part::PARTS]]
    async with system.open_device("cpu", options=options) as device:
        # The third run uses a fused plan.
        before = [[await slopes(device, case) for _ in range(2)][-1] for case in cases]
        await kill(device)
        for name, case, want in zip(NAMES[part::PARTS], cases, before, strict=True):
            for ours, right in zip(await slopes(device, case), want, strict=True):
                np.testing.assert_array_equal(ours, right, err_msg=name)
