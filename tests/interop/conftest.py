"""What tests of other libraries share."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from foreign_library import Library

# Test folders are no packages: what several modules of this one share is imported by its own name.
sys.path.insert(0, str(Path(__file__).parent))


def _open() -> Library:
    from foreign_library import Library

    return Library()


@pytest.fixture(scope="module")
def the_driver_is_open() -> Generator[None, None, None]:
    """What a driver keeps of its first use until the process ends is there before the first test."""
    library = _open()
    yield
    library.close()


@pytest.fixture
def library() -> Generator[Library, None, None]:
    """Another library on the same GPU."""
    library = _open()
    yield library
    library.close()
