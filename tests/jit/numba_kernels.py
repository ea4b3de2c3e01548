"""A function that Numba compiles, for the CPU backend. It releases the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-not-found, import-untyped, unused-ignore]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def saxpy(n: Any, a: Any, x: Any, y: Any) -> None:
    for i in range(n):
        y[i] += a * x[i]
