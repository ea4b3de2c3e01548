"""The program of a worker process."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from ...actors import SystemOptions
from ...backends.base.kit.fast_paths import use_fast_paths
from ..base._bridge import LoopNotifier
from ..front._system import System
from ..wire import _answers, _orders
from ..wire._channel import Channel, EndOfChannel, SpinWait
from ..wire._protocol import SharedPage, WorkerConfig
from ._server import WorkerServer

_SOCKET, _PAGE = 3, 4
# The kinds of messages that may soon follow an answer (D43).
_REQUESTS = frozenset(kind.name for kind in (_orders.request, _orders.replay, _orders.lease, _orders.borrow))
# Seconds between heartbeats, and the maximum length of a log record in characters.
_INTERVAL, _LONGEST = 0.1, 1 << 16
# Seconds after which a thread requests the interpreter's lock. With Python's default of 5 ms, replies to
# completed operations wait while others are launched: 64 callers of 64×64 products got 7000 of them a second,
# and 11 000 with this value.
_SWITCH = 0.0005


def main() -> None:
    """Serve one device until the application ends the worker, or ends itself."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        # D77: an isolated interpreter does not read this variable.
        faulthandler.enable()
    _keep_to_itself(_SOCKET, _PAGE)
    page = SharedPage(_PAGE)
    # A thread beats, because an operation that keeps the loop busy is not a hang. It is a daemon, because the
    # process must end in any case.
    threading.Thread(target=_beat, args=(page,), name="heartbeat", daemon=True).start()
    # The loop and the threads of the streams take the interpreter's lock in turns of microseconds.
    sys.setswitchinterval(_SWITCH)
    trio.run(_main, page)
    # Threads of stuck streams must not keep the process alive.
    os._exit(0)


def _beat(page: SharedPage) -> None:
    while True:
        time.sleep(_INTERVAL)
        page.beat()


def _keep_to_itself(*descriptors: int) -> None:
    """Keep descriptors from children of this process, which may briefly outlive it."""

    def replace() -> None:
        # The numbers stay taken, because the child has copies of this process's objects, which may close
        # them.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=replace)


async def _main(page: SharedPage) -> None:
    channel = Channel(socket.socket(fileno=_SOCKET), sends=_answers.ANSWERS)
    try:
        received = await channel.receive()
    except EndOfChannel:
        os._exit(0)
    config = received[0][0][1]
    assert isinstance(config, WorkerConfig)
    use_fast_paths(config.fast_paths)
    logging.getLogger("trio_accel").addHandler(LogForwarder(channel.send))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.run)
        if config.window:
            # D43: a caller with its answer may ask again at once, so the worker stays awake for a moment.
            channel.spin_with(SpinWait(config.window, frozenset({_answers.done.name}), _REQUESTS))
            channel.share(*reversed(page.frames))
            nursery.start_soon(channel.listen)
        # A blocked loop is not a hang here, because the heartbeat and `stuck_after` watch a worker.
        async with System.open(config.path, SystemOptions(held_after=None)) as system:
            server = WorkerServer(system, channel, page, config)
            with system.subscribe(server.events.tell, messages=False):
                await server.run(received[1:])
        nursery.cancel_scope.cancel(reason="the worker ends")


class LogForwarder(logging.Handler):
    """A handler that sends records to the application's logger of the same name. Made by the loop.

    Args:
        send: Sends a message.
    """

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._send = send
        self._loop: int = threading.get_ident()
        self._others: deque[tuple[Any, ...]] = deque()
        self._notifier = LoopNotifier(self._send_others)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record as text. The loop soon sends a record of another thread."""
        message = _answers.log(record.name, record.levelno, self.format(record)[:_LONGEST])
        if threading.get_ident() == self._loop:
            self._send(message)
            return
        self._others.append(message)
        self._notifier.notify()

    def _send_others(self) -> None:
        while self._others:
            self._send(self._others.popleft())
