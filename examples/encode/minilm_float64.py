"""The embedding of one sentence in float64, by loops over heads and tokens, without batches and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    from minilm import Shape

    Doubles = npt.NDArray[np.float64]

__all__ = ["embed_one"]


def embed_one(weights: Mapping[str, Any], shape: Shape, ids: npt.NDArray[np.int64]) -> Doubles:
    """Compute `Encoder.encode` by independent code, for comparison.

    Args:
        weights: The weights in float64. Only the word table may be float32, because few of its rows are used.
        shape: The shape of the encoder.
        ids: The tokens of the sentence, without padding.
    """
    tables = {
        name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    }
    rows = [
        tables["word"][number].astype(np.float64) + tables["position"][place] + tables["token_type"][0]
        for place, number in enumerate(ids)
    ]
    x: Doubles = _norm(weights, "embeddings.LayerNorm", shape, np.stack(rows))
    for layer in range(shape.layers):
        at = f"encoder.layer.{layer}"
        attended = _dense(weights, f"{at}.attention.output.dense", _attention(weights, at, shape, x))
        x = _norm(weights, f"{at}.attention.output.LayerNorm", shape, x + attended)
        inner = _gelu(_dense(weights, f"{at}.intermediate.dense", x))
        x = _norm(weights, f"{at}.output.LayerNorm", shape, x + _dense(weights, f"{at}.output.dense", inner))
    mean = x.mean(axis=0)
    found: Doubles = mean / np.sqrt(mean @ mean)
    return found


def _attention(weights: Mapping[str, Any], at: str, shape: Shape, x: Doubles) -> Doubles:
    query, key, value = (
        _dense(weights, f"{at}.attention.self.{name}", x) for name in ("query", "key", "value")
    )
    size = shape.width // shape.heads
    heads: list[Doubles] = []
    for head in range(shape.heads):
        part = slice(head * size, (head + 1) * size)
        rows: list[Doubles] = []
        for token in query[:, part]:
            scores = np.exp(key[:, part] @ token / size**0.5)
            rows.append(scores / scores.sum() @ value[:, part])
        heads.append(np.stack(rows))
    return np.concatenate(heads, axis=1)


def _dense(weights: Mapping[str, Any], name: str, x: Doubles) -> Doubles:
    found: Doubles = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return found


def _norm(weights: Mapping[str, Any], name: str, shape: Shape, x: Doubles) -> Doubles:
    rows = [(row - row.mean()) / np.sqrt(row.var() + shape.epsilon) for row in x]
    found: Doubles = np.stack(rows) * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return found


def _gelu(x: Doubles) -> Doubles:
    from scipy.special import ndtr

    found: Doubles = x * ndtr(x)
    return found
