"""Shared helpers of tests that look at released objects."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Generator[None, None, None]:
    """Nobody collects garbage meanwhile, which takes a tenth of a second where many tests have run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
