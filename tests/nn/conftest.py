"""Neural networks, on whichever backend the tests run."""

from __future__ import annotations

import pytest

from trio_accel.backends.base import Isolation


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder that use the `device` run with both."""
    chosen: Isolation = request.param
    return chosen
