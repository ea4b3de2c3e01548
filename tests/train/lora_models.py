"""A small network with adapters, for the tests: in a trainer, and in a loop of PyTorch alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trio_accel import train

torch: Any = import_module("torch")
functional: Any = import_module("torch.nn.functional")

LORA = train.Lora(["blocks.*.up", "blocks.*.down"], rank=2, alpha=3.0)


class Block(torch.nn.Module):  # type: ignore[misc]  # without types
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(functional.gelu(self.up(x))))


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(2)])
        self.last = torch.nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def adapted(drop: float = 0.0, width: int = 8, lora: train.Lora | None = LORA) -> Any:
    """Return the network with adapters, with the numbers of PyTorch's seed."""
    model = Net(width).double()
    for block in model.blocks:
        block.drop.p = drop
    return model if lora is None else lora.add(model)


DRAWN = [0]


class Unsteady(train.Module):
    """Its frozen parameters differ each time."""

    def configure(self) -> Any:
        DRAWN[0] += 1
        model = adapted()
        model.first.bias.data.fill_(DRAWN[0])
        return model

    def loss(self, batch: Mapping[str, Any]) -> Any:
        return functional.cross_entropy(self.model(batch["x"]), batch["y"])


class Adapted(train.Module):
    """The module of a trainer."""

    def configure(
        self, *, drop: float = 0.0, width: int = 8, is_full: bool = False, adapter: str | None = None
    ) -> Any:
        model = adapted(drop, width, None if is_full else LORA)
        if adapter is not None:
            LORA.put(model, adapter)
        return model

    def loss(self, batch: Mapping[str, Any]) -> Any:
        return functional.cross_entropy(self.model(batch["x"]), batch["y"])

    def validate(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        scores = self.model(batch["x"])
        is_right = scores.argmax(dim=1) == batch["y"]
        return {"loss": functional.cross_entropy(scores, batch["y"]), "right": is_right.double().mean()}
