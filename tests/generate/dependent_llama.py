"""A model whose rows of products depend on their index. Workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np
from llama import Llama

# The number of first rows that the processor computes as if they were alone.
INDEPENDENT_ROWS = 4


class DependentLlama(Llama):
    """Rows after the first ones of a product differ as with another kernel, and so much that texts differ."""

    def _product(self, name: str, x: Any) -> Any:
        made = super()._product(name, x)
        made[INDEPENDENT_ROWS:] *= np.float32(1.5)
        return made
