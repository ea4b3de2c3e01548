"""``demo encode``: embeddings of sentences by a model of the user's kind, as a program on the device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.cli._encode_load import EncodeLoad, Outcome, break_under_load
from trio_accel.cli._encode_reference import embed_one
from trio_accel.cli._errors import InputError
from trio_accel.cli._inputs import describe_os_error
from trio_accel.cli._minilm import Encoder, weights_of
from trio_accel.cli._minilm_files import find_model, read_sentences
from trio_accel.cli._results import Bench, Check, StepResult, count_of
from trio_accel.cli._run import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from trio_accel.cli._minilm_files import Model

__all__ = ["EncodeData", "EncodeStep", "Nearest", "Query"]

QUERIES = (
    "A child wants to have its own way.",
    "They argue about how much money is enough.",
    "She could not stop crying.",
)
_BATCH = 32
_NEAREST = 3
# Sentences that are computed in float64, too, the queries among them.
_COMPARED = 6
# Of float32 sums of 384 and 1536 terms in six layers; measured are 2e-7.
_TOLERANCE = 1e-5


@attrs.frozen(kw_only=True)
class Nearest:
    """A sentence of the text that is near to a query.

    Attributes:
        sentence: The sentence.
        similarity: Cosine of the angle between both embeddings.
    """

    sentence: str
    similarity: float


@attrs.frozen(kw_only=True)
class Query:
    """A query with the sentences that are nearest to it.

    Attributes:
        query: What was looked for.
        nearest: The nearest sentences, the first is the nearest.
    """

    query: str
    nearest: Sequence[Nearest]


@attrs.frozen(kw_only=True)
class EncodeData:
    """What was encoded, and what is near to what.

    Attributes:
        model: The model.
        layers: Its layers.
        width: Numbers of an embedding.
        program: The program's class.
        arrays: Arrays of weights on the device.
        nbytes: Bytes of these.
        loading_seconds: How long it took to load them.
        text: The text.
        sentences: Sentences of the text.
        tokens: Tokens of these.
        encoding_seconds: How long it took to encode all sentences, in batches.
        queries: Queries and what is nearest.
        load: What came of the faults; None without.
    """

    model: str
    layers: int
    width: int
    program: str
    arrays: int
    nbytes: int
    loading_seconds: float
    text: str
    sentences: int
    tokens: int
    encoding_seconds: float
    queries: Sequence[Query]
    load: Outcome | None


@attrs.define(kw_only=True)
class EncodeStep:
    """The step, with its options.

    Attributes:
        model: Folder of a model; None for the installed one.
        text: A text; None for the carried one.
        queries: What to look for in it.
        faults: How many faults are injected under load; none if 0.
        clients: Clients that ask meanwhile.
    """

    name: str = attrs.field(default="encode", init=False)
    model: Path | None = None
    text: Path | None = None
    queries: Sequence[str] = QUERIES
    faults: int = 0
    clients: int = 32
    _model: Model = attrs.field(init=False)
    _text_name: str = attrs.field(init=False)
    _sentences: list[str] = attrs.field(init=False)

    async def prepare(self) -> None:
        """Read the text, and what the model says of itself."""
        self._text_name, self._sentences = await in_thread(read_sentences, self.text)
        self._model = await in_thread(find_model, self.model)
        path = self._model.weights
        try:
            contents = await ta.weights.inspect(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {describe_os_error(error)}") from error
        except ta.weights.WeightsError as error:
            raise InputError(str(error)) from None
        for name, shape in weights_of(self._model.shape).items():
            found = contents.tensors.get(name)
            if found is None or found.shape != shape or not found.format.startswith(("F", "BF")):
                got = "none" if found is None else f"{found.format} {found.shape}"
                raise InputError(f"{path} must have floating {name!r} of shape {shape}, got {got}")

    async def run(self, bench: Bench) -> StepResult:
        """Load, open the program, encode, compare; then break it, if that is wanted."""
        start = trio.current_time()
        weights = await self._load(bench)
        loading = trio.current_time() - start
        work = _Work(bench, self._model, *await self._open(bench.device, weights))
        start = trio.current_time()
        embeddings, tokens = await work.encode(self._sentences)
        encoding = trio.current_time() - start
        found, queries = await work.look_for(self.queries, embeddings, self._sentences)
        bench.progress.update(1, 1, "comparing with NumPy in float64")
        both = np.concatenate([found, embeddings])[:_COMPARED]
        several = [*self.queries, *self._sentences][:_COMPARED]
        error = await in_thread(_worst, self._model, await _on_host(weights), several, both)
        outcome = await self._break(work, weights) if self.faults else None
        # After Ctrl-C the end of the device is that of the program: what it computes is not waited for.
        await work.program.aclose()
        data = EncodeData(
            model=self._model.name,
            layers=self._model.shape.layers,
            width=self._model.shape.width,
            program=work.cls.__name__,
            arrays=len(weights),
            nbytes=weights.nbytes,
            loading_seconds=loading,
            text=self._text_name,
            sentences=len(self._sentences),
            tokens=tokens,
            encoding_seconds=encoding,
            queries=queries,
            load=outcome,
        )
        checks = [Check(name="difference from NumPy in float64", value=error, limit=_TOLERANCE)]
        checks += [] if outcome is None else outcome.checks()
        return StepResult(name=self.name, summary=_summarize(data), checks=checks, data=data)

    async def _load(self, bench: Bench) -> ta.weights.Weights:
        return await ta.weights.load(
            bench.device,
            self._model.weights,
            names=weights_of(self._model.shape),
            packed=True,
            dtype="float32",
            progress=lambda done, total: bench.progress.update(done, total, "loading weights"),
        )

    async def _open(
        self, device: ta.Device, weights: ta.weights.Weights
    ) -> tuple[ta.programs.Program[Encoder], type[Encoder]]:
        cls, shape = _program_for(device), self._model.shape
        program = await ta.programs.open_program(
            device,
            cls,
            dict(weights),
            layers=shape.layers,
            heads=shape.heads,
            epsilon=shape.epsilon,
            name="encoder",
        )
        return program, cls

    async def _break(self, work: _Work, weights: ta.weights.Weights) -> Outcome:
        batches = [self._model.batch([one]) for one in self._sentences]
        load = EncodeLoad(work.bench, work.program, work.cls, batches, self._model.shape.width)
        return await break_under_load(load, weights, clients=self.clients, faults=self.faults)


@attrs.frozen
class _Work:
    """A program that is open, and its model."""

    bench: Bench
    model: Model
    program: ta.programs.Program[Encoder]
    cls: type[Encoder]

    async def encode(self, sentences: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Embeddings of sentences, and how many tokens they have."""
        # Those of one length take the least room together.
        order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
        found = np.empty((len(sentences), self.model.shape.width), np.float32)
        tokens = 0
        for first in range(0, len(order), _BATCH):
            self.bench.progress.update(first, len(order), f"encoding {count_of(len(order), 'sentence')}")
            those = order[first : first + _BATCH]
            batch = await in_thread(self.model.batch, [sentences[number] for number in those])
            made = await self.program.ask(self.cls.encode, batch.ids, batch.mask, self.model.shape.width)
            found[those] = await made.to_host()
            tokens += int(batch.mask.sum())
        return found, tokens

    async def look_for(
        self, queries: Sequence[str], embeddings: npt.NDArray[np.float32], sentences: Sequence[str]
    ) -> tuple[npt.NDArray[np.float32], list[Query]]:
        """Embeddings of queries, and which sentences are nearest to each."""
        found, _ = await self.encode(queries)
        text = await self.bench.device.put(embeddings)
        product = await (await ta.linalg.matmul(found, text.T)).to_host()
        results: list[Query] = []
        for query, row in zip(queries, product, strict=True):
            nearest = np.argsort(-row, kind="stable")[:_NEAREST]
            ranked = [Nearest(sentence=sentences[int(one)], similarity=float(row[one])) for one in nearest]
            results.append(Query(query=query, nearest=ranked))
        return found, results


def _program_for(device: ta.Device) -> type[Encoder]:
    """NumPy on the CPU backend, PyTorch on CUDA."""
    if device.info.backend == "cpu":
        return Encoder
    if find_spec("torch") is None:
        raise InputError(f"on {device.name} this step needs PyTorch: pip install torch, or --backend cpu")
    from trio_accel.cli._minilm_torch import TorchEncoder

    return TorchEncoder


async def _on_host(weights: ta.weights.Weights) -> dict[str, Any]:
    return {name: await array.to_host() for name, array in weights.items()}


def _worst(
    model: Model, weights: dict[str, Any], sentences: Sequence[str], embeddings: npt.NDArray[np.float32]
) -> float:
    """The largest difference from embeddings in float64, each computed alone. Blocking."""
    wide = {
        name: array if name == "embeddings.word_embeddings.weight" else array.astype(np.float64)
        for name, array in weights.items()
    }
    differences = [
        np.abs(embed_one(wide, model.shape, model.batch([sentence]).ids[0]) - embedding).max()
        for sentence, embedding in zip(sentences, embeddings, strict=True)
    ]
    # `max` of NumPy's keeps NaN.
    return float(np.max(differences))


def _summarize(data: EncodeData) -> str:
    text = f"{count_of(data.sentences, 'sentence')} in {data.encoding_seconds:.1f} s by {data.program}"
    return text if data.load is None else f"{text}; {data.load.summarize()}"
