"""Expressions that every backend computes: parsed, typed by NumPy's rules, evaluated by NumPy (D118)."""

from ...._names import export as _export
from ._arguments import *
from ._codec import *
from ._evaluate import *
from ._expression import *
from ._join import *
from ._parse import *
from ._parts import *
from ._pieces import *
from ._reduction import *
from ._steps import *
from ._typing import *
from ._unroll import *

_export(__name__)
