"""Kernels of your own: CUDA code that is compiled, launched and supervised like any operation."""

from .._names import export as _export
from ..expressions import Compute as Compute
from ..expressions import Elementwise as Elementwise
from ..expressions import ExpressionArgument as ExpressionArgument
from ..expressions import Reduction as Reduction
from ._declarations import *
from ._expressions import *
from ._kernel import *

_export(
    __name__,
    instead='write ta.jit.elementwise("a * x + y") for an expression, or ta.step(f) for a function of calls',
)
