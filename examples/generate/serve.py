"""Serve a language model: `python examples/generate/serve.py`. Ctrl-C or SIGTERM stops it.

Clients of OpenAI's interface need the printed address followed by `/v1`.
"""

from __future__ import annotations

import gc
import math
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import attrs
import cyclopts
import trio

import trio_accel as ta
from trio_accel.http import Limits, serve

try:
    from adapters import open_adapters
    from completions import Service, application
    from constraints import Grammars
    from encoder import open_encoder
    from errors import error_body
    from faults import Faults
    from generation import open_generation
    from llama import rounded
    from model import open_model
    from options import DEFAULTS, Options, admin_key_of, keys_of
    from text import SMOLLM2, InputError, load_file, load_random
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: this needs all files of its folder, and pip install '.[generate,http,metrics]' in a "
        "checkout"
    ) from None

# Use a worker process and a spare one, even without faults. A device that makes progress never fails for
# good, however often it is lost.
DEVICE = ta.DeviceOptions(
    isolation="process",
    # Steps are idempotent. If they are lost more often, the batcher calls them again.
    retry=1,
    retry_suspects=True,
    spares=1,
    stuck_after=60.0,
    close_grace=1.0,
    on_failure="reopen",
)
# A whole answer may take minutes, unless the client sends `X-Deadline`.
LIMITS = Limits(answer=math.inf, grace=30.0)


async def run(given: Options) -> int:
    """Serve until a signal; return 1 if a token was wrong under faults."""
    async with AsyncExitStack() as stack:
        # Do this first, so that a taken port is reported before anything is loaded.
        try:
            listeners = await trio.open_tcp_listeners(given.port, host=given.host, backlog=64)
        except OSError as error:
            raise InputError(f"cannot listen on {given.host}, port {given.port}: {error.strerror}") from None
        for listener in listeners:
            await stack.enter_async_context(listener)
        system = await stack.enter_async_context(ta.open_system("generate"))
        recorder = stack.enter_context(ta.telemetry.record(system))
        service = await stack.enter_async_context(open_service(system, given))
        faults = Faults(
            service.generation, service.adapters.weights, given.faults or math.inf, given.dtype, given.exact
        )
        serving = partial(
            serve,
            listeners=listeners,
            system=system,
            recorder=recorder,
            limits=LIMITS,
            error_body=error_body,
        )
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as connections:
                port = await connections.start(serving, application(service))
                beside = faults.run if given.faults else trio.sleep_forever
                await nursery.start(note_end, beside, service)
                # Exempt the objects so far from full collections, which requests with many values cause.
                gc.collect()
                gc.freeze()
                shown = f"[{given.host}]" if ":" in given.host else given.host
                print(f"listening on http://{shown}:{port}", flush=True)
            nursery.cancel_scope.cancel()
    return 1 if faults.wrong else 0


@asynccontextmanager
async def open_service(system: ta.System, given: Options) -> AsyncGenerator[Service]:
    """Load the models onto a device, and open the batchers that serve them."""
    shares = keys_of(given.keys)
    admin = admin_key_of(given.admin_key, shares)
    folder = given.adapters or (given.adapter.parent if given.adapter else None)
    keys = {key: f"key {number}" for number, key in enumerate(shares, 1)}
    weights = {keys[key]: share for key, share in shares.items()} or None
    random = partial(load_random, attrs.evolve(SMOLLM2, layers=given.layers))
    loaded = await trio.to_thread.run_sync(random if given.random_weights else partial(load_file, given.gguf))
    async with AsyncExitStack() as stack:
        try:
            device = await stack.enter_async_context(system.open_device(given.backend, options=DEVICE))
        except ValueError as error:
            raise InputError(str(error)) from None
        model = await stack.enter_async_context(
            open_model(
                device,
                loaded.config,
                loaded.weights,
                pages=given.pages,
                dtype=given.dtype,
                forward="operations" if given.operations else None,
                exact=rounded(min(given.sequences, 64)) if given.exact else 0,
            )
        )
        generation = await stack.enter_async_context(
            open_generation(system, model, loaded, weights=weights, sequences=given.sequences)
        )
        has_faults = given.faults is not None
        adapters = await stack.enter_async_context(
            open_adapters(generation, key=admin, folder=folder, path=given.adapter, has_faults=has_faults)
        )
        is_random = given.random_weights and given.encoder is None
        yield Service(
            generation=generation,
            grammars=await trio.to_thread.run_sync(Grammars, loaded),
            adapters=adapters,
            encoder=await open_encoder(
                system, device, given.encoder, loaded.text if is_random else None, weights
            ),
            keys=keys,
        )


async def note_end(
    beside: Callable[[], Awaitable[None]],
    service: Service,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a function until the first signal, and then pass the signal on to `serve`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            received = await anext(signals)
        service.adapters.is_ending = True
        print("ending: running answers are completed", flush=True)
        nursery.cancel_scope.cancel()
    signal.raise_signal(received)


app = cyclopts.App(help=__doc__)


@app.default
def main(given: Options = DEFAULTS) -> int | str:
    """Serve. An error that a user can fix is reported in a sentence."""
    try:
        return trio.run(run, given)
    except* (InputError, OSError, ta.AccelError) as group:
        told = str(leaf_of(group))
    except* KeyboardInterrupt:
        told = "interrupted before it served"
    return told


def leaf_of(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    return leaf_of(cast("Any", error).exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
