"""Names of the functions that are compiled from our own sources. This module imports nothing (D188)."""

from __future__ import annotations

from collections.abc import Mapping

NOT_IN_NUMPY = ("erf", "erfc")
"""Functions that NumPy does not have: expressions of one are compiled, too."""

_OWN_FUNCTIONS = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sinh",
    "cosh",
    "tanh",
    "hypot",
    *NOT_IN_NUMPY,
]
C_NAMES: Mapping[str, str] = {name: name for name in _OWN_FUNCTIONS} | {
    "power": "pow",
    "arctan": "atan",
    "arctan2": "atan2",
}
"""Their C names."""

VECTOR_FUNCTIONS = ("sin", "cos")
"""Loops call functions of vectors for these."""

VECTOR = frozenset((*C_NAMES, *VECTOR_FUNCTIONS, "logaddexp"))
"""Functions of our own, which have other bits than NumPy's, and the same in vectors of any width."""
