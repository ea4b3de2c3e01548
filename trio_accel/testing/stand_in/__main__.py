"""The command `python -m trio_accel.testing.stand_in program.py [arguments]`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from . import BuildError, build

_USAGE = "usage: python -m trio_accel.testing.stand_in (program.py | -m module | -c code) [arguments]"


def main() -> None:
    """Run a Python program in place of this process, so that its exit code and Ctrl-C are its own."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        sys.exit(_USAGE)
    try:
        variables = build().environment()
    except BuildError as error:
        sys.exit(str(error))
    if not version("cuda-bindings").startswith("13."):
        sys.exit("the stand-in driver is for CUDA 13: pip install 'cuda-bindings>=13,<14'")
    # The flags that the user gave, before `-m` and the name of this module.
    flags = sys.orig_argv[1 : -len(sys.argv) - 1]
    os.execve(sys.executable, [sys.executable, *flags, *sys.argv[1:]], {**os.environ, **variables})  # noqa: S606


if __name__ == "__main__":
    main()
