"""The other side of a terminal that a program writes to."""

from __future__ import annotations

import os

__all__ = ["drain"]


def drain(controller: int) -> str:
    """The output of a program to a terminal that it has closed."""
    parts = []
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(controller)
    return b"".join(parts).decode()
