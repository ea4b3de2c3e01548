"""Tests of example programs: what several modules of this folder share is imported by its own name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
