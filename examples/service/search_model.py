"""A model of the meaning of sentences: latent semantic analysis (Deerwester and others, 1990).

It is fitted to the sentences of the project's own guide, and kept in a safetensors file: a vector for each
word and one for each sentence. `SentenceModel` is the program that uses it on a device.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel.programs import Array

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
# The numbers of a vector, by the version of the model.
WIDTHS = {"v1": 96, "v2": 192}
# Words in more than this share of all sentences are left out.
MOST_COMMON = 0.2

# Words that say nothing of what a sentence is about, and ends that its other forms have.
FUNCTION_WORDS = """
an and are as at be been before but by can do does each else every for from had has have he her his how if
in into is it its just may me more most my no nor not of on one only or other our out over own same she
should so some such than that the their them then there these they this those through to too under until up
us was we were what when where which while who whom why will with would you your
"""
ENDS = ("ing", "ed", "es", "s", "e")

_SILENT = frozenset(FUNCTION_WORDS.split())
_WORD = re.compile(r"[a-z][a-z_]+")
_LEFT_OUT = re.compile(r"```.*?```|<!--.*?-->|^\|.*?$|^#.*?$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@attrs.frozen
class Sentence:
    """A sentence of the guide, and its page."""

    text: str
    page: str


@attrs.frozen
class Vocabulary:
    """The words that a model knows, with their numbers."""

    numbers: dict[str, int]

    def known(self, text: str) -> list[int]:
        """The numbers of the words of a text."""
        found = [self.numbers.get(word) for word in words_of(text)]
        return [number for number in found if number is not None]

    def batch(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The words of several texts as two arrays with a row for each: numbers, and which are there."""
        rows = [self.known(text) for text in texts]
        width = max(1, *map(len, rows))
        numbers = np.zeros((len(rows), width), np.int64)
        shown = np.zeros((len(rows), width), np.float32)
        for place, row in enumerate(rows):
            numbers[place, : len(row)], shown[place, : len(row)] = row, 1.0
        return numbers, shown


def words_of(text: str) -> list[str]:
    """The words of a text that say what it is about, without their ends."""
    return [stem_of(word) for word in _WORD.findall(text.lower()) if word not in _SILENT]


def stem_of(word: str) -> str:
    """A word without its end: "killed" and "kills" are one word."""
    for end in ENDS:
        if word.endswith(end) and len(word) >= len(end) + 4 and not word.endswith("ss"):
            return word.removesuffix(end)
    return word


def read_sentences(folder: Path = GUIDE) -> list[Sentence]:
    """The sentences of all pages of the guide, without tables and code."""
    found: dict[str, Sentence] = {}
    for page in sorted(folder.glob("*.md")):
        text = _LINK.sub(r"\1", _LEFT_OUT.sub("\n\n", page.read_text(encoding="utf-8")))
        for paragraph in re.split(r"\n\s*\n|\n\* ", text):
            plain = " ".join(paragraph.replace("**", "").replace("`", "").split())
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", plain):
                if 4 <= len(sentence.split()) <= 60:
                    found.setdefault(sentence, Sentence(sentence, page.stem))
    return list(found.values())


async def fit(device: ta.Device, folder: Path, sentences: Sequence[Sentence]) -> None:
    """Fit models of all widths on a device, and write them to files.

    Each sentence is a row of weighted word counts. The directions in which the rows differ most are
    eigenvectors of their Gram matrix, and a word's vector is its row of these.
    """
    counts = [Counter(words_of(sentence.text)) for sentence in sentences]
    spread = Counter(word for row in counts for word in row)
    # A word of one sentence relates to nothing, and one of many says nothing.
    words = [word for word in spread if 2 <= spread[word] <= MOST_COMMON * len(counts)]
    vocabulary = Vocabulary({word: number for number, word in enumerate(words)})
    rarity = np.log(len(counts) / np.array([spread[word] for word in words]))
    numbers, shown = vocabulary.batch([sentence.text for sentence in sentences])
    rows = np.zeros((len(counts), len(words)))
    np.add.at(rows, (np.arange(len(rows))[:, None], numbers), shown)
    rows = np.log1p(rows) * rarity
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    there = await device.put(rows.astype(np.float32))
    _, vectors = await ta.linalg.eigh(await ta.linalg.matmul(there.T, there))
    directions = await vectors.to_host()
    text = {
        "words": json.dumps(words),
        "sentences": json.dumps([(sentence.text, sentence.page) for sentence in sentences]),
    }
    for version, width in WIDTHS.items():
        table = (directions[:, -width:] * rarity[:, None]).astype(np.float32)
        corpus = (shown[:, :, None] * table[numbers]).sum(1)
        corpus /= np.maximum(np.linalg.norm(corpus, axis=1, keepdims=True), 1e-12)
        arrays = {"table": await device.put(table), "corpus": await device.put(corpus)}
        await ta.weights.save(file_of(folder, version), arrays, metadata=text)


def file_of(folder: Path, version: str) -> Path:
    """Where a model is."""
    return folder / f"{version}.safetensors"


async def make_models(device: ta.Device, folder: Path) -> None:
    """Fit the models, unless they are in the folder already."""
    await trio.Path(folder).mkdir(parents=True, exist_ok=True)
    for version in WIDTHS:
        if not await trio.Path(file_of(folder, version)).exists():
            await fit(device, folder, await trio.to_thread.run_sync(read_sentences))
            return


class SentenceModel:
    """The program: it has the vectors, and computes with NumPy, or with PyTorch on a GPU.

    Args:
        table: A vector for each word.
        corpus: A vector of length 1 for each sentence.
    """

    def __init__(self, table: Array, corpus: Array) -> None:
        self._torch: Any = None if isinstance(table, np.ndarray) else import_module("torch")
        self._table, self._corpus = self._array(table), self._array(corpus)

    def warm_up(self) -> None:
        """Load what a first call loads, before a request waits for it."""
        make: Any = self._torch or np
        number, shown = make.zeros((1, 1), dtype=make.int64), make.ones((1, 1), dtype=make.float32)
        if self._torch is not None:
            number, shown = number.cuda(), shown.cuda()
        self.similar(number, shown, 1)

    def embed(self, words: Array, shown: Array) -> Array:
        """Vectors of length 1, or 0 for a text without a known word; `words` has a row for each text."""
        vectors = (self._table[self._array(words)] * self._array(shown)[:, :, None]).sum(1)
        lengths = ((vectors * vectors).sum(1) ** 0.5)[:, None]
        return vectors / lengths.clip(1e-12)

    def similar(self, words: Array, shown: Array, count: int) -> tuple[Array, Array]:
        """The numbers of the nearest sentences of each text, and the cosines of the angles to them."""
        cosines = self.embed(words, shown) @ self._corpus.T
        nearest = (-cosines).argsort(1)[:, :count]
        if self._torch is None:
            return nearest, np.take_along_axis(cosines, nearest, 1)
        return nearest, cosines.gather(1, nearest)

    def _array(self, array: Any) -> Any:
        if self._torch is None:
            return array
        return self._torch.as_tensor(array, device="cuda")
