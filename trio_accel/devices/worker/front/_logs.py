"""What a worker logs, as the application logs it."""

from __future__ import annotations

import logging

__all__ = ["record_of"]


def record_of(name: str, level: int, text: str, pid: int) -> logging.LogRecord:
    """A record of a worker, as the application logs it: with the number of the worker's process.

    Args:
        name: Name of the logger.
        level: Its level.
        text: What the worker has made of it.
        pid: Number of the worker's process.
    """
    record = logging.LogRecord(name, level, __file__, 0, "%s", (text,), None)
    record.process = pid
    record.processName = "trio_accel worker"
    return record
