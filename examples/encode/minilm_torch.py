"""The sentence encoder in PyTorch, for CUDA: its weights are tensors over the device's arrays."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from minilm import Encoder, embeddings_of

import trio_accel as ta

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TorchEncoder"]

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency
functional: Any = import_module("torch.nn.functional")

# Read at the first use of cuBLAS. With a separate workspace for each stream, sums have a fixed order.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The sizes of batches for the warm-up: sentences and tokens.
_WARM = ((1, 16), (4, 32))


class TorchEncoder(Encoder):
    """`Encoder` in PyTorch. The same batch gives the same bits in each run."""

    def __init__(self, weights: Mapping[str, Any], *, layers: int, heads: int, epsilon: float) -> None:
        os.environ.setdefault(*_WORKSPACE)
        tensors = {name: _tensor(weight) for name, weight in weights.items()}
        super().__init__(tensors, layers=layers, heads=heads, epsilon=epsilon)
        self._words: Any = tensors["embeddings.word_embeddings.weight"]

    def warm_up(self) -> None:
        """Load cuBLAS and its kernels, which depend on the size of a batch, before the first request."""
        for sentences, tokens in _WARM:
            ids = torch.ones((sentences, tokens), dtype=torch.int64, device=self._words.device)
            self.encode(ids, torch.ones_like(ids, dtype=torch.float32), self._words.shape[1])

    @ta.programs.method(out=embeddings_of)
    def encode(self, ids: ta.programs.Array, mask: ta.programs.Array, width: int) -> ta.programs.Array:
        """See `Encoder.encode`."""
        shown = _tensor(mask)
        with torch.inference_mode():
            x = self._layered(_tensor(ids), (shown > 0)[:, None, None, :])
            mean = (x * shown[:, :, None]).sum(1) / shown.sum(1, keepdim=True)
            return functional.normalize(mean, dim=1)

    @ta.programs.method(updates=["ids"])
    def look_up(self, ids: ta.programs.Array) -> None:
        """Look up words without a check, so that an index out of range fails an assertion in a kernel.

        The declaration claims that the argument changes, so that this never runs twice.
        """
        with torch.inference_mode():
            # Read only one column, because each failing thread prints a line.
            self._words[:, 0][_tensor(ids)]

    def _attend(self, query: Any, key: Any, value: Any, hidden: Any) -> Any:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden)

    def _dense(self, name: str, x: Any) -> Any:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normalised(self, name: str, x: Any) -> Any:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self._epsilon)

    def _gelu(self, x: Any) -> Any:
        return functional.gelu(x)


def _tensor(array: Any) -> Any:
    """Return a device array as a tensor over the same memory."""
    device = "cuda" if hasattr(array, "__cuda_array_interface__") else None
    return torch.as_tensor(array, device=device)
