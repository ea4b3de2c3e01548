"""Helpers for tests of programs that use actors and devices.

Fixtures for pytest are in `trio_accel.testing.fixtures`, which needs pytest and pytest-trio.
"""

from .._names import export as _export
from ._leaks import *
from ._operations import *
from ._probe import *

_export(__name__)
