"""Reports of the launcher on imports that were ordered again in the meantime."""

from __future__ import annotations

import pytest

from trio_accel.devices.launcher import _link as _launcher_link

pytestmark = pytest.mark.one_backend


def test_a_report_on_a_reordered_list_is_ignored() -> None:
    """A process may send it and die, and the loop reads it after the next process has begun."""
    ahead = _launcher_link.ImportsAhead()
    ahead.take(_launcher_link.LauncherReport("tried", 7, {}, ()))
    assert not ahead.is_pending
