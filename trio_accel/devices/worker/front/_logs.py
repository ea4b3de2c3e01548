"""What a worker logs, as the application logs it."""

from __future__ import annotations

import logging

__all__ = ["record_of"]


def record_of(name: str, level: int, text: str, pid: int, device: str) -> logging.LogRecord:
    """A record of a worker, as the application logs it: with the number of the worker's process.

    Args:
        name: Name of the logger.
        level: Its level.
        text: What the worker has made of it.
        pid: Number of the worker's process.
        device: Path of the device.
    """
    record = logging.LogRecord(name, level, __file__, 0, "%s", (text,), None)
    record.process = pid
    record.processName = "trio_accel worker"
    # As `extra` would set them.
    vars(record).update(pid=pid, device=device)
    return record
