"""Graphs in this process and through a worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from trio_accel.backends.base import Isolation


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder that use it, or the `device`, run with both."""
    chosen: Isolation = request.param
    return chosen
