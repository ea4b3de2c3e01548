"""Which functions are our own, and their C++: NumPy has other bits of them (D188)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ...base.contract.dtypes import DType
from ...base.expressions import Step

__all__ = ["VECTOR", "vector_functions"]

VECTOR: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos")},
        **{name: name for name in ("sinh", "cosh", "tanh", "hypot")},
        "power": "pow", "arctan": "atan", "arctan2": "atan2",
    }
)  # fmt: skip
"""Functions of our own by their names in expressions, with those of C. They have the same bits in vectors of
any width, on every processor."""

# Of numbers far from zero these are the C library's: a loop calls them, with its vectors.
_LOOPED = ("sin", "cos")
_TYPES = {DType.float32: ("float", "f", 8, 16), DType.float64: ("double", "", 4, 8)}


def vector_functions(steps: Iterable[Step]) -> str:
    """C++ that stands before the language of GPUs, so that this takes our functions for those of C.

    Args:
        steps: The steps of all expressions of a text.
    """
    used = {(step.function, step.dtype) for step in steps if step.function in VECTOR}
    if not used:
        return ""
    lines = [_header()]
    for name, dtype in sorted(used):
        if name in _LOOPED and dtype in _TYPES:
            kind, suffix, *lanes = _TYPES[dtype]
            lines += [f"LOOPED({name}, {kind}, {suffix}, {lanes[0]}, {lanes[1]})"]
            lines += [f"#define {name}{suffix} own_{name}{suffix}"]
    for name in VECTOR.values():
        if name not in _LOOPED:
            lines += [f"template <class... T> OWN auto own_{name}(T... x) {{ return own::{name}(x...); }}"]
            lines += [f"#define {name} own_{name}", f"#define {name}f own_{name}"]
    return "\n".join(lines) + "\n"


@functools.cache
def _header() -> str:
    return Path(__file__).with_name("functions.h").read_text(encoding="utf-8")
