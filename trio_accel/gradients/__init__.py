"""Gradients of functions of own operations, and of expressions: as many as can be are derived."""

from .._names import export as _export
from ._tape import *
from ._words import words as words

_export(__name__)
