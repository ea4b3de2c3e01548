"""Shared fixtures for tests of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.interop import BlockingDevice

if TYPE_CHECKING:
    from foreign_library import Library

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))


def _open() -> Library:
    from foreign_library import Library

    return Library()


@pytest.fixture(scope="module")
def the_driver_is_open() -> Generator[None, None, None]:
    """A driver's caches of its first use, which stay until the process ends, exist before the first test."""
    library = _open()
    yield
    library.close()


@pytest.fixture
def library() -> Generator[Library, None, None]:
    """Another library on the same GPU."""
    library = _open()
    yield library
    library.close()


@pytest.fixture(scope="module")
def b() -> Generator[BlockingDevice, None, None]:
    with ta.blocking(NAME, options=INLINE) as opened:
        # Libraries have threads, which stay from their first use on.
        x = opened.wait(opened.device.put(np.eye(2)))
        opened.get(ta.linalg.qr(opened.wait(x @ x)))
        opened.get(opened.xp.asarray(x.shape) + 1)
        opened.get([x + 1.0, x])
        yield opened


@pytest.fixture
def own() -> Generator[BlockingDevice, None, None]:
    with ta.blocking(NAME, options=INLINE, name="own") as opened:
        yield opened


@pytest.fixture
def x(b: BlockingDevice) -> ta.AccelRef:
    return b.wait(b.device.put(np.random.default_rng(0).normal(size=(3, 3))))
