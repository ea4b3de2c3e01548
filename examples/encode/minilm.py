"""The sentence encoder in NumPy: a BERT in float32, with the mean of the tokens as embedding.

Devlin et al., "BERT", NAACL 2019; Reimers, Gurevych, "Sentence-BERT", EMNLP 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

import trio_accel as ta

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Encoder", "Shape", "embeddings_of", "weights_of"]


@attrs.frozen(kw_only=True)
class Shape:
    """The shape of an encoder.

    Attributes:
        layers: The number of layers.
        heads: The number of attention heads.
        width: The size of an embedding.
        inner: The width of the hidden layer after the attention.
        words: The number of tokens in the vocabulary.
        places: The maximum number of tokens in a sentence.
        types: The number of token types.
        epsilon: The number added to variances.
    """

    layers: int
    heads: int
    width: int
    inner: int
    words: int
    places: int
    types: int
    epsilon: float


_TABLES = ("word", "position", "token_type")


def weights_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of an encoder's weights, as in its file."""
    width, inner = shape.width, shape.inner
    dense = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    rows = (shape.words, shape.places, shape.types)
    found: dict[str, tuple[int, ...]] = {
        f"embeddings.{table}_embeddings.weight": (count, width)
        for table, count in zip(_TABLES, rows, strict=True)
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(shape.layers):
        name = f"encoder.layer.{layer}."
        for part, sizes in dense.items():
            found |= {f"{name}{part}.weight": sizes, f"{name}{part}.bias": sizes[:1]}
        norms += [f"{name}attention.output.LayerNorm", f"{name}output.LayerNorm"]
    return found | {f"{norm}.{what}": (width,) for norm in norms for what in ("weight", "bias")}


def embeddings_of(ids: ta.programs.Array, mask: ta.programs.Array, width: int) -> tuple[Any, str]:
    """Return the shape and dtype of the sentences' embeddings."""
    return (ids.shape[0], width), "float32"


class Encoder:
    """A sentence encoder in NumPy.

    Args:
        weights: Float32 arrays, by the names of `weights_of`.
        layers: The number of layers.
        heads: The number of attention heads.
        epsilon: The number added to variances.
    """

    def __init__(self, weights: Mapping[str, Any], *, layers: int, heads: int, epsilon: float) -> None:
        self._weights = dict(weights)
        self._layers = layers
        self._heads = heads
        self._epsilon = epsilon

    @ta.programs.method(out=embeddings_of)
    def encode(self, ids: ta.programs.Array, mask: ta.programs.Array, width: int) -> ta.programs.Array:
        """Return embeddings, which are unit vectors.

        Args:
            ids: The token numbers, int64, with a row for each sentence.
            mask: 1 for tokens and 0 for padding, float32.
            width: The size of an embedding.
        """
        # The weights of masked tokens are 0, because the exponential of -inf is 0.
        hidden = np.where(mask > 0, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        x = self._layered(ids, hidden)
        mean = np.einsum("btw,bt->bw", x, mask) / np.sum(mask, axis=1, keepdims=True)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def _layered(self, ids: Any, hidden: Any) -> Any:
        words, places, types = (self._weights[f"embeddings.{table}_embeddings.weight"] for table in _TABLES)
        x = self._normalised("embeddings.LayerNorm", words[ids] + places[: ids.shape[1]] + types[0])
        for layer in range(self._layers):
            x = self._layer(f"encoder.layer.{layer}.", x, hidden)
        return x

    def _layer(self, name: str, x: Any, hidden: Any) -> Any:
        query, key, value = (
            self._split(self._dense(f"{name}attention.self.{what}", x)) for what in ("query", "key", "value")
        )
        attended = self._joined(self._attend(query, key, value, hidden))
        x = self._normalised(
            f"{name}attention.output.LayerNorm", self._dense(f"{name}attention.output.dense", attended) + x
        )
        inner = self._gelu(self._dense(f"{name}intermediate.dense", x))
        return self._normalised(f"{name}output.LayerNorm", self._dense(f"{name}output.dense", inner) + x)

    def _split(self, x: Any) -> Any:
        """Return the heads of each token, with the axes sentence, head, token and number."""
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)

    def _joined(self, x: Any) -> Any:
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def _attend(self, query: Any, key: Any, value: Any, hidden: Any) -> Any:
        scores = query @ key.swapaxes(2, 3)
        scores /= np.float32(np.sqrt(query.shape[3]))
        scores += hidden
        scores -= scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores, out=scores)
        shares /= shares.sum(axis=-1, keepdims=True)
        return shares @ value

    def _dense(self, name: str, x: Any) -> Any:
        # Use a single product instead of one for each sentence.
        rows = x.reshape(-1, x.shape[-1]) @ self._weights[f"{name}.weight"].T
        rows += self._weights[f"{name}.bias"]
        return rows.reshape(*x.shape[:-1], -1)

    def _normalised(self, name: str, x: Any) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(x * x, axis=-1, keepdims=True)
        x /= np.sqrt(variance + np.float32(self._epsilon))
        x *= self._weights[f"{name}.weight"]
        x += self._weights[f"{name}.bias"]
        return x

    def _gelu(self, x: Any) -> Any:
        from scipy.special import erf

        shares = cast("Any", erf(x * np.float32(np.sqrt(0.5))))
        shares += np.float32(1)
        shares *= np.float32(0.5)
        x *= shares
        return x
