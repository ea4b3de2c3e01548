"""Find the sentences of a text nearest to queries, with a sentence encoder that runs as a program.

`python examples/encode/encode.py --help` lists the options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio
from encode_faults import Check, EncodeLoad, Outcome, break_under_load
from minilm import Encoder, weights_of
from minilm_files import InputError, Model, describe_os_error, find_model, read_sentences
from minilm_float64 import embed_one

import trio_accel as ta

QUERIES = (
    "A child wants to have its own way.",
    "They argue about how much money is enough.",
    "She could not stop crying.",
)
BATCH = 32
NEAREST = 3
# The number of sentences also computed in float64, including the queries.
COMPARED = 6
# The largest allowed difference: float32 sums of 384 and 1536 terms in six layers differed by 2e-7.
TOLERANCE = 1e-5
# The maximum number of letters to show from a sentence.
SHOWN = 70


@attrs.frozen(kw_only=True)
class Nearest:
    """A sentence of the text near a query.

    Attributes:
        sentence: The sentence.
        similarity: The cosine of the angle between both embeddings.
    """

    sentence: str
    similarity: float


@attrs.frozen(kw_only=True)
class Query:
    """A query with its nearest sentences.

    Attributes:
        query: The query.
        nearest: The nearest sentences, the nearest first.
    """

    query: str
    nearest: Sequence[Nearest]


@attrs.frozen(kw_only=True)
class EncodeData:
    """The encoded text, and the nearest sentences.

    Attributes:
        model: The model.
        layers: The number of its layers.
        width: The size of an embedding.
        program: The program's class.
        arrays: The number of weight arrays on the device.
        nbytes: Their total size in bytes.
        loading_seconds: The time to load them.
        text: The text.
        sentences: The number of sentences.
        tokens: The number of their tokens.
        encoding_seconds: The time to encode all sentences, in batches.
        queries: The queries with their nearest sentences.
        load: The results under faults; None without faults.
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


@attrs.frozen
class Work:
    """An open program, and its model."""

    device: ta.Device
    model: Model
    program: ta.programs.Program[Encoder]
    cls: type[Encoder]

    async def encode(self, sentences: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the embeddings of sentences, and the total number of their tokens."""
        # Batches of sentences with similar lengths need the least padding.
        order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
        found = np.empty((len(sentences), self.model.shape.width), np.float32)
        tokens = 0
        for first in range(0, len(order), BATCH):
            those = order[first : first + BATCH]
            batch = await in_thread(self.model.batch, [sentences[number] for number in those])
            made = await self.program.ask(self.cls.encode, batch.ids, batch.mask, self.model.shape.width)
            found[those] = await made.to_host()
            tokens += int(batch.mask.sum())
        return found, tokens

    async def look_for(
        self, queries: Sequence[str], embeddings: npt.NDArray[np.float32], sentences: Sequence[str]
    ) -> tuple[npt.NDArray[np.float32], list[Query]]:
        """Return the embeddings of queries, and the nearest sentences of each query."""
        found, _ = await self.encode(queries)
        text = await self.device.put(embeddings)
        product = await (found @ text.T).to_host()
        results: list[Query] = []
        for query, row in zip(queries, product, strict=True):
            nearest = np.argsort(-row, kind="stable")[:NEAREST]
            ranked = [Nearest(sentence=sentences[int(one)], similarity=float(row[one])) for one in nearest]
            results.append(Query(query=query, nearest=ranked))
        return found, results


async def in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a thread; Ctrl-C does not wait for it."""
    return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)


async def check_weights(model: Model) -> None:
    """Raise an error if the weights file does not fit the encoder, before a device is opened."""
    path = model.weights
    try:
        contents = await ta.weights.inspect(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {describe_os_error(error)}") from error
    except ta.weights.WeightsError as error:
        raise InputError(str(error)) from None
    for name, shape in weights_of(model.shape).items():
        found = contents.tensors.get(name)
        if found is None or found.shape != shape or not found.format.startswith(("F", "BF")):
            got = "none" if found is None else f"{found.format} {found.shape}"
            raise InputError(f"{path} must have floating-point {name!r} of shape {shape}, got {got}")


async def encode(
    device: ta.Device,
    model: Model,
    text: tuple[str, list[str]],
    given: argparse.Namespace,
    tell: Callable[[str], object],
) -> tuple[EncodeData, list[Check]]:
    """Load the weights, encode the text, and compare with float64; then inject faults, if requested."""
    cls, shape, (text_name, sentences) = program_for(device), model.shape, text
    queries = given.query or QUERIES
    start = trio.current_time()
    weights = await ta.weights.load(
        device, model.weights, names=weights_of(shape), packed=True, dtype="float32"
    )
    loading = trio.current_time() - start
    async with ta.programs.open_program(
        device,
        cls,
        dict(weights),
        layers=shape.layers,
        heads=shape.heads,
        epsilon=shape.epsilon,
        name="encoder",
    ) as program:
        work = Work(device, model, program, cls)
        start = trio.current_time()
        embeddings, tokens = await work.encode(sentences)
        encoding = trio.current_time() - start
        found, nearest = await work.look_for(queries, embeddings, sentences)
        several = [*queries, *sentences][:COMPARED]
        both = np.concatenate([found, embeddings])[:COMPARED]
        error = await in_thread(worst, model, await on_host(weights), several, both)
        outcome = None
        if given.faults:
            batches = [model.batch([one]) for one in sentences]
            load = EncodeLoad(device, program, cls, batches, shape.width)
            outcome = await break_under_load(
                load, weights, clients=given.clients, faults=given.rounds, tell=tell
            )
    data = EncodeData(
        model=model.name,
        layers=shape.layers,
        width=shape.width,
        program=cls.__name__,
        arrays=len(weights),
        nbytes=weights.nbytes,
        loading_seconds=loading,
        text=text_name,
        sentences=len(sentences),
        tokens=tokens,
        encoding_seconds=encoding,
        queries=nearest,
        load=outcome,
    )
    checks = [Check(name="difference from NumPy in float64", value=error, limit=TOLERANCE)]
    return data, checks + ([] if outcome is None else outcome.checks())


def program_for(device: ta.Device) -> type[Encoder]:
    """Return the class of the program: NumPy on the CPU backend, PyTorch on CUDA."""
    if device.info.backend == "cpu":
        return Encoder
    if find_spec("torch") is None:
        raise InputError(f"on {device.name} this program needs PyTorch: pip install torch, or --backend cpu")
    from minilm_torch import TorchEncoder

    return TorchEncoder


async def on_host(weights: ta.weights.LoadedArrays) -> dict[str, Any]:
    """Copy all weights to the host."""
    return {name: await array.to_host() for name, array in weights.items()}


def worst(
    model: Model, weights: dict[str, Any], sentences: Sequence[str], embeddings: npt.NDArray[np.float32]
) -> float:
    """Return the largest difference from embeddings in float64, computed one by one. Blocking."""
    wide = {
        name: array if name == "embeddings.word_embeddings.weight" else array.astype(np.float64)
        for name, array in weights.items()
    }
    differences = [
        np.abs(embed_one(wide, model.shape, model.batch([sentence]).ids[0]) - embedding).max()
        for sentence, embedding in zip(sentences, embeddings, strict=True)
    ]
    # NumPy's `max` returns NaN if there is one.
    return float(np.max(differences))


def printable(text: str) -> str:
    """Replace unprintable characters, because an untrusted text could send commands to the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def lines_of(data: EncodeData, checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of the results."""
    yield f"{data.model}: {data.layers} layers, {data.width} numbers for each sentence"
    yield f"{data.nbytes / 1e6:.1f} MB in {data.arrays} arrays, loaded in {data.loading_seconds:.2f} s"
    yield f"{data.text}: {data.sentences} sentences, {data.tokens} tokens"
    yield f"encoded in {data.encoding_seconds:.2f} s by {data.program}"
    for query in data.queries:
        yield ""
        yield query.query
        yield from (f"  {one.similarity:.2f}  {one.sentence[:SHOWN]}" for one in query.nearest)
    yield ""
    if data.load is not None:
        yield f"{data.load.fault}: {data.load.summarize()}"
        yield from (f"  {number:8} {outcome}" for outcome, number in data.load.outcomes.items())
    for check in checks:
        mark = "right" if check.is_ok else "WRONG"
        yield f"{mark}: {check.name} {check.value:.3g}, allowed {check.limit:.3g}"


async def main(given: argparse.Namespace) -> int:
    """Return 0 if every check holds, else 1."""
    say: Callable[[str], object] = (lambda _: None) if given.json else print
    text = await in_thread(read_sentences, given.text)
    model = await in_thread(find_model, given.model)
    await check_weights(model)
    isolation: Literal["inline", "process"] | None = given.isolation or ("process" if given.faults else None)
    options = ta.DeviceOptions(
        isolation=isolation,
        # Requests do not cause the faults, so even a suspected request may run again.
        retry=1 if given.faults else 0,
        retry_suspects=True,
        # The faults are deliberate and happen every second, so the supervisor must not wait.
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
        close_grace=0.2,
    )
    async with ta.open_system("encode") as system:
        try:
            opened = await system.open_device(given.backend, options=options)
        except (ta.NotSupportedError, ValueError) as error:
            raise InputError(f"cannot open a device: {error}") from error
        async with opened as device:
            where = device.options.isolation or device.info.isolations[0]
            say(f"encode on {device.name}, {where}")
            data, checks = await encode(device, model, text, given, say)
    is_ok = all(check.is_ok for check in checks)
    if given.json:
        rows = [{**attrs.asdict(check), "ok": check.is_ok} for check in checks]
        document = {"ok": is_ok, "isolation": where, "checks": rows, "data": attrs.asdict(data)}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(printable(line) for line in lines_of(data, checks)))
    return 0 if is_ok else 1


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--query", action="append", help="sentence to search for; may be repeated")
    parser.add_argument("--text", type=Path, help="text in UTF-8 (default: the beginning of a novel)")
    parser.add_argument(
        "--model", type=Path, help="folder of a BERT model: config.json, model.safetensors, tokenizer.json"
    )
    parser.add_argument(
        "--faults", action="store_true", help="poison the context under load; a round takes a second or two"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of faults (default: 5)")
    parser.add_argument("--clients", type=int, default=32, help="clients under faults (default: 32)")
    parser.add_argument("--backend", help="device, such as cpu or cuda:1 (default: the best one)")
    parser.add_argument("--isolation", choices=["inline", "process"], help="where the device computes")
    parser.add_argument("--json", action="store_true", help="print only a JSON document")
    found = parser.parse_args(given)
    if found.faults and found.isolation == "inline":
        parser.error("--faults needs a worker process, because inline weights are lost with their context")
    if not (1 <= found.rounds <= 64 and 1 <= found.clients <= 64):
        parser.error("--rounds and --clients must be 1 to 64")
    return found


def run(given: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("encode", main, arguments(given))


def run_program(
    name: str, program: Callable[[argparse.Namespace], Awaitable[int]], given: argparse.Namespace
) -> int:
    """Run a program, and turn an error into a line and an exit code."""
    try:
        return trio.run(program, given)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as raised:
        # Nurseries put errors into groups, which may also contain a KeyboardInterrupt.
        errors = tuple(leaves(raised))
        code, text = 1, str(errors[0])
        if any(isinstance(error, KeyboardInterrupt) for error in errors):
            code, text = 130, "interrupted"
        elif isinstance(errors[0], InputError):
            code = 2
        elif not isinstance(errors[0], ta.AccelError | ta.ActorError):
            raise
    sys.stderr.write(f"{name}: {text}\n")
    return code


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group, without nested groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


if __name__ == "__main__":
    raise SystemExit(run())
