"""Programs: your own classes and functions as supervised actors of a device; their arrays survive them."""

from ..backends.base import Refused
from ..backends.base.kit.programs import is_cancelled, report_progress
from ._messages import ProgramActor
from ._method import Array, method
from ._open import ProgramOpening, open_program, run
from ._program import FunctionProgram, Program
from ._progress import on_progress

__all__ = [
    "Array",
    "FunctionProgram",
    "Program",
    "ProgramActor",
    "ProgramOpening",
    "Refused",
    "is_cancelled",
    "method",
    "on_progress",
    "open_program",
    "report_progress",
    "run",
]
