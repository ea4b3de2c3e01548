"""Train a network on images of digits, on several devices while their workers are killed and stopped.

The losses must equal the losses of a single undisturbed device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import trio
from training import arguments, trained

from trio_accel import train

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
LARGEST = {"calls": 1e-12, "torch": 1e-10}


def batches(rows: int, first: int) -> Iterator[train.Batch]:
    """Yield batches. Each epoch has every image once, in a different order."""
    table = np.loadtxt(DIGITS, delimiter=",")
    x, y = table[:, :-1] / 16, table[:, -1].astype(np.int64)
    each = -(-len(x) // rows)
    while True:
        epoch, number = divmod(first, each)
        chosen = np.random.default_rng((2, epoch)).permutation(len(x))[number * rows : (number + 1) * rows]
        yield {"x": x[chosen], "y": y[chosen]}
        first += 1


def main() -> int:
    """Train as the command line requests, and return 0 if the losses equal a single device's losses."""
    parser = arguments(__doc__, devices=2, steps=200)
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    parser.add_argument(
        "--by", choices=["calls", "torch"], default="calls", help="the package's operations, or PyTorch"
    )
    parser.add_argument("--rows", type=int, default=128, help="images in a batch")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    given = parser.parse_args()
    module = getattr(
        import_module(f"digits_{'models' if given.by == 'calls' else 'torch'}"), given.model.title()
    )
    warm = min(10, given.steps // 2)
    config = train.Config(
        optimizer=train.adamw(train.warmup_cosine(given.rate, warm, given.steps + 1), weight_decay=0.01),
        precision=train.Precision(compute="float64", master="float64"),
        parallel=train.Parallel(shard_optimizer=given.shard),
        checkpoint=None if given.checkpoints is None else train.Checkpoint(given.checkpoints, every=50),
    )

    def load(first: int) -> Iterator[train.Batch]:
        return batches(given.rows, first)

    losses, _ = trio.run(trained, given, module, config, load)
    if given.devices == 1 and not given.faults:
        return 0
    alone = argparse.Namespace(
        **(vars(given) | {"devices": 1, "faults": None, "curve": None, "shard": False})
    )
    expected, _ = trio.run(
        trained, alone, module, train.Config(optimizer=config.optimizer, precision=config.precision), load
    )
    gap = float(np.abs(np.subtract(losses, expected[-len(losses) :])).max())
    is_right = gap <= LARGEST[given.by]
    print(f"largest difference to one undisturbed device: {gap:.0e}, {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
