"""Functions of arrays that are made of expressions: the part that capabilities share.

An `Elementwise` or a `Reduction` checks its arguments, finds dtypes and the shape of the result, and makes
the message for a library actor. A capability says which actor that is.
"""

from ._arguments import ExpressionArgument, bind
from ._elementwise import ComputeElementwise, Elementwise
from ._reduction import ComputeReduction, Reduction

__all__ = [
    "ComputeElementwise",
    "ComputeReduction",
    "Elementwise",
    "ExpressionArgument",
    "Reduction",
    "bind",
]
