"""Names of the functions that are compiled from our own sources. This module imports nothing (D188)."""

from __future__ import annotations

from collections.abc import Mapping

ALONE = ("erf", "erfc")
"""Functions that NumPy does not have: expressions of one are compiled, too."""

_SAME = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sinh", "cosh", "tanh", "hypot", *ALONE]
OWN: Mapping[str, str] = {name: name for name in _SAME} | {
    "power": "pow",
    "arctan": "atan",
    "arctan2": "atan2",
}
"""Their C names."""

FAR = ("sin", "cos")
"""Loops call functions of vectors for these."""

VECTOR = frozenset((*OWN, *FAR, "logaddexp"))
"""Functions of our own, which have other bits than NumPy's, and the same in vectors of any width."""
