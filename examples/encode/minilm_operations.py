"""The sentence encoder in the package's operations: the same code on all backends, without another library.

The encoder records its pass as a graph for each length of a batch. So a batch is a single request to the
device, which `retry` repeats as a whole after a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from minilm import Shape, weights_of

import trio_accel as ta
from trio_accel import jit, nn

__all__ = ["NOTHING", "Attention", "OperationsEncoder", "attention", "fused_attention", "load_encoder"]

Array: TypeAlias = ta.AccelRef | ta.Call[ta.AccelRef]
Attention: TypeAlias = Callable[[ta.AccelRef, ta.AccelRef, ta.AccelRef, ta.AccelRef], Awaitable[ta.AccelRef]]
NOTHING = -1
"""The padding after the end of a sentence."""

_SHORTEST = 16

# A row for each token. Padding gets the row of word 0, which is ignored.
_embed = jit.elementwise(
    "words[maximum(tokens, 0), i(2)] + places[i(1), i(2)] + types[0, i(2)]",
    inputs=("tokens", "words", "places", "types"),
    name="embed",
)
_count = jit.reduction(f"tokens != {NOTHING}", "sum", name="count")
_pool = jit.reduction(
    f"where(tokens != {NOTHING}, float32(x), 0)", "sum", inputs=("tokens", "x"), name="pool"
)


@functools.cache
def _rounded(name: str, dtype: str) -> jit.Elementwise[ta.AccelRef]:
    """Return an expression in float32, rounded once to the dtype of the weights."""
    text = {
        "bias": "float32(x) + float32(bias)",
        "bias_residual": "float32(x) + float32(bias) + float32(residual)",
        "bias_gelu": "h = float32(x) + float32(bias); y = h * 0.5 * erfc(h * -0.7071067811865476)",
        "hide": "where(i(3) < lengths, float32(scores) * scale, -inf)",
    }[name]
    inputs = ("scores", "lengths", "scale") if name == "hide" else None
    return jit.elementwise(text, inputs=inputs, dtypes=dtype, name=name)


async def attention(
    query: ta.AccelRef, key: ta.AccelRef, value: ta.AccelRef, lengths: ta.AccelRef
) -> ta.AccelRef:
    """Compute attention by two products and a softmax, with all scores in memory.

    Args:
        query: Array of shape (sentences, heads, tokens, numbers).
        key: The same for keys.
        value: The same for values.
        lengths: The number of tokens in each sentence; later keys are ignored.
    """
    scores = query @ key.transpose(0, 1, 3, 2)
    hidden = _rounded("hide", str(query.dtype))(scores, lengths[:, None, None, None], query.shape[3] ** -0.5)
    return await (ta.arrays.softmax(hidden, axis=3) @ value)


async def fused_attention(
    query: ta.AccelRef, key: ta.AccelRef, value: ta.AccelRef, lengths: ta.AccelRef
) -> ta.AccelRef:
    """Compute the same as `attention` in one operation, if the backend supports it."""
    return await nn.scaled_dot_product_attention(query, key, value, key_lengths=lengths)


class OperationsEncoder:
    """A sentence encoder in the package's operations.

    Args:
        weights: Device arrays by the names of `weights_of`, joined as by `load_encoder`.
        shape: The shape of the encoder.
        batch: The number of sentences in a batch. Smaller batches are padded, so that there is only one graph
            for each length.
        attention: The attention: `attention` or `fused_attention`.
    """

    def __init__(
        self,
        weights: Mapping[str, ta.AccelRef],
        shape: Shape,
        batch: int = 8,
        attention: Attention = attention,
    ) -> None:
        self._weights = dict(weights)
        self._shape = shape
        self.batch = batch
        self._attention = attention
        self._tables = [weights[f"embeddings.{table}_embeddings.weight"] for table in _TABLES]
        self._graphs: dict[int, ta.graphs.Graph[ta.AccelRef]] = {}

    @property
    def device(self) -> ta.Device:
        """The device of the encoder."""
        return self._tables[0].device

    async def forward(self, tokens: ta.AccelRef) -> ta.AccelRef:
        """Compute embeddings of length 1 in float32, one operation after the other.

        Args:
            tokens: Numbers of tokens, a row for each sentence, padded with `NOTHING`. They are not checked:
                an invalid number counts as the last token.
        """
        size = (*tokens.shape, self._shape.width)
        lengths = await _count(tokens, axis=1)
        embedded = _embed(tokens[..., None], *self._tables, shape=size)
        x = await self._normalised("embeddings.LayerNorm", embedded).reshape((-1, size[2]))
        for layer in range(self._shape.layers):
            x = await self._layer(f"encoder.layer.{layer}.", x, lengths)
        # Use the sum of the tokens, because it equals their mean after the normalisation to length 1.
        total = _pool(tokens[..., None], x.reshape(size), axis=1)
        return await ta.arrays.rms_norm(total, size[2] ** -0.5, eps=0.0)

    async def graph(self, length: int) -> ta.graphs.Graph[ta.AccelRef]:
        """Return the recorded pass of batches with this length of the longest sentence."""
        found = self._graphs.get(length)
        if found is None:
            like = await self.device.full((self.batch, length), NOTHING, "int64")
            found = self._graphs[length] = await ta.graphs.capture(self.device, self.forward, like)
        return found

    async def embed(self, sentences: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.float32]:
        """Compute the embeddings of sentences in one batch: the model of a `ta.patterns.Batcher`.

        Args:
            sentences: The tokens of each sentence, valid for `check`; at most `batch` sentences.
        """
        tokens = np.full((self.batch, max(map(self.check, sentences))), NOTHING)
        for row, sentence in zip(tokens, sentences, strict=False):
            row[: len(sentence)] = sentence
        # The padding sentences need a token, because the softmax of nothing is NaN.
        tokens[len(sentences) :, 0] = 0
        graph = await self.graph(tokens.shape[1])
        found: npt.NDArray[np.float32] = await (await graph(tokens)).to_host()
        return found[: len(sentences)]

    def check(self, sentence: npt.NDArray[np.int64]) -> int:
        """Return the length of a sentence with padding: the key of a `ta.patterns.Batcher`.

        It is a power of two or the maximum, so that there are few lengths.

        Raises:
            ValueError: The sentence is empty, too long, or has an invalid token.
        """
        length, words, places = len(sentence), self._shape.words, self._shape.places
        if not 1 <= length <= places:
            raise ValueError(f"a sentence must have 1 to {places} tokens, got {length}")
        if sentence.min() < 0 or sentence.max() >= words:
            raise ValueError(f"tokens must be 0 to {words - 1}, got {sentence.min()} to {sentence.max()}")
        return min(max(1 << (length - 1).bit_length(), _SHORTEST), places)

    async def _layer(self, name: str, x: ta.AccelRef, lengths: ta.AccelRef) -> ta.AccelRef:
        sentences, heads = lengths.shape[0], self._shape.heads
        # Add the bias in the launch that separates the heads of queries, keys and values.
        apart = self._product(f"{name}{_JOINED}", x).reshape((sentences, -1, 3, heads, x.shape[1] // heads))
        bias = self._weights[f"{name}{_JOINED}.bias"].reshape((3, 1, heads, 1, -1))
        each = await self._expression("bias")(apart.transpose(2, 0, 3, 1, 4), bias)
        mixed = await self._attention(each[0], each[1], each[2], lengths)
        together = (await mixed.transpose(0, 2, 1, 3).copy()).reshape(x.shape)
        x = await self._add(f"{name}attention.output", together, x)
        inner = self._product(f"{name}intermediate.dense", x)
        bias = self._weights[f"{name}intermediate.dense.bias"]
        return await self._add(f"{name}output", self._expression("bias_gelu")(inner, bias), x)

    def _add(self, name: str, x: Array, residual: ta.AccelRef) -> ta.Call[ta.AccelRef]:
        made, bias = self._product(f"{name}.dense", x), self._weights[f"{name}.dense.bias"]
        added = self._expression("bias_residual")(made, bias, residual)
        return self._normalised(f"{name}.LayerNorm", added)

    def _product(self, name: str, x: Array) -> ta.Call[ta.AccelRef]:
        return x @ self._weights[f"{name}.weight"].T

    def _normalised(self, name: str, x: Array) -> ta.Call[ta.AccelRef]:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return ta.arrays.layer_norm(x, weight, bias, eps=self._shape.epsilon)

    def _expression(self, name: str) -> jit.Elementwise[ta.AccelRef]:
        return _rounded(name, str(self._tables[0].dtype))


_TABLES = ("word", "position", "token_type")
_JOINED = "attention.self"


async def load_encoder(
    device: ta.Device,
    path: Path,
    shape: Shape,
    *,
    dtype: str = "float32",
    batch: int = 8,
    attention: Attention = attention,
) -> OperationsEncoder:
    """Load weights onto a device, and join queries, keys and values into one product.

    Args:
        device: The device.
        path: A safetensors file with the names and shapes of `weights_of`.
        shape: The shape of the encoder.
        dtype: float32, float16 or bfloat16.
        batch: The number of sentences in a batch.
        attention: The attention: `attention` or `fused_attention`.
    """
    loaded = await ta.weights.load(device, path, names=weights_of(shape), packed=True, dtype=dtype)
    weights: dict[str, ta.AccelRef] = dict(loaded)
    for layer in range(shape.layers):
        name = f"encoder.layer.{layer}.{_JOINED}"
        for what in ("weight", "bias"):
            parts: list[Any] = [weights.pop(f"{name}.{part}.{what}") for part in ("query", "key", "value")]
            weights[f"{name}.{what}"] = await ta.arrays.concat(parts, axis=0)
    return OperationsEncoder(weights, shape, batch, attention)
