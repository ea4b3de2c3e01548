"""Gradients, on whichever backend the tests run."""

from __future__ import annotations

import sys
from pathlib import Path

# With importlib mode a test folder is not a package: its modules share cases by their own names.
sys.path.insert(0, str(Path(__file__).parent))
