"""The application of each framework, and its record of requests."""

from __future__ import annotations

from typing import Any

import pytest
from attacked import KINDS, Seen, make


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(params=KINDS)
def app(request: pytest.FixtureRequest, seen: Seen) -> Any:
    return make(request.param, seen)
