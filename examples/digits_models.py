"""Two networks for images of digits, in the package's operations: the models of `train_digits.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel import train

Arrays = Mapping[str, Any]


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return rng.normal(0, math.sqrt(1 / rows), (rows, columns))


class Mlp(train.CallModule):
    """A network with one hidden layer."""

    def __init__(self, *, width: int = 64) -> None:
        self.width = width

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return the initial parameters."""
        width = self.width
        return {
            "w1": _matrix(rng, 64, width),
            "b1": np.zeros(width),
            "w2": _matrix(rng, width, 10),
            "b2": np.zeros(10),
        }

    def loss(self, parameters: Arrays, batch: Arrays) -> Any:
        """Return the mean cross-entropy."""
        hidden = ta.nn.relu(batch["x"] @ parameters["w1"] + parameters["b1"])
        return ta.nn.cross_entropy(hidden @ parameters["w2"] + parameters["b2"], batch["y"])


class Transformer(train.CallModule):
    """A transformer block with attention over the eight rows of an image."""

    def __init__(self, *, width: int = 32) -> None:
        self.width = width

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return the initial parameters."""
        width = self.width
        sizes = {"in": (8, width), "up": (width, 2 * width), "down": (2 * width, width), "out": (width, 10)}
        sizes |= dict.fromkeys(("query", "key", "value", "join"), (width, width))
        found = {name: _matrix(rng, *size) for name, size in sizes.items()}
        return {**found, "places": rng.normal(0, 0.1, (8, width)), "n1": np.ones(width), "n2": np.ones(width)}

    def loss(self, parameters: Arrays, batch: Arrays) -> Any:
        """Return the mean cross-entropy."""
        p, count = parameters, batch["x"].shape[0]
        x = batch["x"].reshape(count, 8, 8) @ p["in"] + p["places"]
        seen = ta.arrays.rms_norm(x, p["n1"])
        scores = (seen @ p["query"]) @ (seen @ p["key"]).mT * (1 / math.sqrt(self.width))
        x = x + ta.arrays.softmax(scores, axis=-1) @ (seen @ p["value"]) @ p["join"]
        x = x + ta.nn.relu(ta.arrays.rms_norm(x, p["n2"]) @ p["up"]) @ p["down"]
        return ta.nn.cross_entropy(ta.arrays.mean(x, axis=1) @ p["out"], batch["y"])
