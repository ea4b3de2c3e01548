"""Fit the model of this service: latent semantic analysis (Deerwester and others, 1990) of `sentences.txt`.

A model is a safetensors file: a vector for each word and one for each sentence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from search_words import Vocabulary, words_of

import trio_accel as ta

SENTENCES = Path(__file__).with_name("sentences.txt")
# Words in more than this share of all sentences are left out.
MOST_COMMON = 0.2


def read_sentences(file: Path = SENTENCES) -> list[tuple[str, str]]:
    """Sentences, each with its page."""
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [line.partition("\t") for line in lines if not line.startswith("#")]
    return [(text, page) for page, _, text in rows if text]


async def fit(device: ta.Device, files: Mapping[Path, int], sentences: Sequence[tuple[str, str]]) -> None:
    """Fit models on a device, and write each to its file; the files have the numbers of their vectors.

    Each sentence is a row of weighted word counts. The directions in which the rows differ most are
    eigenvectors of their Gram matrix, and a word's vector is its row of these.
    """
    texts = [text for text, _ in sentences]
    counts = [Counter(words_of(text)) for text in texts]
    spread = Counter(word for row in counts for word in row)
    # A word of one sentence relates to nothing, and one of many says nothing.
    words = [word for word in spread if 2 <= spread[word] <= MOST_COMMON * len(counts)]
    if len(words) < max(files.values()):
        found = f"{len(texts)} sentences with {len(words)} words in common"
        raise ta.weights.WeightsError(f"{SENTENCES}: {found} are too few to fit")
    vocabulary = Vocabulary({word: number for number, word in enumerate(words)})
    rarity = np.log(len(counts) / np.array([spread[word] for word in words]))
    numbers, shown = vocabulary.batch(texts)
    rows = np.zeros((len(counts), len(words)))
    np.add.at(rows, (np.arange(len(rows))[:, None], numbers), shown)
    rows = np.log1p(rows) * rarity
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    there = await device.put(rows.astype(np.float32))
    _, vectors = await ta.linalg.eigh(await ta.linalg.matmul(there.T, there))
    directions = await vectors.to_host()
    metadata = {"words": json.dumps(words), "sentences": json.dumps(sentences)}
    for file, width in files.items():
        table = (directions[:, -width:] * rarity[:, None]).astype(np.float32)
        corpus = (shown[:, :, None] * table[numbers]).sum(1)
        corpus /= np.maximum(np.linalg.norm(corpus, axis=1, keepdims=True), 1e-12)
        arrays = {"table": await device.put(table), "corpus": await device.put(corpus)}
        await ta.weights.save(file, arrays, metadata=metadata)
