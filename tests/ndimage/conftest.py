from __future__ import annotations

import sys
from pathlib import Path

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "interop")]
