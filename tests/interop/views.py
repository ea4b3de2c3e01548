"""Views of a matrix with layouts of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "part": lambda x: x[1:3, ::2],
    "backwards": lambda x: x[::-1, 1:4],
    "row": lambda x: x[2],
    "element": lambda x: x[1, 2, ...],
    "new axis": lambda x: x[:, None, 1],
    "nothing": lambda x: x[2:2],
}
