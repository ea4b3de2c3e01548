"""Functions of tensors, on whichever backend the tests run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trio_accel.backends.base import Isolation

# With importlib mode a test folder is not a package, so its modules import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder that use the `device` run with both."""
    chosen: Isolation = request.param
    return chosen
