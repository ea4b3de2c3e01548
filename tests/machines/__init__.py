"""Has the tests see the machine that the environment names, and the programs that they start."""

from __future__ import annotations

import os
from pathlib import Path

if "TRIO_ACCEL_TEST_MACHINE" in os.environ:
    from . import sitecustomize as sitecustomize

    _searched = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), _searched)))
