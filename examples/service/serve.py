"""Run the service: `python examples/service/serve.py`. Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import argparse
import gc
import os
import re
import secrets
import signal
import stat
import sys
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import trio

import trio_accel as ta
from trio_accel.http import Limits, serve

try:
    from search_batch import leaves_of, open_service
    from search_model import make_models
    from search_web import application
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: this needs all files of its folder, starlette and hypercorn: pip install '.[http]' "
        "in a checkout"
    ) from None

MODELS = Path(tempfile.gettempdir()) / f"trio_accel_service_{os.getuid()}"
KEYS = {"gold": 3.0, "free": 1.0}
# A request may ask for fewer seconds by `X-Deadline`.
LIMITS = Limits(answer=10.0, grace=5.0)
KNOWN = (ta.AccelError, ta.ActorError, ta.weights.WeightsError, OSError)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=device_of, default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--port", type=port_of, default=8000, help="0 for any (default: 8000)")
    parser.add_argument(
        "--key",
        action="append",
        type=tenant_of,
        metavar="KEY=WEIGHT",
        help="a tenant (default: gold=3, free=1)",
    )
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="texts per second of a key of weight 1 (default: 1000)"
    )
    parser.add_argument(
        "--models", type=Path, default=MODELS, help=f"folder of the models (default: {MODELS})"
    )
    parser.add_argument("--dashboard", action="store_true", help="serve the dashboard, too")
    parser.add_argument("--show-errors", action="store_true", help="tell clients the texts of exceptions")
    return parser.parse_args()


def device_of(text: str) -> str:
    """The name of a device."""
    if re.fullmatch(r"(cpu|cuda)(:[0-9]+)?", text) is None:
        raise ValueError(text)
    return text


def port_of(text: str) -> int:
    """A port."""
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(port)
    return port


def tenant_of(text: str) -> tuple[str, float]:
    """A key, and its weight."""
    key, _, given = text.partition("=")
    weight = float(given or 1.0)
    if not key or not 0 < weight < float("inf"):
        raise ValueError(text)
    return key, weight


def run(arguments: argparse.Namespace) -> int | str:
    """Serve. What a user can do something about is told in a sentence."""
    try:
        # At checkpoints alone: Ctrl-C between the making of a task's coroutine and its start would leave the
        # coroutine behind, and Python would warn of it below the sentence.
        trio.run(main, arguments, restrict_keyboard_interrupt_to_checkpoints=True)
    except (BaseExceptionGroup, KeyboardInterrupt, *KNOWN) as error:
        found = leaves_of(error)
        if any(isinstance(one, KeyboardInterrupt) for one in found):
            return "interrupted before it served"
        if not all(isinstance(one, KNOWN) for one in found):
            raise
        return "; ".join(f"{type(one).__name__}: {one}" for one in found)
    return 0


async def main(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    device_options = ta.DeviceOptions(
        isolation="process", stuck_after=30.0, retry=1, spares=1, close_grace=1.0, when_given_up="reopen"
    )
    # In hexadecimal: a key that begins with "-" would be an option to every program that takes it.
    admin_key = os.environ.get("SERVICE_ADMIN_KEY") or secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        # First of all: a port that is taken is known before anything is started.
        (listener,) = await trio.open_tcp_listeners(arguments.port, host="127.0.0.1", backlog=64)
        await enter(listener)
        system = await enter(ta.open_system("search"))
        recorder = stack.enter_context(ta.telemetry.record(system))
        if arguments.dashboard:
            print("dashboard:", (await enter(ta.open_dashboard(system))).url, flush=True)
        device = await enter(system.open_device(arguments.device, options=device_options))
        make_folder(arguments.models)
        await make_models(device, arguments.models)
        service = await enter(
            open_service(
                system, device, arguments.models, dict(arguments.key or KEYS.items()), rate=arguments.rate
            )
        )
        # A full collection would look at all modules and the model each time, and hold the loop for 50 ms.
        gc.collect()
        gc.freeze()
        serving = partial(
            serve,
            application(service, admin_key, show_errors=arguments.show_errors),
            listeners=[listener],
            system=system,
            recorder=recorder,
            limits=LIMITS,
        )
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as connections:
                port = await connections.start(serving)
                await nursery.start(note_end)
                print(
                    f"serving at http://127.0.0.1:{port}/ (process {os.getpid()}); "
                    f"administrator's key: {admin_key}",
                    flush=True,
                )
            nursery.cancel_scope.cancel()


async def note_end(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Say that the service ends, and pass the signal on to `serve`."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        received = await anext(signals)
    print("ending: requests that were begun are served", flush=True)
    signal.raise_signal(received)


def make_folder(folder: Path) -> None:
    """Make the folder of the models, unless it is there; others must not be able to put models into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of a link, both its own owner and that of the folder count.
    for status in (folder.lstat(), folder.stat()):
        if status.st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{folder} belongs to user {status.st_uid}: choose another with --models")
    if folder.stat().st_mode & stat.S_IWOTH:
        raise PermissionError(f"anybody can write to {folder}: choose another with --models")


if __name__ == "__main__":
    sys.exit(run(options()))
