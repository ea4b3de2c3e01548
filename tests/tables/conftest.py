"""Tables, on whichever backend the tests run."""

from __future__ import annotations

import sys
from pathlib import Path

# Test folders are no packages: what several modules share is imported by its own name.
sys.path.insert(0, str(Path(__file__).parents[1] / "patterns"))
