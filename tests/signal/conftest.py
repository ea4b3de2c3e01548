"""Functions of signals, on whichever backend the tests run."""

from __future__ import annotations

import sys
from pathlib import Path

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))
