"""Chains of operations, recorded once and launched as one, also on a condition."""

from .._names import export as _export
from ._conditions import *
from ._graph import *

_export(__name__)
