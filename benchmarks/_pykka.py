"""The actor that ours are compared with; importing this needs Pykka."""

from __future__ import annotations

import pykka

__all__ = ["PykkaCounter"]


class PykkaCounter(pykka.ThreadingActor):
    """Adds numbers and replies with the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    def on_receive(self, message: int) -> int:
        """Add and reply."""
        self.value += message
        return self.value
