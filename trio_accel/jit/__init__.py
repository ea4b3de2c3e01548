"""Kernels of your own: CUDA code that is compiled, launched and supervised as any operation is."""

from ..expressions import ComputeElementwise, ComputeReduction, Elementwise, ExpressionArgument, Reduction
from . import _expressions, _kernel
from ._code import CompileOptions, cubin, fatbin, ltoir, ptx, source
from ._expressions import *
from ._kernel import *
from ._parameters import Parameter, cdiv, reads, scalar, updates, writes

__all__: list[str] = [
    "CompileOptions",
    "ComputeElementwise",
    "ComputeReduction",
    "Elementwise",
    "ExpressionArgument",
    "Parameter",
    "Reduction",
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
__all__ += _expressions.__all__
__all__ += _kernel.__all__
