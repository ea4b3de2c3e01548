"""Tests of every public function. The modules of this folder import their shared code by its own name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
