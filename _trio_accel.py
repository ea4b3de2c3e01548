"""What the script `trio-accel` starts: a module of its own, as the package takes half a second to import.

Ctrl-C is one line and an exit code from the first moment, also while Python imports the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run the command line with the arguments of the program; return the exit code."""
    # Nothing is open before Trio runs, nor after it. An import could lose a KeyboardInterrupt: some compiled
    # modules make another error of it, or none.
    signal.signal(signal.SIGINT, _leave)
    from trio_accel.cli import main as command

    return command()


def _leave(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"trio-accel: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
