from __future__ import annotations

import sys
from pathlib import Path

from chosen import ROOT

# The modules of a program in a folder import one another by their own names, and so do those of its tests.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples" / "generate")]
# The encoder is another example's, with a model for its tests.
sys.path += [str(ROOT / "examples" / "encode"), str(ROOT / "tests" / "encode")]
