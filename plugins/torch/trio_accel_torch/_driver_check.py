"""Whether this process has opened a card by PyTorch; a file that imports the standard library alone."""

from __future__ import annotations

import sys
from typing import Any


def driver_in_use() -> str | None:
    """Return what a fork of this process could not use, or None."""
    torch: Any = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return f"has opened a card by torch.{name}, which no fork can use"
    return None
