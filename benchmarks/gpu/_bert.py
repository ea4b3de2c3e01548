"""A user's own model: BERT of `transformers`, with random weights. The class knows nothing of devices."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_accel.programs import Array, method

__all__ = ["Bert", "random_weights"]

torch: Any = import_module("torch")  # both without types, as they are no dependencies
transformers: Any = import_module("transformers")

_WIDTH, _PLACES, _WORDS = 768, 512, 30522


def _new_model() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=12,
        hidden_size=_WIDTH,
        num_attention_heads=12,
        intermediate_size=4 * _WIDTH,
        vocab_size=_WORDS,
        attn_implementation="sdpa" if torch.cuda.is_available() else "eager",
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def random_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a new model by name: 109 million numbers, the same ones each time."""
    torch.manual_seed(0)
    state: Mapping[str, Any] = _new_model().state_dict()
    return {name: weight.numpy() for name, weight in state.items() if weight.dtype == torch.float32}


class Bert:
    """BERT, whose weights are tensors over the arrays that it gets.

    Args:
        weights: Arrays by name, as `random_weights` returns them.
    """

    def __init__(self, weights: Mapping[str, Array]) -> None:
        with torch.device("meta"):
            self._model = _new_model().eval()
        state = {name: torch.from_dlpack(weight) for name, weight in weights.items()}
        self._model.load_state_dict(state, assign=True, strict=False)
        self._device: Any = state["embeddings.word_embeddings.weight"].device
        # Buffers, which are among no weights.
        embeddings = self._model.embeddings
        embeddings.position_ids = torch.arange(_PLACES, device=self._device)[None]
        embeddings.token_type_ids = torch.zeros((1, _PLACES), dtype=torch.long, device=self._device)

    def warm_up(self) -> None:
        """Load the kernels before a request waits."""
        with torch.inference_mode():
            self._model(input_ids=torch.zeros((8, 64), dtype=torch.long, device=self._device))

    @method(out=lambda ids: ((ids.shape[0], _WIDTH), "float32"))
    def encode(self, ids: Array) -> Array:
        """Return the first token's state of each text.

        Args:
            ids: Tokens, of shape (texts, tokens), int64. They are not checked: one that there is not is a
                failed assertion in a kernel.
        """
        with torch.inference_mode():
            states: Array = self._model(input_ids=torch.from_dlpack(ids)).last_hidden_state
            return states[:, 0]
