"""Steps of a simulation in a graph, as the simulations themselves make them."""

from __future__ import annotations

import numpy as np
from simulation import State, Step, to_host

import trio_accel as ta


async def walk(step: Step, state: State, steps: int) -> tuple[np.ndarray, ...]:
    graph = await ta.graphs.capture(state[0].device, step, *state)
    for _ in range(steps):
        state = await graph(*state)
    return await to_host(state)


async def put(device: ta.Device, *arrays: np.ndarray) -> State:
    return tuple([await device.put(array) for array in arrays])
