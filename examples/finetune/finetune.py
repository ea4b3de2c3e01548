"""Fine-tune SmolLM2-135M with adapters (LoRA) on a short text, while workers are killed and stopped.

It writes the adapter, a loss curve, checkpoints and a table of the steps to a folder.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "generate")]

from llama import Config  # noqa: E402  # of examples/generate
from smollm import TARGETS, Finetuned  # noqa: E402
from text import InputError, load_file, load_random  # noqa: E402
from training import disturb, draw, names  # noqa: E402  # of examples

import trio_accel as ta  # noqa: E402
from trio_accel import train  # noqa: E402

TEXT = HERE.parent / "encode" / "sense_and_sensibility.txt"
SMALL = Config(
    layers=2, heads=4, groups=2, width=16, inner=128, words=320, context=512, base=10_000.0, epsilon=1e-5
)
# A step may take seconds on a few cores, so a stopped worker counts as lost only after 30 s.
OPTIONS = ta.DeviceOptions(isolation="process", spares=1, stuck_after=30.0, intensity=ta.Intensity(99, 1.0))


def arguments() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="number of ranks")
    parser.add_argument("--backend", default="cpu", help="kind of the devices, such as cpu or cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4, help="pieces of text in a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens in a piece")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate after the warm-up")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--faults", type=float, metavar="SECONDS", help="time between faults")
    parser.add_argument("--every", type=int, default=50, help="steps between validations")
    parser.add_argument("--text", type=Path, default=TEXT, help="the text, in UTF-8")
    parser.add_argument("--folder", type=Path, default=Path("finetuned"), help="folder for the results")
    parser.add_argument("--random-weights", action="store_true", help="a small model, without a download")
    parser.add_argument("--dtype", default="float32", help="dtype of the computation")
    parser.add_argument("--check", action="store_true", help="compare with a loop in only PyTorch")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def pieces(tokens: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Cut tokens into rows. Each row ends with the first token of the next row."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise InputError(f"the text must have at least {length + 1} tokens, got {len(tokens)}")
    return np.stack([tokens[at * length : (at + 1) * length + 1] for at in range(count)])


def batches(rows: npt.NDArray[np.int64], size: int, first: int) -> Iterator[train.Batch]:
    """Yield batches. A batch with a given number always has the same rows."""
    while True:
        yield {"ids": rows[np.random.default_rng((3, first)).integers(0, len(rows), size)]}
        first += 1


async def finetune(
    given: Namespace, options: dict[str, Any], rows: npt.NDArray[np.int64], held_out: list[train.Batch]
) -> tuple[dict[str, Any], list[float], float]:
    """Train, and write the results.

    Returns:
        The adapter before the first step, the losses, and the perplexity of the validation.
    """
    lora = train.Lora(options["targets"], rank=options["rank"], alpha=options["alpha"])
    folder: Path = given.folder
    config = train.Config(
        optimizer=train.adamw(rates(given), weight_decay=0.01),
        clip_norm=1.0,
        precision=train.Precision(given.dtype, master=given.dtype),
        validate=held_out,
        validate_every=given.every,
        checkpoint=train.Checkpoint(folder / "checkpoints", every=given.every, best="loss"),
        loggers=[train.CsvLogger(folder / "steps.csv")],
        tokens=lambda batch: batch["ids"][:, 1:].size,
    )
    async with (
        ta.open_system("finetune") as system,
        system.open_devices(names(given.backend, given.devices), options=OPTIONS) as devices,
        train.open_trainer(devices, Finetuned, config, **options) as trainer,
        trio.open_nursery() as nursery,
    ):
        beginning, first = await trainer.parameters(), trainer.progress.step
        before = math.exp((await trainer.validate())["loss"])
        if given.faults:
            nursery.start_soon(disturb, trainer.devices, given.faults)
        steps = trainer.steps(
            lambda number: batches(rows, given.rows, number), until=given.steps, progress=not given.quiet
        )
        losses = [step.loss async for step in steps]
        after = math.exp((await trainer.validate())["loss"])
        lora.save(folder / "adapter.safetensors", await trainer.parameters(), base=trainer.base)
        # Stop the faults before the trainer closes.
        nursery.cancel_scope.cancel(reason="the training is over")
        print(
            f"{given.devices} ranks, {len(losses)} steps from {first} on, {trainer.workers_lost} workers lost"
        )
        print(f"validation perplexity {before:.4f} before, {after:.4f} after")
    draw(losses, first, folder / "losses.png")
    return beginning, losses, after


def rates(given: Namespace) -> train.Schedule:
    """Return the schedule of the learning rate."""
    return train.warmup_cosine(given.rate, min(10, given.steps // 2), given.steps + 1)


def main() -> int:
    """Fine-tune as the command line requests. Return 0, 1 if a check fails, or 2 if the input is unusable."""
    given = arguments().parse_args()
    try:
        loaded = load_random(SMALL) if given.random_weights else load_file()
        tokens = np.array(loaded.text.encode(given.text.read_text("utf-8")), np.int64)
        whole = pieces(tokens, given.length)
    except UnicodeDecodeError as error:
        print(f"{given.text} is not UTF-8 at byte {error.start}", file=sys.stderr)
        return 2
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    given.folder.mkdir(parents=True, exist_ok=True)
    # Keep the last tenth of the text for the validation.
    rows, rest = np.split(whole, [len(whole) - max(len(whole) // 10, 1)])
    held_out: list[train.Batch] = [{"ids": rest[at : at + 8]} for at in range(0, len(rest), 8)]
    with TemporaryDirectory() as folder:
        # All workers map the same file, so that a new worker starts quickly.
        weights = str(Path(folder) / "weights.safetensors")
        wide = np.float64 if given.dtype == "float64" else np.float32
        save: Any = import_module("safetensors.numpy").save_file
        save({name: one.astype(wide) for name, one in loaded.weights.items()}, weights)
        options = {
            "shape": attrs.asdict(loaded.config),
            "weights": weights,
            "rank": given.rank,
            "alpha": 2.0 * given.rank,
            "targets": [*TARGETS],
        }
        beginning, losses, after = trio.run(finetune, given, options, rows, held_out)
        return check(given, options, beginning, (losses, after), rows, held_out) if given.check else 0


def check(
    given: Namespace,
    options: dict[str, Any],
    beginning: dict[str, Any],
    found: tuple[list[float], float],
    rows: npt.NDArray[np.int64],
    held_out: list[train.Batch],
) -> int:
    """Compare with a loop in only PyTorch, and return the exit code."""
    import plain

    rate = rates(given)
    schedule = [rate(number) for number in range(1, given.steps + 1)]
    losses, perplexity = plain.trained(options, beginning, batches(rows, given.rows, 0), held_out, schedule)
    if len(found[0]) != given.steps:
        print("--check compares all steps, so the training must not continue from a checkpoint")
        return 1
    gap = float(np.abs(np.subtract(found[0], losses)).max())
    is_right = abs(found[1] - perplexity) <= 1e-4
    told = f"largest difference of a loss {gap:.0e}, of the perplexity {abs(found[1] - perplexity):.0e}"
    print(f"PyTorch alone: {perplexity:.4f}; {told}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
