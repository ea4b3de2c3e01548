"""Runs of pytest within a test."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

# For any outer session, with any number of processes and any time limits.
_ALONE = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout")


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run what `pytester` has made, with nothing of the outer session."""
    for name in tuple(os.environ):
        # Those that `pytest` itself sets and reads stay.
        if name.startswith(("PYTEST_XDIST_", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_TIMEOUT")):
            monkeypatch.delenv(name)

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(*_ALONE, "-q", *arguments)

    return run
