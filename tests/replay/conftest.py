"""Modules that several tests of journals share."""

from __future__ import annotations

import sys
from pathlib import Path

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "devices"))
