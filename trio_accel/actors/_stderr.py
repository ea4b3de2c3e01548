"""Errors that reach no asker, on stderr, in a program that has not configured logging."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from ._failures import describe, safe_repr

__all__ = ["StderrUnlessConfigured"]


class StderrUnlessConfigured(logging.Handler):
    """Prints a record in one line, unless another handler gets it.

    `logging` has the same for programs without any handler, but prints warnings too. Those of this package
    are told to somebody already, such as the asker whose request crashed an actor. One that is not says so by
    ``extra={"is_untold": True}``, and is printed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, if no other handler of its logger or of those above does anything with it."""
        if record.levelno < logging.ERROR and not getattr(record, "is_untold", False):
            return
        if self._is_alone(record.name) and sys.stderr is not None:
            try:
                sys.stderr.write(f"{record.name}: {_in_one_line(record)}\n")
            except Exception:  # noqa: BLE001  # as every handler: it must not disturb who logs
                self.handleError(record)

    def _is_alone(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def _in_one_line(record: logging.LogRecord) -> str:
    """The message, with the exception and the place where it was raised; no traceback."""
    text = " ".join(record.getMessage().split("\n", 1)[0].split())
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return text
    if safe_repr(error) not in text:
        text += f": {describe(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        raised = frames[-1]
        text += f" ({os.path.basename(raised.filename)}:{raised.lineno}, in {raised.name})"
    return text
