from __future__ import annotations

import sys
from pathlib import Path

from chosen import ROOT

# The simulations import what they share by its own name, and so do their tests.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples" / "simulations")]
