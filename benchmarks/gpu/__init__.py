"""Everything that needs the hardware, in one program: ``python -m benchmarks.gpu``."""

from ._program import main

__all__ = ["main"]
