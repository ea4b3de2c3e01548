"""Watches the functions of mutants in the processes that tests start; see `reached`."""

import os
import sys
from pathlib import Path

if "TRIO_ACCEL_ENTERED" in os.environ:
    sys.path.append(str(Path(__file__).parent))
    from reached import ENTERED, MUTANTS, Watch

    Watch(Path(os.environ[MUTANTS])).start(Path(os.environ[ENTERED]) / f"{os.getpid()}.entered")
