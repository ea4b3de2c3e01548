"""Promotion of Python numbers and dtypes to one dtype, following NumPy (NEP 50)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract.dtypes import DType
from ._steps import ArgumentType, Weak

RANKS = (Weak.int, Weak.float, Weak.complex)
"""Python's numbers from the narrowest to the widest."""

PYTHON = {Weak.int: int, Weak.float: float, Weak.complex: complex}
"""Python's types of these numbers."""


def common_of(kinds: Sequence[ArgumentType]) -> DType:
    """Return the dtype that values are brought to, as `numpy.result_type` finds it."""
    low = DType.bfloat16 in kinds
    if low and DType.float16 in kinds:
        # NumPy's `result_type` has none of both; its functions take this.
        kinds = [DType.float32 if kind in (DType.float16, DType.bfloat16) else kind for kind in kinds]
    operands = [
        kind.dtype
        if isinstance(kind, DType)
        else (DType.bfloat16.dtype if low and kind is Weak.float else PYTHON[kind]())
        for kind in kinds
    ]
    return DType.of(np.result_type(*operands))


def wider(first: ArgumentType, second: ArgumentType) -> ArgumentType:
    """Return the type that holds values of both."""
    if isinstance(first, Weak) and isinstance(second, Weak):
        return max(first, second, key=RANKS.index)
    return common_of([first, second])


def is_whole(kind: ArgumentType) -> bool:
    return kind is Weak.int if isinstance(kind, Weak) else kind.kind in ("int", "uint", "bool")
