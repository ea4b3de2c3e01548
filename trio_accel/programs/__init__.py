"""Programs: your own classes and functions as supervised actors of a device; their arrays survive them."""

from ..backends.base import Refused
from ._actor import ProgramActor
from ._method import Array, method
from ._open import ProgramOpening, open_program, run
from ._program import FunctionProgram, Program

__all__ = [
    "Array",
    "FunctionProgram",
    "Program",
    "ProgramActor",
    "ProgramOpening",
    "Refused",
    "method",
    "open_program",
    "run",
]
