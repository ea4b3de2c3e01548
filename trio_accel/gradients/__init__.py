"""Gradients of functions that compose operations, and of expressions. Most gradients are derived."""

from .._names import export as _export
from ._functions import *
from ._implicit import *
from ._jacobians import *
from ._recomputed import *
from ._scan import *
from ._vmap import *
from ._words import words as words

_export(__name__)
