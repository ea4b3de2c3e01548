"""The command line without its script: ``python -m trio_accel.cli``."""

import sys

from trio_accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
