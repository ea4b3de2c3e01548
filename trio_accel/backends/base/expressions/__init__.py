"""Expressions that every backend computes: parsed, typed by NumPy's rules, evaluated by NumPy (D118)."""

from . import _evaluate, _expression, _reduction, _rows, _typing
from ._evaluate import *
from ._expression import *
from ._reduction import *
from ._rows import *
from ._typing import *

__all__: list[str] = []
__all__ += _evaluate.__all__
__all__ += _expression.__all__
__all__ += _reduction.__all__
__all__ += _rows.__all__
__all__ += _typing.__all__
