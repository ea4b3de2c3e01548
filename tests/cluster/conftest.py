"""Stores by PostgreSQL and SQLite, and modules that several tests share."""

from __future__ import annotations

import sys
from pathlib import Path

from databases import make_postgres, make_sqlite, make_store, postgres

__all__ = ["make_postgres", "make_sqlite", "make_store", "postgres"]

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))
