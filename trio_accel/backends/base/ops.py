"""The operation specifications, by the path that libraries of a program's own import them from."""

from .contract import ops as _ops
from .contract.ops import *

__all__: list[str] = []
__all__ += _ops.__all__
