"""``python -m benchmarks.gpu --out FOLDER``: everything that needs the hardware."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
