"""A program with a worker process and a kept chunk: it reports them, and waits for its end.

With ``fork`` on its command line a forked child holds the same descriptors; with ``parent`` the worker has a
child; with ``stop`` it is stopped; with ``import`` a second worker is ordered, and its module blocks the
launcher during the import; with ``file`` the last named file is taken for a chunk, too; Ctrl-C is answered by
a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import trio

from trio_accel.actors import open_system
from trio_accel.backends.base.kit.host import make_shared
from trio_accel.devices.launcher._launcher import open_launcher

SLEEP = ("-I", "-S", "-c", "import signal; signal.pause()")
PARENT = ("-I", "-S", "-c", "import os, signal; os.fork(); signal.pause()")


def say(text: str) -> None:
    # In one piece, whatever the buffering.
    os.write(1, f"{text}\n".encode())


def fork() -> int:
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


async def main(options: list[str]) -> None:
    signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
    async with open_system("application") as system:
        launcher = await open_launcher(system)
        array, memory = make_shared(1 << 20)
        array[:] = 1
        launcher.keep_chunk(memory)
        if "file" in options:
            launcher.keep_chunk(os.open(options[-1], os.O_RDWR))
        worker = await launcher.start_worker(PARENT if "parent" in options else SLEEP)
        if "stop" in options:
            worker.send_signal(signal.SIGSTOP)
        child = fork() if "fork" in options else 0
        say(json.dumps({"worker": worker.pid, "memory": memory, "child": child}))
        if "import" in options:
            await launcher.start_worker(("-c", "import signal; signal.pause()"), (), ("blocking_import",))
        await trio.sleep_forever()


trio.run(main, sys.argv[1:])
