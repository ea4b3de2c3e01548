"""SmolLM2 in PyTorch for training, with the layers and names of `examples/generate/llama.py`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trio_accel import train

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency
nn: Any = import_module("torch.nn")
functional: Any = import_module("torch.nn.functional")
load_file: Any = import_module("safetensors.torch").load_file

# Products with the same input are joined into one.
TARGETS = ("layers.*.query_key_value", "layers.*.attention_output", "layers.*.gate_up", "layers.*.down")


class Layer(nn.Module):  # type: ignore[misc]  # without types, as above
    """Attention and a gated product, each with a residual connection."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        self.heads, self.groups, self.width = config["heads"], config["groups"], config["width"]
        numbers, inner = self.heads * self.width, config["inner"]
        self.attention_norm = nn.RMSNorm(numbers, config["epsilon"])
        self.query_key_value = nn.Linear(numbers, (self.heads + 2 * self.groups) * self.width, bias=False)
        self.attention_output = nn.Linear(numbers, numbers, bias=False)
        self.feed_norm = nn.RMSNorm(numbers, config["epsilon"])
        self.gate_up = nn.Linear(numbers, 2 * inner, bias=False)
        self.down = nn.Linear(inner, numbers, bias=False)

    def forward(self, x: Any, cosines: Any, sines: Any) -> Any:
        """Return the next layer's input, of shape (rows, length, numbers)."""
        rows, length, _ = x.shape
        made = self.query_key_value(self.attention_norm(x)).view(rows, length, -1, self.width).transpose(1, 2)
        turning = self.heads + self.groups
        turned = made[:, :turning]
        # Rotate pairs of adjacent numbers, as the weights of a GGUF file require.
        swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        turned = turned * cosines + swapped * sines
        query, key, value = turned[:, : self.heads], turned[:, self.heads :], made[:, turning:]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.attention_output(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class SmolLM(nn.Module):  # type: ignore[misc]
    """A model that scores the next token at each position. The token embedding is also its last layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.words = nn.Embedding(config["words"], config["heads"] * config["width"])
        self.layers = nn.ModuleList([Layer(config) for _ in range(config["layers"])])
        self.norm = nn.RMSNorm(config["heads"] * config["width"], config["epsilon"])

    def forward(self, ids: Any) -> Any:
        """Return scores of shape (rows, length, words) for ids of shape (rows, length)."""
        x = self.words(ids)
        pairs = torch.arange(0, self.config["width"], 2, device=ids.device).double() / self.config["width"]
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.config["base"] ** -pairs
        signs = torch.tensor([-1.0, 1.0], device=ids.device).repeat(len(pairs))
        cosines, sines = (
            turn(angles).repeat_interleave(2, dim=1).to(x.dtype) for turn in (torch.cos, torch.sin)
        )
        for layer in self.layers:
            x = layer(x, cosines, sines * signs.to(x.dtype))
        return functional.linear(self.norm(x), self.words.weight)


def model_of(config: Mapping[str, Any], weights: str) -> Any:
    """Load the model from a safetensors file with the names of `llama.weights_of`."""
    with torch.device("meta"):
        model = SmolLM(config)
    found = load_file(weights)
    model.load_state_dict(
        {
            f"layers.{name}.weight" if name[0].isdigit() else f"{name}.weight": one
            for name, one in found.items()
        },
        assign=True,
    )
    return model


def cross_entropy(model: Any, ids: Any) -> Any:
    """Return the mean loss of the next tokens. Rows of ids end with an extra token, the last target."""
    scores = model(ids[:, :-1])
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]).float(), ids[:, 1:].reshape(-1))


class Finetuned(train.Module):
    """The model for a trainer, which trains only the adapters."""

    def configure(
        self, *, shape: Mapping[str, Any], weights: str, rank: int, alpha: float, targets: list[str]
    ) -> Any:
        """Read the weights, and add the adapters."""
        return train.Lora(targets, rank=rank, alpha=alpha).add(model_of(shape, weights))

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of a batch, with ``"ids"`` of shape (rows, length + 1)."""
        return cross_entropy(self.model, batch["ids"])
