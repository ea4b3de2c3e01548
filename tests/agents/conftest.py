from __future__ import annotations

import sys
from pathlib import Path

from chosen import ROOT
from databases import make_postgres, make_sqlite, make_store, postgres

__all__ = ["make_postgres", "make_sqlite", "make_store", "postgres"]

# The modules of a program in a folder import one another by their own names, and so do those of its tests.
sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(ROOT / "examples" / folder) for folder in ("agent", "generate", "encode", "")]
