"""The forward of a Llama in float64, written another way: token by token, head by head, without pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llama import Config


def logits_of(weights: Mapping[str, Any], config: Config, tokens: Sequence[int]) -> Any:
    """Logits after the last token of a sequence."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    keys: list[list[Any]] = [[] for _ in range(config.layers)]
    values: list[list[Any]] = [[] for _ in range(config.layers)]
    x = weights["words"][0]
    for position, token in enumerate(tokens):
        x = weights["words"][token]
        for layer in range(config.layers):
            normed = normalised(x, weights[f"{layer}.attention_norm"], config)
            heads = (weights[f"{layer}.query_key_value"] @ normed).reshape(-1, config.width)
            queries, new, made = np.split(heads, [config.heads, config.heads + config.groups])
            keys[layer].append([turned(key, position, config) for key in new])
            values[layer].append(made)
            mixed = [
                attended(
                    turned(query, position, config),
                    keys[layer],
                    values[layer],
                    head * config.groups // config.heads,
                )
                for head, query in enumerate(queries)
            ]
            x = x + weights[f"{layer}.attention_output"] @ np.concatenate(mixed)
            both = weights[f"{layer}.gate_up"] @ normalised(x, weights[f"{layer}.feed_norm"], config)
            gate, up = both[: config.inner], both[config.inner :]
            x = x + weights[f"{layer}.down"] @ (gate / (1 + np.exp(-gate)) * up)
    return weights["words"] @ normalised(x, weights["norm"], config)


def normalised(x: Any, weight: Any, config: Config) -> Any:
    return x / np.sqrt((x**2).mean() + config.epsilon) * weight


def turned(x: Any, position: int, config: Config) -> Any:
    """Neighbours are the parts of a complex number, which is turned."""
    rates = config.base ** (-2 * np.arange(config.width // 2) / config.width)
    numbers = (x[::2] + 1j * x[1::2]) * np.exp(1j * position * rates)
    return np.stack([numbers.real, numbers.imag], axis=1).ravel()


def attended(query: Any, keys: Sequence[Any], values: Sequence[Any], group: int) -> Any:
    scores = np.array([key[group] @ query for key in keys]) / len(query) ** 0.5
    shares = np.exp(scores - scores.max())
    return sum(share * value[group] for share, value in zip(shares / shares.sum(), values, strict=True))
