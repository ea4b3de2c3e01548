"""Letting cancelled askers go so that thousands of them do not hold the loop."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

import trio

from ..actors import DeferredReply

__all__ = ["Leavers"]

# D123: so many leave in one turn of the loop. One that leaves and asks again takes 30 us of it.
_IN_A_TURN = 32


class Leavers:
    """Cancelled askers, of which a few go in each turn of the loop.

    Thousands of askers whose deadlines pass together, and who ask again, would make one turn of the loop as
    long as all of them take. Each request of others needs several turns. Here the turns stay short, and no
    time is lost: the loop goes on with the next turn at once. Tenants take turns, too.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[DeferredReply[Any]]] = OrderedDict()
        # How many may still go in this turn; 0 while some wait.
        self._room: float = _IN_A_TURN
        self._has_come = trio.Event()

    def let_go(self, reply: DeferredReply[Any], tenant: Hashable) -> None:
        """Give an asker its cancellation, now or in one of the next turns."""
        self._has_come.set()
        if self._room:
            self._room -= 1
            reply.cancelled()
            return
        self._waiting.setdefault(tenant, deque()).append(reply)

    async def run(self) -> None:
        """Begin each turn anew while askers leave; runs until it is cancelled, and then lets all go."""
        try:
            while True:
                await self._has_come.wait()
                await trio.lowlevel.checkpoint()
                self._go_on()
        finally:
            while self._waiting:
                self._go_on()
            # No later turn begins here.
            self._room = math.inf

    def _go_on(self) -> None:
        self._room = _IN_A_TURN
        while self._room and self._waiting:
            self._room -= 1
            tenant, replies = self._waiting.popitem(last=False)
            replies.popleft().cancelled()
            if replies:
                # Behind those of the others.
                self._waiting[tenant] = replies
        if self._waiting:
            self._room = 0
        elif self._room == _IN_A_TURN:
            self._has_come = trio.Event()
