"""One network in three forms, and its training only by NumPy: a hidden layer, softmax, cross entropy."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from array_module import ArrayModule

import trio_accel as ta
from trio_accel import train
from trio_accel.backends.base import Refused
from trio_accel.backends.base.kit.ranks import ENDED
from trio_accel.programs import current_rank

Arrays = Mapping[str, Any]
DIGITS = Path(__file__).parents[2] / "examples" / "data" / "digits.csv.gz"
# The first step of a worker loads much of PyTorch.
STOPPABLE = ta.DeviceOptions(isolation="process", spares=1, stuck_after=3.0, intensity=ta.Intensity(99, 1.0))


def digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the images as rows from 0 to 1, and their classes."""
    table = np.loadtxt(DIGITS, delimiter=",")
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)


def start(rng: np.random.Generator, width: int) -> dict[str, npt.NDArray[np.float64]]:
    """Return parameters of the beginning."""
    return {
        "w1": rng.normal(0, math.sqrt(2 / 64), (64, width)),
        "b1": np.zeros(width),
        "w2": rng.normal(0, math.sqrt(1 / width), (width, 10)),
        "b2": np.zeros(10),
    }


def slopes(parameters: Arrays, x: Any, y: Any) -> tuple[float, dict[str, Any]]:
    """Return the mean loss and its gradients."""
    hidden = np.maximum(x @ parameters["w1"] + parameters["b1"], 0)
    scores = hidden @ parameters["w2"] + parameters["b2"]
    scores = scores - scores.max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(x))
    slope = np.exp(logs)
    slope[rows, y] -= 1
    slope /= len(x)
    below = (slope @ parameters["w2"].T) * (hidden > 0)
    found = {"w1": x.T @ below, "b1": below.sum(axis=0), "w2": hidden.T @ slope, "b2": slope.sum(axis=0)}
    return float(-logs[rows, y].mean()), found


class NumpyMlp(ArrayModule):
    """The network in a program."""

    @classmethod
    def initial(cls, rng: np.random.Generator, *, width: int = 16) -> Arrays:
        return start(rng, width)

    def gradients(self, parameters: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        return slopes(parameters, batch["x"], batch["y"])


class DyingMlp(NumpyMlp):
    """The worker of rank r kills itself in batch 2 r: once, or `again` and again."""

    @classmethod
    def initial(cls, rng: np.random.Generator, *, folder: str, again: bool = False) -> Arrays:
        return start(rng, 16)

    def gradients(self, parameters: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        rank = current_rank().number
        mark = Path(self.options["folder"]) / str(rank)
        if batch["number"][0] == 2 * rank and (self.options.get("again") or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().gradients(parameters, batch)


class PartedMlp(NumpyMlp):
    """In batch 1, rank 1 meets nobody, this many times: NCCL may report it before a loss is known."""

    @classmethod
    def initial(cls, rng: np.random.Generator, *, folder: str, times: int) -> Arrays:
        return start(rng, 16)

    def gradients(self, parameters: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        marks = Path(self.options["folder"])
        seen = len(list(marks.iterdir()))
        if (current_rank().number, batch["number"][0]) == (1, 1) and seen < self.options["times"]:
            (marks / str(seen)).touch()
            raise Refused("the ranks no longer meet", code=ENDED)
        return super().gradients(parameters, batch)


class CallMlp(train.CallModule):
    """The network of own operations."""

    def __init__(self, *, width: int = 16) -> None:
        self.width = width

    def initial(self, rng: np.random.Generator) -> Arrays:
        return start(rng, self.width)

    def loss(self, parameters: Arrays, batch: Arrays) -> Any:
        hidden = ta.nn.relu(batch["x"] @ parameters["w1"] + parameters["b1"])
        scores = hidden @ parameters["w2"] + parameters["b2"]
        return ta.nn.cross_entropy(scores, batch["y"])


def batches(size: int, *, seed: int = 3, epochs: int = 1000) -> Iterator[dict[str, Any]]:
    """Yield batches of the digits, in another order in each epoch."""
    x, y = digits()
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for first in range(0, len(x) - size + 1, size):
            chosen = order[first : first + size]
            yield {"x": x[chosen], "y": y[chosen]}


def reference(
    steps: int,
    size: int,
    *,
    width: int = 16,
    lr: train.Schedule = lambda step: 1e-2,
    decay: float = 0.1,
    clip: float | None = None,
    momentum: float | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Train on one processor by the formulas of AdamW, or of SGD with momentum.

    Returns:
        The losses, and the parameters by name.
    """
    parameters: dict[str, Any] = start(np.random.default_rng(0), width)
    m = {name: np.zeros_like(array) for name, array in parameters.items()}
    v = {name: np.zeros_like(array) for name, array in parameters.items()}
    losses: list[float] = []
    for step, batch in zip(range(1, steps + 1), batches(size), strict=False):
        loss, found = slopes(parameters, batch["x"], batch["y"])
        losses.append(loss)
        norm = math.sqrt(sum(float((one * one).sum()) for one in found.values()))
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        for name, gradient in found.items():
            g, before = gradient * factor, parameters[name]
            if momentum is not None:
                m[name] = momentum * m[name] + g + decay * before
                parameters[name] = before - lr(step) * m[name]
                continue
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            direction = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)
            parameters[name] = before * (1 - lr(step) * decay) - lr(step) * direction
    return losses, parameters


class StagedMlp(ArrayModule):
    """The network as two stages, or its hidden layer shared by ranks, or both."""

    @property
    def sharded(self) -> tuple[str, ...]:  # type: ignore[override]  # all of the hidden layer
        return ("w1", "b1", "w2")

    def initial(self, rng: np.random.Generator, *, width: int = 16) -> Arrays:
        whole = start(rng, width)
        found: dict[str, Any] = {}
        if self.mesh.is_first:
            found |= {"w1": self.mesh.part(whole["w1"], 1), "b1": self.mesh.part(whole["b1"])}
        if self.mesh.is_last:
            found |= {"w2": self.mesh.part(whole["w2"]), "b2": whole["b2"]}
        return found

    def output_shape(self, rows: int) -> tuple[int, ...]:
        return (rows, self.options.get("width", 16) // self.mesh.tensor)

    def forward(self, parameters: Arrays, x: Any, batch: Arrays) -> tuple[Any, Any]:
        hidden = x
        if self.mesh.is_first:
            hidden = np.maximum(batch["x"] @ parameters["w1"] + parameters["b1"], 0)
        if not self.mesh.is_last:
            return hidden, (batch["x"], hidden, None)
        scores = hidden @ parameters["w2"]
        current_rank().group("tensor").all_reduce(scores)
        scores = scores + parameters["b2"]
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(scores))
        slope = np.exp(logs)
        slope[rows, batch["y"]] -= 1
        return -logs[rows, batch["y"]].mean(), (batch["x"], hidden, slope / len(scores))

    def backward(self, parameters: Arrays, kept: Any, slope: Any) -> tuple[Any, Arrays]:
        x, hidden, scores = kept
        found: dict[str, Any] = {}
        if self.mesh.is_last:
            scores = scores * slope
            found |= {"w2": hidden.T @ scores, "b2": scores.sum(axis=0)}
            slope = scores @ parameters["w2"].T
        if self.mesh.is_first:
            slope = slope * (hidden > 0)
            found |= {"w1": x.T @ slope, "b1": slope.sum(axis=0)}
        return slope, found


class BufferedMlp(NumpyMlp):
    """The network in a program, with buffers: the rows that rank 0 has seen, and their mean pixel."""

    def start(self, seed: int, options: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        parameters, _ = super().start(seed, options)
        return parameters, {"seen": np.array(0), "mean": np.zeros((1, 2), np.float32)}

    def gradients(self, parameters: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        self.made = {
            "seen": self.held["seen"] + len(batch["x"]),
            "mean": self.held["mean"] + batch["x"].mean(),
        }
        return super().gradients(parameters, batch)

    def _load(self, flat: Any, buffers: Any) -> None:
        super()._load(flat, None)
        self.held: Arrays = self.buffers.views(np.zeros(3) if buffers is None else buffers.copy())

    def _begin(self, source: Arrays, target: Arrays, work: Any) -> None:
        super()._begin(source, target, work)
        self._load(source["parameters"], source["buffers"])

    def _save_buffers(self, flat: Any) -> None:
        flat[:] = self.buffers.flattened(self.made, "float64")
