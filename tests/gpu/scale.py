"""The amount of work: all of it, or little enough for a stand-in for the hardware."""

from __future__ import annotations

import os
from typing import TypeVar

ValueT = TypeVar("ValueT")

VARIABLE = "TRIO_ACCEL_GPU_SCALE"
IS_CHOSEN = VARIABLE in os.environ
IS_SMALL = os.environ.get(VARIABLE) == "small"


def scaled(full: ValueT, small: ValueT) -> ValueT:
    """The scale requested by the environment."""
    return small if IS_SMALL else full


ROUNDS = scaled(20, 2)
"""How often each fault is injected."""
