"""A sentence encoder of random numbers, in the layout of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from minilm import Shape, weights_of

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["the", "a", "of", "to", "and", "he", "she", "it", "was", "not", "child", "money", "noise", "house"],
]
SHAPE = Shape(layers=2, heads=3, width=24, inner=40, words=len(WORDS), places=300, types=2, epsilon=1e-12)
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": SHAPE.layers,
    "num_attention_heads": SHAPE.heads,
    "hidden_size": SHAPE.width,
    "intermediate_size": SHAPE.inner,
    "vocab_size": SHAPE.words,
    "max_position_embeddings": SHAPE.places,
    "type_vocab_size": SHAPE.types,
    "layer_norm_eps": SHAPE.epsilon,
}


def random_weights(shape: Shape, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(sizes, np.float32) * np.float32(0.5)
        for name, sizes in weights_of(shape).items()
    }


def write_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder / "model.safetensors", random_weights(SHAPE))
    return folder


def write_weights(path: Path, weights: dict[str, Any]) -> None:
    header, data = {}, b""
    for name, array in {**weights, "pooler.dense.bias": np.zeros(3, np.float32)}.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
