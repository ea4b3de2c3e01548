"""What CUDA operations are compared with: each rival runs in a process of its own, and measures itself."""

from ._banded import banded
from ._mixed import MIXED, REPEATED
from ._rival import Rival, RivalMissingError, open_rival

__all__ = ["MIXED", "REPEATED", "Rival", "RivalMissingError", "banded", "open_rival"]
