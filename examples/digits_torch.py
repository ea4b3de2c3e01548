"""The networks of `digits_models.py` in PyTorch, with the same initial parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import digits_models
import numpy as np

from trio_accel import train

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency
functional: Any = import_module("torch.nn.functional")


class _Digits(train.Module):
    """Float64 parameters, with the names in `digits_models`."""

    twin: type[train.CallModule]

    def configure(self, **options: Any) -> Any:
        """Create the parameters."""
        made = self.twin(**options).initial(np.random.default_rng(0))
        return torch.nn.ParameterDict({name: torch.from_numpy(array) for name, array in made.items()})


class Mlp(_Digits):
    """A network with one hidden layer."""

    twin = digits_models.Mlp

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean cross-entropy."""
        p = self.model
        hidden = functional.relu(batch["x"] @ p["w1"] + p["b1"])
        return functional.cross_entropy(hidden @ p["w2"] + p["b2"], batch["y"])


class Transformer(_Digits):
    """A transformer block with attention over the eight rows of an image."""

    twin = digits_models.Transformer

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean cross-entropy."""
        p = self.model
        width = p["join"].shape[0]
        x = batch["x"].reshape(-1, 8, 8) @ p["in"] + p["places"]
        seen = functional.rms_norm(x, (width,), p["n1"], 1e-6)
        scores = (seen @ p["query"]) @ (seen @ p["key"]).mT / math.sqrt(width)
        x = x + scores.softmax(-1) @ (seen @ p["value"]) @ p["join"]
        x = x + functional.relu(functional.rms_norm(x, (width,), p["n2"], 1e-6) @ p["up"]) @ p["down"]
        return functional.cross_entropy(x.mean(1) @ p["out"], batch["y"])
