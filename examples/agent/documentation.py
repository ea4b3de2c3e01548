"""The pages of the project's documentation, cut into passages, and the index of their embeddings."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import attrs
import numpy as np
import trio
from encoder import Encoder

import trio_accel as ta
from trio_accel.agents import VectorIndex
from trio_accel.patterns import FairSubmit

__all__ = ["DOCS", "Passage", "Passages", "embedding", "open_index", "passages_of"]

DOCS = Path(__file__).parents[2] / "docs"
WORDS, AT_ONCE = 110, 16
# The weight of the words shared by a question and a passage, relative to the cosine of their embeddings.
SHARED = 0.5
_CODE = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_WORD = re.compile(r"[a-z0-9]+")


@attrs.frozen
class Passage:
    """Consecutive paragraphs in a section of a page."""

    page: str
    title: str
    text: str

    @cached_property
    def words(self) -> frozenset[str]:
        """The set of its words, as from `words_of`."""
        return frozenset(words_of(f"{self.title} {self.text}"))


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without a final s."""
    return [word.removesuffix("s") for word in _WORD.findall(text.lower())]


def passages_of(pattern: str, folder: Path = DOCS) -> list[Passage]:
    """Cut pages into passages, without their code blocks. Blocking."""
    return [
        passage
        for path in sorted(folder.glob(pattern))
        for passage in _cut(path.relative_to(folder).as_posix(), path.read_text("utf-8"))
    ]


def _cut(page: str, text: str) -> Iterator[Passage]:
    plain, name = _LINK.sub(r"\1", _CODE.sub("", text)), ""
    for section in re.split(r"^#+ ", plain, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        name = name or heading
        title = name if heading == name else f"{name}: {heading}"
        collected: list[str] = []
        for paragraph in [*filter(None, map(str.strip, body.split("\n\n"))), ""]:
            if collected and (not paragraph or len(" ".join([*collected, paragraph]).split()) > WORDS):
                yield Passage(page, title, " ".join(" ".join(collected).split()))
                collected = []
            collected.append(paragraph)


@attrs.frozen
class Passages:
    """All passages, and the rarity of their words."""

    all: Sequence[Passage]

    @cached_property
    def rarity(self) -> dict[str, float]:
        """The weight of each word. Rare words count more."""
        counts = Counter(word for passage in self.all for word in passage.words)
        return {word: math.log(len(self.all) / count) for word, count in counts.items()}

    def ranked(self, question: str, found: Sequence[tuple[int, float]], count: int) -> list[Passage]:
        """Return the best passages, from at most `count` pages, the best page first."""
        weights = {word: self.rarity.get(word, 0.0) for word in words_of(question)}
        total = sum(weights.values()) or 1.0

        def score(one: tuple[int, float]) -> float:
            shared = sum(weights[word] for word in weights.keys() & self.all[one[0]].words)
            return one[1] + SHARED * shared / total

        best: dict[str, Passage] = {}
        for number, _ in sorted(found, key=score, reverse=True):
            best.setdefault(self.all[number].page, self.all[number])
        return list(best.values())[:count]


async def embedding(encoder: Encoder, text: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the embedding of a text; the encoder uses only its first tokens."""
    (tokens,) = await trio.to_thread.run_sync(encoder.tokenize, [text])
    row: np.ndarray[tuple[int], np.dtype[np.float32]] = await encoder.turns.ask(
        FairSubmit(np.array(tokens[: encoder.most] or [0], np.int64), tenant="")
    )
    return row


async def open_index(
    device: ta.Device, encoder: Encoder, passages: Sequence[Passage], folder: Path
) -> VectorIndex:
    """Read the index of passages from a folder. If it is missing, create it, which may take minutes."""
    known_by = hashlib.blake2b(repr((encoder.name, passages)).encode(), digest_size=8).hexdigest()
    path = folder / f"index-{known_by}.safetensors"
    if path.exists():
        return await VectorIndex.load(device, path)
    rows = np.zeros((len(passages), encoder.width), np.float32)
    numbers = iter(range(len(passages)))

    async def work() -> None:
        for number in numbers:
            rows[number] = await embedding(encoder, f"{passages[number].title}. {passages[number].text}")

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)
    index = VectorIndex(device, encoder.width)
    await index.add(range(len(passages)), rows)
    await index.save(path)
    return index
