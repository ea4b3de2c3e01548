"""The namespace of the array API standard on a device, as a module: for suites that import what they test.

``ARRAY_API_TESTS_MODULE=array_api_module.xp``: a Trio run in a thread of its own opens the device of
``TRIO_ACCEL_BACKEND``, and ends with the process.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import partial

import trio

import trio_accel as ta
from trio_accel.interop import ArrayApi, array_api

BACKEND = os.environ.get("TRIO_ACCEL_BACKEND", "").partition(":")[0] or "cpu"
"""What the environment names, else the CPU's."""


def _serve(made: list[ArrayApi], ends: list[Callable[[], None]], is_ready: threading.Event) -> None:
    async def main() -> None:
        end = trio.Event()
        options = ta.DeviceOptions(isolation="inline")
        async with (
            ta.open_system("array-api") as system,
            system.open_device(BACKEND, options=options) as device,
        ):
            made.append(array_api(device))
            token = trio.lowlevel.current_trio_token()
            ends.append(partial(token.run_sync_soon, end.set))
            is_ready.set()
            await end.wait()

    trio.run(main)


def _open() -> ArrayApi:
    made: list[ArrayApi] = []
    ends: list[Callable[[], None]] = []
    is_ready = threading.Event()
    # Other threads are joined before what is registered for the end of the process runs.
    thread = threading.Thread(target=_serve, args=(made, ends, is_ready), name="array-api", daemon=True)
    thread.start()
    is_ready.wait()

    def close() -> None:
        ends[0]()
        thread.join()

    atexit.register(close)
    return made[0]


xp = _open()
