"""Kernels of your own: CUDA code that is compiled, launched and supervised as any operation is."""

from ._actor import JitActor
from ._code import CompileOptions, cubin, fatbin, ltoir, ptx, source
from ._kernel import Kernel, LaunchKernel
from ._occupancy import Occupancy, QueryOccupancy
from ._parameters import Parameter, reads, scalar, updates, writes
from ._rules import cdiv

__all__ = [
    "CompileOptions",
    "JitActor",
    "Kernel",
    "LaunchKernel",
    "Occupancy",
    "Parameter",
    "QueryOccupancy",
    "cdiv",
    "cubin",
    "fatbin",
    "ltoir",
    "ptx",
    "reads",
    "scalar",
    "source",
    "updates",
    "writes",
]
