"""Everything that needs the hardware, in one program: ``python -m trio_accel.benchmarks.gpu``."""

from ._program import main

__all__ = ["main"]
