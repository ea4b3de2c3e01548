"""Times of launches, told to the application while it wants them."""

from __future__ import annotations

import time

from ...operations._hooks import EngineHook, Phase
from ...operations._operation import Launch
from ..transport._channel import Channel

__all__ = ["LaunchClock"]


class LaunchClock:
    """Notes when operations are launched and when they are complete.

    Args:
        channel: Where the application is told.
        hooks: Those of the worker's engine.
    """

    def __init__(self, channel: Channel, hooks: list[EngineHook]) -> None:
        self._channel = channel
        self._hooks = hooks
        self._begun: dict[int, int] = {}

    def run(self, *, is_timed: bool) -> None:
        """Begin or end to note times."""
        if is_timed and self._see not in self._hooks:
            self._hooks.append(self._see)
        elif not is_timed and self._see in self._hooks:
            self._hooks.remove(self._see)
            self._begun.clear()

    def _see(self, phase: Phase, launch: Launch) -> None:
        if phase is Phase.ENQUEUE:
            self._begun[launch.number] = time.monotonic_ns()
        elif phase is Phase.COMPLETE:
            begun = self._begun.pop(launch.number, None)
            if begun is not None:
                # The answer follows.
                self._channel.post(("times", launch.number, begun, time.monotonic_ns()))
