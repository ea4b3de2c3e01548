"""Helpers for tests of programs that use actors and devices.

Fixtures for pytest are in `trio_accel.testing.fixtures`, which needs pytest and pytest-trio.
"""

from . import _leaks, _operations, _probe
from ._leaks import *
from ._operations import *
from ._probe import *

__all__: list[str] = []
__all__ += _leaks.__all__
__all__ += _operations.__all__
__all__ += _probe.__all__
