"""What a worker logs, told to the application."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["LogForwarder"]

_LONGEST = 1 << 16


class LogForwarder(logging.Handler):
    """Sends records to the application, where they go to the logger of the same name.

    Args:
        send: Sends a message.
    """

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record as text."""
        self._send(("log", record.name, record.levelno, self.format(record)[:_LONGEST]))
