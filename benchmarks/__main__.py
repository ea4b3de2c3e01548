"""``python -m benchmarks``, from a checkout."""

import sys

from trio_accel.cli import main

from ._command import run

if __name__ == "__main__":
    sys.exit(main(run=run, name="benchmarks"))
