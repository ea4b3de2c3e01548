"""Kernels of your own: CUDA code that is compiled, launched and supervised as any operation is."""

from ..expressions import ComputeElementwise, ComputeReduction, Elementwise, ExpressionArgument, Reduction
from . import _declarations, _expressions, _kernel
from ._declarations import *
from ._expressions import *
from ._kernel import *

__all__: list[str] = [
    "ComputeElementwise",
    "ComputeReduction",
    "Elementwise",
    "ExpressionArgument",
    "Reduction",
]
__all__ += _declarations.__all__
__all__ += _expressions.__all__
__all__ += _kernel.__all__
