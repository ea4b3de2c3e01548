"""The same fine-tuning with only PyTorch: no trainer, one process, and hand-written adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from smollm import cross_entropy, model_of

torch: Any = import_module("torch")
parametrize: Any = import_module("torch.nn.utils.parametrize")


class Low(torch.nn.Module):  # type: ignore[misc]  # without types, because PyTorch is not a dependency
    """A weight plus the product of two small matrices."""

    def __init__(self, weight: Any, rank: int, alpha: float) -> None:
        torch.nn.Module.__init__(self)
        self.a = torch.nn.Parameter(torch.empty(rank, weight.shape[1], dtype=weight.dtype))
        self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], rank, dtype=weight.dtype))
        self.scale = alpha / rank

    def forward(self, weight: Any) -> Any:
        """Return the changed weight."""
        return weight + self.scale * (self.b @ self.a)


def trained(
    options: Mapping[str, Any],
    beginning: Mapping[str, Any],
    batches: Iterable[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    rates: Sequence[float],
) -> tuple[list[float], float]:
    """Train with a step for each rate.

    Args:
        options: The arguments of `Finetuned.configure`.
        beginning: The adapters before the first step, by name.
        batches: Batches of tokens.
        validation: The batches of the validation.
        rates: The learning rate of each step.

    Returns:
        The losses, and the perplexity of the validation after the last step.
    """
    model = model_of(options["shape"], options["weights"])
    model.requires_grad_(requires_grad=False)
    adapters: list[Any] = []
    for name in sorted({name.rpartition(".lora_")[0] for name in beginning}):
        layer = model.get_submodule(name)
        low = Low(layer.weight, options["rank"], options["alpha"])
        low.a.data.copy_(torch.from_numpy(beginning[f"{name}.lora_A.weight"]))
        parametrize.register_parametrization(layer, "weight", low)
        adapters += [low.a, low.b]
    optimizer, losses = torch.optim.AdamW(adapters, weight_decay=0.01), list[float]()
    for rate, batch in zip(rates, batches, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = cross_entropy(model, torch.from_numpy(batch["ids"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        rows = [len(batch["ids"]) for batch in validation]
        means = [cross_entropy(model, torch.from_numpy(batch["ids"])).item() for batch in validation]
    mean = sum(row * one for row, one in zip(rows, means, strict=True)) / sum(rows)
    return losses, math.exp(mean)
