"""Programs: your own classes and functions as supervised actors of a device; their arrays survive them."""

from ._actor import ProgramActor
from ._method import Array, method
from ._open import ProgramOpening, open_program
from ._program import FunctionProgram, Program

__all__ = [
    "Array",
    "FunctionProgram",
    "Program",
    "ProgramActor",
    "ProgramOpening",
    "method",
    "open_program",
]
