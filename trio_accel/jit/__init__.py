"""Kernels of your own: CUDA code that is compiled, launched and supervised as any operation is."""

from ..expressions import ComputeElementwise, ComputeReduction, Elementwise, ExpressionArgument, Reduction
from ._code import CompileOptions, cubin, fatbin, ltoir, ptx, source
from ._expressions import elementwise, reduction
from ._kernel import JitActor, Kernel, LaunchKernel, Occupancy, QueryOccupancy
from ._parameters import Parameter, cdiv, reads, scalar, updates, writes

__all__ = [
    "CompileOptions",
    "ComputeElementwise",
    "ComputeReduction",
    "Elementwise",
    "ExpressionArgument",
    "JitActor",
    "Kernel",
    "LaunchKernel",
    "Occupancy",
    "Parameter",
    "QueryOccupancy",
    "Reduction",
    "cdiv",
    "cubin",
    "elementwise",
    "fatbin",
    "ltoir",
    "ptx",
    "reads",
    "reduction",
    "scalar",
    "source",
    "updates",
    "writes",
]
