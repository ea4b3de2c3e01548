"""A GPT with the shape of GPT-2 (Radford et al., 2019), in PyTorch: the model of `train_gpt.py`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trio_accel import train

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency
nn: Any = import_module("torch.nn")
functional: Any = import_module("torch.nn.functional")


class Block(nn.Module):  # type: ignore[misc]  # without types, as above
    """Attention and a network of two layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Return the next block's input, which has the same shape."""
        rows, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):  # type: ignore[misc]
    """A model that scores the next token at each position. The token embedding is also its last layer."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("join.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, ids: Any) -> Any:
        """Return scores of shape (rows, length, vocabulary) for ids of shape (rows, length)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def cross_entropy(model: Any, ids: Any) -> Any:
    """Return the mean loss of the next tokens. Rows of ids end with an extra token, the last target."""
    scores = model(ids[:, :-1])
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]).float(), ids[:, 1:].reshape(-1))


class GptModule(train.Module):
    """A GPT for a trainer. Its batches have ``"ids"`` of shape (rows, length + 1)."""

    def configure(self, **sizes: Any) -> Any:
        """Create the model."""
        return Gpt(**sizes)

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of a batch."""
        return cross_entropy(self.model, batch["ids"])
