"""Functions that an expression may call: NumPy's, by their names; and some of SciPy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

__all__ = ["CONSTANTS", "FUNCTIONS", "OPERATORS", "SPECIAL", "Function", "Rule"]

Rule: TypeAlias = Literal["ufunc", "cast", "where", "clip", "part", "angle", "round"]
"""How its types follow from those of its arguments; ``"ufunc"``: as the ufunc of NumPy says."""

_REAL: frozenset[str] = frozenset({"bool", "int", "uint", "float"})
_ALL: frozenset[str] = _REAL | {"complex"}
_FLOATS: frozenset[str] = frozenset({"float"})
_INEXACT: frozenset[str] = frozenset({"float", "complex"})
_WHOLE: frozenset[str] = frozenset({"bool", "int", "uint"})


@attrs.frozen(eq=False)
class Function:
    """One function.

    Attributes:
        name: Its name in the steps of a typed expression, which is NumPy's.
        arity: How many arguments it takes.
        rule: How its types follow.
        ufunc: NumPy's ufunc of it; None where there is none.
        kinds: Kinds of dtypes that it is computed in.
    """

    name: str
    arity: int
    rule: Rule = "ufunc"
    ufunc: Any = None
    kinds: frozenset[str] = _ALL


def _ufuncs(kinds: frozenset[str], names: str) -> dict[str, Function]:
    found = {name: getattr(np, name) for name in names.split()}
    return {name: Function(ufunc.__name__, ufunc.nin, "ufunc", ufunc, kinds) for name, ufunc in found.items()}


SPECIAL: Mapping[str, str] = {
    "bessel_i0": "i0", "bessel_i1": "i1", "erf": "erf", "erfc": "erfc", "erfcinv": "erfcinv",
    "erfcx": "erfcx", "erfinv": "erfinv", "lgamma": "gammaln", "tgamma": "gamma",
}  # fmt: skip
"""By the name in an expression, the function of SciPy. Short names are left to arguments."""

_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
)

FUNCTIONS: Mapping[str, Function] = {
    **_ufuncs(
        _ALL,
        "absolute abs add conjugate conj divide equal isfinite isinf isnan logical_and logical_not "
        "logical_or logical_xor multiply negative not_equal positive power pow sign square subtract "
        "true_divide",
    ),
    **_ufuncs(
        _INEXACT,
        "arccos arccosh acos acosh arcsin arcsinh asin asinh arctan arctanh atan atanh cos cosh exp exp2 "
        "expm1 log log10 log1p log2 reciprocal rint sin sinh sqrt tan tanh",
    ),
    **_ufuncs(
        _FLOATS,
        "arctan2 atan2 cbrt copysign deg2rad degrees fabs hypot logaddexp nextafter rad2deg radians signbit",
    ),
    **_ufuncs(
        _REAL,
        "ceil floor floor_divide fmax fmin fmod greater greater_equal less less_equal maximum minimum mod "
        "remainder trunc",
    ),
    **_ufuncs(frozenset({"int", "uint"}), "gcd lcm"),
    **_ufuncs(_WHOLE, "bitwise_and bitwise_or bitwise_xor invert bitwise_not left_shift right_shift"),
    **{name: Function(name, 1, "cast") for name in _DTYPES.split()},
    "int": Function("int64", 1, "cast"),
    "float": Function("float64", 1, "cast"),
    "complex": Function("complex128", 1, "cast"),
    # SciPy's, which is imported when one is computed. Types are as of any function of floating numbers.
    **{name: Function(name, 1, "ufunc", np.exp, _FLOATS) for name in SPECIAL},
    "where": Function("where", 3, "where"),
    "clip": Function("clip", 3, "clip"),
    "real": Function("real", 1, "part"),
    "imag": Function("imag", 1, "part"),
    "angle": Function("angle", 1, "angle"),
    "round": Function("rint", 1, "round", np.rint, _INEXACT),
}
"""By the name in an expression, what is called."""

OPERATORS: Mapping[str, str] = {
    "Add": "add",
    "Sub": "subtract",
    "Mult": "multiply",
    "Div": "divide",
    "FloorDiv": "floor_divide",
    "Mod": "remainder",
    "Pow": "power",
    "BitAnd": "bitwise_and",
    "BitOr": "bitwise_or",
    "BitXor": "bitwise_xor",
    "LShift": "left_shift",
    "RShift": "right_shift",
    "USub": "negative",
    "UAdd": "positive",
    "Invert": "invert",
    "Not": "logical_not",
    "And": "logical_and",
    "Or": "logical_or",
    "Lt": "less",
    "LtE": "less_equal",
    "Gt": "greater",
    "GtE": "greater_equal",
    "Eq": "equal",
    "NotEq": "not_equal",
}
"""By the name of a node of Python's grammar, the function that it means."""

CONSTANTS: Mapping[str, float] = {"pi": float(np.pi), "inf": float("inf"), "nan": float("nan")}
"""Names that are numbers."""
