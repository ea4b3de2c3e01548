"""Expressions that every backend computes: parsed, typed by NumPy's rules, evaluated by NumPy (D118)."""

from . import _checked, _evaluate, _expression, _functions, _reduction, _rows, _specialized, _typing
from ._checked import *
from ._evaluate import *
from ._expression import *
from ._functions import *
from ._reduction import *
from ._rows import *
from ._specialized import *
from ._typing import *

__all__: list[str] = []
__all__ += _checked.__all__
__all__ += _evaluate.__all__
__all__ += _expression.__all__
__all__ += _functions.__all__
__all__ += _reduction.__all__
__all__ += _rows.__all__
__all__ += _specialized.__all__
__all__ += _typing.__all__
