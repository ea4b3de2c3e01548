"""Chains of operations that are recorded once and launched as one, also on a condition."""

from . import _conditions, _graph
from ._conditions import *
from ._graph import *

__all__: list[str] = []
__all__ += _conditions.__all__
__all__ += _graph.__all__
