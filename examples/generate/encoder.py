"""Embeddings of texts, from the encoder of `examples/encode` and a `Batcher`, in fair shares."""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import outcome
import trio
from asked import Given, listed
from errors import ApiError
from text import InputError, Text

import trio_accel as ta
from trio_accel.patterns import Batcher, FairScheduler, FairSubmit

__all__ = ["Encoder", "has_encode", "open_encoder"]

# The other example with the encoder. Its modules are imported on first use, because a copy of this folder
# serves texts without them.
_ENCODE = Path(__file__).parent.parent / "encode"
sys.path.append(str(_ENCODE))
# The maximum in the publisher's training of all-MiniLM-L6-v2 (sentence_bert_config.json).
MOST_TOKENS = 256
# The maximum number of a tenant's waiting texts.
MOST_WAITING = 4096
_Tokens: TypeAlias = npt.NDArray[np.int64]
_Embedding: TypeAlias = npt.NDArray[np.float32]


class Tokenize(Protocol):
    """A tokenizer of texts. Blocking."""

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; an empty list for a text without tokens."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Encoder:
    """An encoder of texts.

    Attributes:
        name: The name of the model.
        width: The size of an embedding.
        words: The number of tokens in the vocabulary.
        most: The maximum number of tokens in a text.
        tokenize: Converts texts to tokens.
        turns: Converts tokens to an embedding, in the fair turn of their tenant.
    """

    name: str
    width: int
    words: int
    most: int
    tokenize: Tokenize
    turns: ta.Ref[FairScheduler[_Tokens, _Embedding]]

    def tokens(self, given: Given) -> list[list[int]]:
        """Return the tokens of each text, or raise an error if there are none or too many. Blocking."""
        texts = listed(given)
        rows = [one if isinstance(one, list) else None for one in texts]
        made = iter(self.tokenize([one for one in texts if isinstance(one, str)]))
        found = [next(made) if row is None else row for row in rows]
        for number, row in enumerate(found):
            name = "input" if isinstance(given, str) else f"input[{number}]"
            if not 1 <= len(row) <= self.most:
                what = f"{name} must have 1 to {self.most} tokens, got {len(row)}"
                raise ApiError(what, "input", "context_length_exceeded" if row else "empty_string")
            if not 0 <= min(row) <= max(row) < self.words:
                raise ApiError(f"{name} must have tokens from 0 to {self.words - 1}", "input")
        return found

    async def answer(self, rows: Sequence[Sequence[int]], form: str, tenant: str = "") -> dict[str, Any]:
        """Return the embeddings of a tenant's texts as the interface describes them."""
        found: list[Any] = [None] * len(rows)

        async def embed(number: int) -> None:
            call = FairSubmit(np.array(rows[number], np.int64), tenant=tenant, cost=len(rows[number]))
            ask = partial(self.turns.ask, call)
            found[number] = await outcome.acapture(ask)

        async with trio.open_nursery() as nursery:
            for number in range(len(rows)):
                nursery.start_soon(embed, number)
        data = [
            {"object": "embedding", "index": number, "embedding": _as(form, one.unwrap())}
            for number, one in enumerate(found)
        ]
        count = sum(map(len, rows))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.name, "usage": usage}


def _as(form: str, embedding: _Embedding) -> list[float] | str:
    """Return an embedding as a list, or as the base64 of its float32, which clients request by default."""
    if form == "base64":
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
    found: list[float] = embedding.astype(np.float64).tolist()
    return found


def has_encode() -> bool:
    """Return whether the example with the encoder is next to this one."""
    return (_ENCODE / "minilm_files.py").is_file()


async def open_encoder(
    system: ta.System,
    device: ta.Device,
    folder: Path | None,
    random: Text | None,
    weights: Mapping[str, float] | None = None,
) -> Encoder | None:
    """Copy an encoder to a device, and open its batcher.

    Args:
        system: The system of the batcher.
        device: The device.
        folder: The model: see `minilm_files.find_model`. None for the installed one.
        random: The tokenizer of a small encoder with random weights; None for a model from a file.
        weights: Shares of the tenants; None for any tenant, with equal shares.

    Returns:
        The encoder; None if no folder is given, and none is installed, or if `examples/encode` is missing.

    Raises:
        InputError: The folder does not contain such a model, or `examples/encode` is missing.
    """
    if not has_encode():
        if folder is None:
            return None
        raise InputError(
            f"--encoder needs the modules of examples/encode, but {_ENCODE} is missing: copy it, too"
        )
    import minilm_files
    from encode_operations import RANDOM, write_random
    from minilm_operations import load_encoder

    if random is not None:
        with tempfile.TemporaryDirectory() as made:
            path, shape = Path(made) / "model.safetensors", RANDOM
            await write_random(device, path, shape)
            encoder = await load_encoder(device, path, shape)
        name, most = "random-encoder", shape.places
        tokenize: Tokenize = partial(_encode, random)
    else:
        try:
            model = await trio.to_thread.run_sync(minilm_files.find_model, folder)
        except minilm_files.InputError as error:
            if folder is None:
                return None
            raise InputError(str(error)) from None
        shape, name = model.shape, model.name
        encoder = await load_encoder(device, model.weights, shape)
        tokenize = await trio.to_thread.run_sync(_tokenizer, model.weights.with_name("tokenizer.json"))
        most = min(MOST_TOKENS, shape.places)
    batcher: ta.Ref[Batcher[_Tokens, _Embedding]] = await system.spawn(
        Batcher, encoder.embed, max_size=encoder.batch, max_in_flight=1, bucket=encoder.check, name="encoder"
    )
    turns: ta.Ref[FairScheduler[_Tokens, _Embedding]] = await system.spawn(
        FairScheduler,
        batcher,
        # One batch runs, while the next one waits.
        max_in_flight=2 * encoder.batch,
        weights=weights,
        max_queued=MOST_WAITING,
        name="encoder_turns",
    )
    return Encoder(name=name, width=shape.width, words=shape.words, most=most, tokenize=tokenize, turns=turns)


def _encode(text: Text, texts: Sequence[str]) -> list[list[int]]:
    return [text.encode(one) for one in texts]


def _tokenizer(path: Path) -> Tokenize:
    """Open a tokenizer without truncation."""
    from tokenizers import Tokenizer

    opened: Any = Tokenizer.from_file(str(path))
    opened.no_truncation()
    opened.no_padding()

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        made = opened.encode_batch(list(texts))
        return [[] if all(one.special_tokens_mask) else one.ids for one in made]

    return tokenize
