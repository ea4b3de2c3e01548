"""The place of a test device's context, for tests that choose it."""

from __future__ import annotations

import pytest

# The inspected objects exist only inline, or another test covers all cases in one worker.
inline = pytest.mark.parametrize("isolation", ["inline"])
isolated = pytest.mark.parametrize("isolation", ["process"])
