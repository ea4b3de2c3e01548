"""The model that is served. Another model is another version of this file: the other files use these names.

`Task`, `kind_of` and `cost_of` are its requests. `VERSIONS`, `make_models` and `load_model` bring it.
`PROBE` and `check` tell whether it may serve. `SentenceModel` is the program on the device.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import trio
from search_fit import fit, read_sentences
from search_words import Vocabulary

import trio_accel as ta
from trio_accel.programs import Array

# The numbers of a vector, by the version of the model. The first one serves first.
VERSIONS = {"v1": 96, "v2": 192}


@attrs.frozen
class Task:
    """A request to the model, for one text.

    Attributes:
        kind: Whether its vector is wanted, or the nearest sentences.
        text: The text.
        count: How many sentences.
    """

    kind: Literal["embed", "similar"]
    text: str
    count: int = 0


def kind_of(task: Task) -> str:
    """Tasks of one kind go through the model together."""
    return task.kind


def cost_of(task: Task) -> float:
    """What a task takes of its tenant's share."""
    return max(1, len(task.text.split()))


async def make_models(device: ta.Device, folder: Path) -> None:
    """Fit the models, unless they are in the folder already."""
    files = {folder / f"{version}.safetensors": width for version, width in VERSIONS.items()}
    if not all([await trio.Path(file).exists() for file in files]):
        await fit(device, files, await trio.to_thread.run_sync(read_sentences))


@asynccontextmanager
async def load_model(
    device: ta.Device, folder: Path, version: str
) -> AsyncGenerator[Callable[[list[Task]], Awaitable[list[Any]]], None]:
    """Open a model as a program: an async function of tasks of one kind, which returns their results."""
    weights = await ta.weights.load(device, folder / f"{version}.safetensors", packed=True)
    words, sentences = [json.loads(weights.metadata[name]) for name in ("words", "sentences")]
    vocabulary = Vocabulary({word: number for number, word in enumerate(words)})
    arrays = weights["table"], weights["corpus"]
    async with ta.open_program(device, SentenceModel, *arrays, name=version) as program:
        yield partial(_results, program, vocabulary, sentences)


async def _results(
    program: ta.programs.Program[SentenceModel],
    vocabulary: Vocabulary,
    sentences: Sequence[tuple[str, str]],
    tasks: list[Task],
) -> list[Any]:
    # In a thread, since the longest texts take a quarter of a second.
    reading = partial(vocabulary.batch, [task.text for task in tasks])
    words, shown = await trio.to_thread.run_sync(reading, abandon_on_cancel=True)
    if tasks[0].kind == "embed":
        vectors = await (await program.ask(SentenceModel.embed, words, shown)).to_host()
        return [vector.tolist() for vector in vectors]
    most = min(max(task.count for task in tasks), len(sentences))
    found = await program.ask(SentenceModel.similar, words, shown, most)
    numbers, cosines = [(await array.to_host()).tolist() for array in found]
    return [
        [(*sentences[place], cosine) for place, cosine in zip(places, row, strict=True)][: task.count]
        for task, places, row in zip(tasks, numbers, cosines, strict=True)
    ]


# The nearest sentence of this text is one that is near.
PROBE = Task("similar", "the worker process was killed", 1)


def check(result: Any) -> None:
    """Raise unless this is a right result of `PROBE`: then the model must not serve."""
    ((_, _, cosine),) = result
    if not 0.3 < cosine <= 1.001:
        raise ValueError(f"the nearest sentence has a cosine of {cosine:.2f}")


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
