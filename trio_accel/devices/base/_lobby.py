"""Listeners with a bounded number of descriptors for connections."""

from __future__ import annotations

import logging
import resource
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeAlias

import trio

from ._errors import is_shortage

_logger = logging.getLogger("trio_accel.devices")

Admit: TypeAlias = Callable[[], None]
"""Ends the deadline of a connection; raises `trio.ClosedResourceError` if the lobby has closed it by then."""

# Descriptors that strangers leave to the program, and seconds until a listener without any tries again.
_RESERVE, _PAUSE = 64, 0.1


async def accepted(listener: trio.SocketListener, make_room: Callable[[], bool]) -> trio.SocketStream:
    """Accept a connection, also while the process lacks descriptors.

    Args:
        listener: Where clients connect.
        make_room: Closes another connection; returns False if there is none. Then this waits.

    Raises:
        OSError: The listener has failed otherwise.
    """
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if not is_shortage(error):
                raise
            if not make_room():
                await trio.sleep(_PAUSE)


class Lobby:
    """The connections of a listener.

    A connection is a stranger until its server admits it. With too many strangers, or with few descriptors
    left, the oldest one is closed. If new ones were refused instead, silent ones would keep all others out.

    Args:
        serve: Finds out who has connected, calls the function that it gets, and serves the stream. From then
            on it also closes the stream. Its error ends only this connection.
        max_strangers: The number of strangers at a time.
        seconds: Seconds until a stranger is closed.
    """

    def __init__(
        self,
        serve: Callable[[trio.SocketStream, Admit], Awaitable[None]],
        *,
        max_strangers: int,
        seconds: float,
    ) -> None:
        self._serve, self._max_strangers, self._seconds = serve, max_strangers, seconds
        self._strangers: dict[trio.SocketStream, trio.CancelScope] = {}

    async def run(self, listener: trio.SocketListener) -> None:
        """Accept connections until this is cancelled, also while the process lacks descriptors."""
        async with trio.open_nursery() as nursery:
            while True:
                # The kernel keeps a connection that waits. Each try closes a stranger, if there is one.
                stream = await accepted(listener, self._close_oldest)
                self._strangers[stream] = trio.CancelScope(deadline=trio.current_time() + self._seconds)
                count = len(self._strangers)
                if count > self._max_strangers or (count > 1 and _is_in_reserve(stream)):
                    self._close_oldest()
                nursery.start_soon(self._meet, stream)

    def _close_oldest(self) -> bool:
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        del self._strangers[oldest]
        # Close it here and not in its task, because the next connection needs the descriptor.
        oldest.socket.close()
        return True

    async def _meet(self, stream: trio.SocketStream) -> None:
        if stream not in self._strangers:
            return
        scope = self._strangers[stream]

        def admit() -> None:
            if self._strangers.pop(stream, None) is None:
                raise trio.ClosedResourceError("others have taken the place of this connection")
            scope.deadline = inf

        try:
            with scope:
                await self._serve(stream, admit)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel) as error:
            _logger.debug("a connection ended: %r", error)
        except Exception:
            _logger.warning("a connection has failed", exc_info=True)
        finally:
            if self._strangers.pop(stream, None) is not None:
                stream.socket.close()


def _is_in_reserve(stream: trio.SocketStream) -> bool:
    """Return whether few descriptors are left, because the kernel gives the lowest free number."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and stream.socket.fileno() >= limit - min(_RESERVE, limit // 8)
