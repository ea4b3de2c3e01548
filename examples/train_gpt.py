"""Train a GPT on several devices, while their workers are killed and stopped.

The text is this project's documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio
from gpt_model import GptModule
from training import arguments, trained

from trio_accel import train

PAGES = Path(__file__).parents[1] / "docs"
SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "length": 64, "vocabulary": 256},
    "small": {"layers": 6, "width": 384, "heads": 6, "length": 256, "vocabulary": 256},
    "124m": {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304},
}


def batches(text: npt.NDArray[np.uint8], rows: int, length: int, first: int) -> Iterator[train.Batch]:
    """Yield batches with pieces of the text. A batch with a given number always has the same pieces."""
    for number in itertools.count(first):
        starts = np.random.default_rng((1, number)).integers(0, len(text) - length - 1, rows)
        yield {"ids": np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)}


def main() -> int:
    """Train as the command line requests, and return the exit code."""
    parser = arguments(__doc__, devices=2, steps=50)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=16, help="pieces of text in a batch")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--dtype", default="float32", help="dtype of the computation: float32 or bfloat16")
    given = parser.parse_args()
    sizes = SIZES[given.size]
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(PAGES.rglob("*.md"))), np.uint8)
    warm = min(20, given.steps // 2)
    config = train.Config(
        optimizer=train.adamw(train.warmup_cosine(given.rate, warm, given.steps + 1), weight_decay=0.1),
        precision=train.Precision(compute=given.dtype),
        parallel=train.Parallel(shard_optimizer=given.shard),
        clip_norm=1.0,
        checkpoint=None if given.checkpoints is None else train.Checkpoint(given.checkpoints, every=100),
        tokens=lambda batch: batch["ids"][:, 1:].size,
    )
    losses, _ = trio.run(
        lambda: trained(
            given,
            GptModule,
            config,
            lambda first: batches(text, given.rows, sizes["length"], first),
            **sizes,
        )
    )
    return 0 if not losses or np.isfinite(losses).all() else 1


if __name__ == "__main__":
    raise SystemExit(main())
