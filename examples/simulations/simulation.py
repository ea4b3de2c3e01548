"""The common part of the simulations: their command line, and steps with killed workers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
from drawing import write

import trio_accel as ta

State = tuple[ta.AccelRef, ...]
Step = Callable[..., Awaitable[State]]


@attrs.frozen(kw_only=True)
class Simulation:
    """A simulation, which starts with a size and a seed.

    Attributes:
        start: Puts the first state on a device, and returns it with the step: a function that takes the
            state's arrays and returns new ones. So an interrupted step can run again.
        picture: Makes a picture of a state on the host: RGB, uint8, of shape (h, w, 3).
        operation: The operation of a step: a graph, into which the step is captured; or, for a step that
            graphs do not support, the name of one of its operations.
    """

    start: Callable[[ta.Device, int, int], Awaitable[tuple[State, Step]]]
    picture: Callable[..., np.ndarray]
    operation: type[ta.graphs.Replay[Any]] | str = ta.graphs.Replay


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """The results of a run: the last state, pictures, and the seconds of the steps."""

    last: tuple[np.ndarray, ...]
    pictures: list[np.ndarray]
    seconds: float


async def run(
    device: ta.Device,
    simulation: Simulation,
    size: int,
    steps: int,
    seed: int,
    *,
    kills: int = 0,
    pictures: int = 0,
) -> Run:
    """Run the steps of a simulation, with kills and pictures at equal intervals."""
    state, step = await simulation.start(device, size, seed)
    if simulation.operation is ta.graphs.Replay:
        step = await ta.graphs.capture(device, step, *state)
    await step(*state)  # compiles, and changes nothing
    drawn, seconds = list[np.ndarray](), 0.0
    for number in range(steps):
        if number * (kills + 1) // steps > (number - 1) * (kills + 1) // steps and number:
            ta.testing.inject_fault(device, simulation.operation, kill=True)
        begin = time.perf_counter()
        state = await step(*state)
        seconds += time.perf_counter() - begin
        if (number + 1) * pictures // steps > number * pictures // steps:
            drawn.append(simulation.picture(*await to_host(state)))
    return Run(last=await to_host(state), pictures=drawn, seconds=seconds)


async def to_host(state: State) -> tuple[np.ndarray, ...]:
    """Copy the arrays of a state to the host."""
    return tuple([await array.to_host() for array in state])


async def simulate(arguments: argparse.Namespace, simulation: Simulation) -> int:
    """Run as the command line requests, and return the exit code: 1 if a kill has changed a bit."""
    options = ta.DeviceOptions(isolation="process" if arguments.faults else "inline", retry=1)
    what = (simulation, arguments.size, arguments.steps, arguments.seed)
    pictures = min(arguments.steps, 1 if arguments.out and arguments.out.suffix == ".png" else 100)
    async with (
        ta.open_system("simulation") as system,
        system.open_device(arguments.backend, options=options) as device,
    ):
        done = await run(device, *what, pictures=pictures if arguments.out else 0)
        print(f"{arguments.steps} steps on {device.name}: {arguments.steps / done.seconds:.1f} a second")
        if arguments.out:
            await trio.to_thread.run_sync(write, arguments.out, done.pictures)
        if not arguments.faults:
            return 0
        again = await run(device, *what, kills=3)
        pairs = zip(done.last, again.last, strict=True)
        is_same = device.generation == 4 and all(a.tobytes() == b.tobytes() for a, b in pairs)
    print(f"killed {device.generation - 1} times: {'the same bits' if is_same else 'WRONG'}")
    return 0 if is_same else 1


def command(description: str | None, *, size: int, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every simulation."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu", help="device to use, such as cpu or cuda:1")
    parser.add_argument("--size", type=int, default=size, help=f"size (default: {size})")
    parser.add_argument("--steps", type=int, default=steps, help=f"number of steps (default: {steps})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random start")
    parser.add_argument("--faults", action="store_true", help="kill the worker three times, and compare")
    parser.add_argument("--out", type=Path, help=".png for the last picture; .apng, .gif or .mp4 for a film")
    return parser


def program(description: str | None, simulation: Simulation, *, size: int, steps: int) -> int:
    """Run the program of a simulation, and return its exit code."""
    return trio.run(simulate, command(description, size=size, steps=steps).parse_args(), simulation)
