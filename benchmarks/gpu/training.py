"""`python -m benchmarks.gpu.training`: a GPT on several GPUs, beside PyTorch's DDP in the same run.

It measures tokens a second undisturbed, with parameters of float32 and all in bfloat16, and under a worker
killed, poisoned or stopped every ten seconds, with a validation every 20 steps and averaged parameters.
``--phases`` prints how long the parts of a step take, on the host and on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import train

from ._sections import search_path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
SIZES = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304}
LENGTHS = {"length": SIZES["length"], "vocabulary": SIZES["vocabulary"]}
OPTIONS = ta.DeviceOptions(
    isolation="process", spares=1, preload=("torch",), intensity=ta.Intensity(99, 1.0), heartbeat_timeout=1.0
)


def batches(rows: int, first: int, length: int, vocabulary: int) -> Any:
    """Yield random tokens; a batch of a number always has the same ones."""
    for number in itertools.count(first):
        ids = np.random.default_rng((1, number)).integers(0, vocabulary, (rows, length + 1))
        yield {"ids": ids}


def ddp(given: argparse.Namespace, *, is_mixed: bool) -> float:
    """Train by `torch.distributed` alone; returns tokens a second."""
    program = [sys.executable, str(Path(__file__).with_name("_ddp.py")), str(given.ranks), str(given.rows)]
    program += [str(given.steps), str(int(is_mixed))]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    try:
        return float(json.loads(done.stdout.strip().splitlines()[-1])["tokens"])
    except (ValueError, IndexError):
        print(done.stdout[-1000:], done.stderr[-3000:])
        return float("nan")


def configured(given: argparse.Namespace, master: str, *, is_validated: bool) -> train.Config:
    """Return the configuration of a trainer."""
    config = train.Config(
        optimizer=train.adamw(1e-4, weight_decay=0.1),
        precision=train.Precision(compute="bfloat16", master=master),
        tokens=lambda batch: batch["ids"][:, 1:].size,
        replays=30,
    )
    if not is_validated:
        return config
    return attrs.evolve(
        config,
        validate=lambda: itertools.islice(batches(given.rows * given.ranks, 10**6, **LENGTHS), 2),
        validate_every=20,
        average=0.99,
    )


async def ours(
    given: argparse.Namespace,
    faults: float | None = None,
    seconds: float | None = None,
    *,
    master: str = "float32",
    is_timed: bool = False,
) -> dict[str, Any]:
    """Train by a trainer; returns what came out."""
    module: Any = import_module("gpt_model").GptModule  # beside the examples
    if is_timed:
        module = import_module("benchmarks.gpu._timed_gpt").TimedGpt
    names = list(itertools.islice(itertools.cycle([one.name for one in ta.list_devices()]), given.ranks))
    config = configured(given, master, is_validated=faults is not None)
    done: list[train.Step] = []
    sizes = dict(SIZES)
    async with (
        ta.open_system("train") as system,
        system.open_devices(names, options=attrs.evolve(OPTIONS, stuck_after=given.stuck_after)) as devices,
        train.open_trainer(devices, module, config, **sizes) as trainer,
        trio.open_nursery() as nursery,
    ):
        chosen: list[Any] = list(trainer.devices)

        async def disturb() -> None:
            for number in itertools.count():
                await trio.sleep(faults or 0.0)
                device = chosen[number % given.ranks]
                if number % 3 == 1:
                    with suppress(ta.AccelError):
                        ta.testing.poison(device)
                    continue
                pid = (await device.statistics()).pid
                assert pid is not None  # 0 would be this program's group
                os.kill(pid, signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL)

        def load(first: int) -> Any:
            return batches(given.rows * given.ranks, first, **LENGTHS)

        began = time.perf_counter()
        async for step in trainer.steps(load):
            done.append(step)
            if len(done) == 5:
                began = time.perf_counter()
                if faults:
                    nursery.start_soon(disturb)
            is_late = seconds is not None and time.perf_counter() - began > seconds and len(done) > 5
            if is_late or (seconds is None and len(done) == given.steps + 5):
                break
        spent = time.perf_counter() - began
        nursery.cancel_scope.cancel()
        snapshot, lost = trainer.snapshot_bytes, trainer.workers_lost
    tokens = sum(step.tokens for step in done[5:])
    return {
        "tokens": tokens / spent,
        "losses": [step.loss for step in done],
        "longest": max(step.seconds for step in done[5:]),
        "lost": lost,
        "replays": sum(step.replays for step in done),
        "snapshot": snapshot,
        "step": float(np.median([step.seconds for step in done[5:]])),
    }


def phases(given: argparse.Namespace) -> None:
    """Print the medians of the parts of a step, in milliseconds."""
    for master in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "phases")
            os.environ["PHASES"] = str(file)
            made = trio.run(partial(ours, given, master=master, is_timed=True))
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][5:]
        print(f"step {1e3 * made['step']:.1f} ms, {master}; of it on the host, and on the GPU:", flush=True)
        for name in lines[0]:
            host, device = np.median([line[name] for line in lines], axis=0)
            print(f"  {name:22} {host:8.2f} {device:8.2f}", flush=True)


def main() -> None:
    """Print the table."""
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)d %(message).160s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16, help="rows of a rank in a batch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--faults", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--stuck-after", type=float, help="see DeviceOptions.stuck_after")
    parser.add_argument("--phases", action="store_true")
    given = parser.parse_args()
    if given.phases:
        phases(given)
        return
    theirs = ddp(given, is_mixed=True)
    plain = ddp(given, is_mixed=False)
    print(f"DDP: {theirs:,.0f} tokens/s with parameters of float32, {plain:,.0f} all in bfloat16", flush=True)
    calm = trio.run(ours, given)
    whole = trio.run(partial(ours, given, master="bfloat16"))
    for what, one, peer in (("parameters of float32", calm, theirs), ("all in bfloat16", whole, plain)):
        print(
            f"trainer, {what}: {one['tokens']:,.0f} tokens/s, {one['tokens'] / peer:.3f} of DDP; step "
            f"{1e3 * one['step']:.1f} ms; second copy {one['snapshot'] / 1e9:.2f} GB",
            flush=True,
        )
    if not given.seconds:
        return
    hit = trio.run(ours, given, given.faults, given.seconds)
    count = min(len(hit["losses"]), len(calm["losses"]))
    gap = max(abs(a - b) for a, b in zip(hit["losses"][:count], calm["losses"][:count], strict=True))
    print(
        f"under faults: {hit['tokens']:,.0f} tokens/s, goodput {hit['tokens'] / calm['tokens']:.3f}; "
        f"{hit['lost']} workers lost, {hit['replays']} replays, longest step {hit['longest']:.2f} s; "
        f"largest difference of {count} losses {gap:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
