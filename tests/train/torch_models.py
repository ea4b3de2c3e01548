"""Modules of PyTorch for the tests: whole, in stages, and with shared layers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from train_models import start

from trio_accel import train
from trio_accel.programs import current_rank

torch: Any = import_module("torch")
functional: Any = import_module("torch.nn.functional")


class TorchMlp(train.Module):
    """The network of `train_models.start`."""

    def configure(self, *, width: int = 16, dtype: str = "float64") -> Any:
        found = start(np.random.default_rng(0), width)
        given = {name: torch.tensor(array, dtype=getattr(torch, dtype)) for name, array in found.items()}
        return torch.nn.ParameterDict(given)

    def loss(self, batch: Mapping[str, Any]) -> Any:
        p = self.model
        hidden = functional.relu(batch["x"].to(p["w1"].dtype) @ p["w1"] + p["b1"])
        return functional.cross_entropy(hidden @ p["w2"] + p["b2"], batch["y"])


class SharedMlp(train.Module):
    """The same in two stages, or with a hidden layer that ranks share, or both."""

    def configure(self) -> Any:
        whole = {name: torch.tensor(one) for name, one in start(np.random.default_rng(0), 16).items()}
        mesh, found = self.mesh, {}
        if mesh.is_first:
            found["w1"] = mesh.part(whole["w1"].T).contiguous()
            found["b1"] = mesh.part(whole["b1"]).clone()
        if mesh.is_last:
            found["w2"] = mesh.part(whole["w2"].T, 1).contiguous()
            found["b2"] = whole["b2"]
        model = torch.nn.ParameterDict(found)
        for name, one in model.items():
            one.is_sharded = name != "b2"
        return model

    def output_shape(self, rows: int) -> tuple[int, ...]:
        return (rows, 16 // self.mesh.tensor)

    def stage(self, x: Any, batch: Mapping[str, Any]) -> Any:
        p = self.model
        if self.mesh.is_first:
            x = functional.relu(train.column_linear(batch["x"], p["w1"], p["b1"]))
        if not self.mesh.is_last:
            return x
        return functional.cross_entropy(train.row_linear(x, p["w2"], p["b2"]), batch["y"])


class Normed(train.Module):
    """A network with buffers: a batch norm."""

    def configure(self) -> Any:
        torch.manual_seed(1)
        # A bias here has a gradient of 0, and Adam would make steps of its rounding.
        first = torch.nn.Linear(64, 8, bias=False)
        layers = first, torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 10)
        return torch.nn.Sequential(*layers).double()

    def loss(self, batch: Mapping[str, Any]) -> Any:
        return functional.cross_entropy(self.model(batch["x"]), batch["y"])


class Dropped(TorchMlp):
    """Random numbers inside of a step; the first rank's worker learns of each step."""

    def loss(self, batch: Mapping[str, Any]) -> Any:
        p = self.model
        hidden = functional.dropout(functional.relu(batch["x"] @ p["w1"] + p["b1"]), 0.5)
        return functional.cross_entropy(hidden @ p["w2"] + p["b2"], batch["y"])


class Overflowing(TorchMlp):
    """Float16, with a loss that overflows if it is scaled by more than 128."""

    def loss(self, batch: Mapping[str, Any]) -> Any:
        return super().loss(batch) * 128


class Other(TorchMlp):
    """Another model on the second rank."""

    def configure(self, **options: Any) -> Any:
        try:
            rank = current_rank().number
        except RuntimeError:
            rank = self.mesh.rank
        return super().configure(width=16 + rank)


class Layers(torch.nn.Module):  # type: ignore[misc]  # without types
    """Batch norms of both kinds, tied and frozen parameters, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1)
        self.norm2d = torch.nn.BatchNorm2d(2)
        self.first, self.norm1d = torch.nn.Linear(128, 10), torch.nn.BatchNorm1d(10, affine=False)
        self.last, self.tied = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
        self.tied.weight = self.last.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("turned", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("same", self.mask)
        self.register_buffer("missing", None)
        self.register_buffer("table", torch.linspace(0, 1, 5))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.steps += 1
            self.scratch += 1
            self.turned *= 1j
        x = functional.relu(self.norm2d(self.conv(x.view(-1, 1, 8, 8))))
        return self.tied(functional.relu(self.last(self.norm1d(self.first(x.flatten(1))))))


class Layered(train.Module):
    """A network of `Layers`."""

    def configure(self) -> Any:
        return Layers()

    def loss(self, batch: Mapping[str, Any]) -> Any:
        dtype = next(self.model.parameters()).dtype
        return functional.cross_entropy(self.model(batch["x"].to(dtype)).double(), batch["y"])


class CountedLayers(Layers):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


class WithExtraState(Layered):
    """A network with a state that PyTorch keeps next to parameters and buffers."""

    def configure(self) -> Any:
        return CountedLayers()


class SameNames(SharedMlp):
    """Two stages, each with a parameter of the same name."""

    def configure(self) -> Any:
        shape = (16, 64) if self.mesh.is_first else (10, 16)
        return torch.nn.ParameterDict({"w": torch.ones(shape, dtype=torch.float64) / 16})

    def stage(self, x: Any, batch: Mapping[str, Any]) -> Any:
        if self.mesh.is_first:
            return functional.linear(batch["x"], self.model["w"])
        return functional.cross_entropy(functional.linear(x, self.model["w"]), batch["y"])
