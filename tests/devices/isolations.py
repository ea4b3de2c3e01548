"""Where the context of a test's device lives, for tests that choose."""

from __future__ import annotations

import pytest

# What a test looks into is there inline only, or another test does the same for all cases in one worker.
inline = pytest.mark.parametrize("isolation", ["inline"])
isolated = pytest.mark.parametrize("isolation", ["process"])
