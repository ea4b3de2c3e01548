"""Gradients of functions that compose operations, and of expressions. Most gradients are derived."""

from .._names import export as _export
from ._tape import *
from ._words import words as words

_export(__name__)
