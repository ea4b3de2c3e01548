"""The common part of the training examples: faults, the loss curve, and the command line."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

import trio_accel as ta
from trio_accel import train

# A stopped worker counts as lost after two seconds.
OPTIONS = ta.DeviceOptions(isolation="process", spares=1, stuck_after=2.0)
KINDS = "kill", "poison", "stop"


async def disturb(devices: Sequence[ta.Device], every: float) -> None:
    """Kill the worker of one device, poison the context of the next one, stop a worker, and so on."""
    for device, kind in zip(itertools.cycle(devices), itertools.cycle(KINDS), strict=False):
        await trio.sleep(every)
        try:
            if kind == "poison":
                ta.testing.poison(device)
            elif (pid := (await device.statistics()).pid) is not None:  # pid 0 would be this process group
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except (ta.AccelError, ProcessLookupError):
            continue  # the device is still recovering from another loss


def names(backend: str, count: int) -> list[str]:
    """Return `count` devices of a backend; if there are fewer, some are repeated."""
    found = [info.name for info in ta.list_devices() if info.name.startswith(backend)]
    return list(itertools.islice(itertools.cycle(found), count))


def arguments(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all training examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--devices", type=int, default=defaults["devices"], help="number of ranks")
    parser.add_argument("--backend", default="cpu", help="kind of the devices, such as cpu or cuda")
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--faults", type=float, metavar="SECONDS", help="time between faults")
    parser.add_argument(
        "--shard", action="store_true", help="each rank keeps only its part of the optimizer's arrays"
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of checkpoints; continues from the newest one"
    )
    parser.add_argument("--curve", type=Path, help="PNG file for the loss curve")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


async def trained(
    given: argparse.Namespace, module: type, config: train.Config, batches: train.Batches, **options: object
) -> tuple[list[float], dict[str, object]]:
    """Train, print the results, and return the losses and the parameters."""
    async with (
        ta.open_system("train") as system,
        system.open_devices(names(given.backend, given.devices), options=OPTIONS) as devices,
        train.open_trainer(devices, module, config, **options) as trainer,
        trio.open_nursery() as nursery,
    ):
        if given.faults:
            nursery.start_soon(disturb, trainer.devices, given.faults)
        began, first = trio.current_time(), trainer.progress.step
        steps = trainer.steps(batches, until=given.steps, progress=not given.quiet)
        losses = [step.loss async for step in steps]
        seconds = trio.current_time() - began
        parameters = await trainer.parameters()
        # Stop the faults before the trainer closes.
        nursery.cancel_scope.cancel(reason="the training is over")
        told = f"{len(losses)} steps from {first} on in {seconds:.1f} s, {trainer.workers_lost} workers lost"
        print(f"{given.devices} ranks: {told}, loss {losses[-1] if losses else float('nan'):.6f}")
    if given.curve is not None:
        draw(losses, first, given.curve)
    return losses, dict(parameters)


def draw(losses: Sequence[float], first: int, path: Path) -> None:
    """Draw the loss curve."""
    from matplotlib.figure import Figure  # needs the project's extra `plot`

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(range(first + 1, first + 1 + len(losses)), losses)
    axes.set(xlabel="step", ylabel="loss", title=f"{len(losses)} steps")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
