"""Expressions and arguments for tests, and their values by Python itself with NumPy."""

from __future__ import annotations

import ast
import operator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import FUNCTIONS, Argument, Weak

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
NUMPY_NAMES = frozenset(
    name for name, function in FUNCTIONS.items() if isinstance(getattr(np, name, None), np.ufunc)
)


def data(dtype: DType, count: int, seed: int) -> npt.NDArray[Any]:
    """Numbers of all sizes, some of them special."""
    rng = np.random.default_rng(seed)
    kind = dtype.kind
    if kind == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if kind in ("int", "uint"):
        limits = np.iinfo(dtype.dtype)
        large = rng.integers(limits.min, limits.max, count, dtype=dtype.dtype, endpoint=True)
        small = (rng.integers(0, 12, count) - (5 if kind == "int" else 0)).astype(dtype.dtype)
        x: npt.NDArray[Any] = np.where(rng.random(count) < 0.6, small, large).astype(dtype.dtype)
        x[:3] = [limits.min, 0, limits.max]
        return x
    real = rng.normal(0, 2, count)
    x = (real + 1j * rng.normal(0, 2, count) if kind == "complex" else real).astype(dtype.dtype)
    special = (
        [0.0, -0.0, 1.0, -1.0, 2.0] if kind == "complex" else [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
    )
    x[: len(special)] = np.array(special).astype(dtype.dtype)
    return x


@attrs.frozen
class Case:
    """One expression with its arguments."""

    text: str
    names: tuple[str, ...]
    arguments: tuple[Argument, ...]
    values: tuple[Any, ...]

    def by_numpy(self) -> npt.NDArray[Any]:
        """The value, as Python computes it with NumPy's functions."""
        names: dict[str, Any] = {name: getattr(np, name) for name in NUMPY_NAMES} | {"where": np.where}
        names |= dict(zip(self.names, self.values, strict=True))
        names[_STANDARD] = _floor_quotient
        tree = ast.fix_missing_locations(_FloorQuotients().visit(ast.parse(self.text, mode="eval")))
        with np.errstate(all="ignore"):
            return np.asarray(eval(compile(tree, self.text, "eval"), names))


_STANDARD = "floor_quotient"


class _FloorQuotients(ast.NodeTransformer):
    """Has ``//`` computed by `_floor_quotient`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.FloorDiv):
            return ast.Call(ast.Name(_STANDARD, ast.Load()), [node.left, node.right], [])
        return node


def _floor_quotient(x: Any, y: Any) -> Any:
    """Return ``x // y``, of infinite numbers by the array API standard, from which NumPy differs there."""
    found = operator.floordiv(x, y)
    if np.result_type(found).kind != "f":
        return found
    return np.where(np.isinf(x) | np.isinf(y), np.true_divide(x, y, dtype=np.result_type(found)), found)


_SHAPES = ((5,), (1,), (), (3, 1), (3, 5), (2, 1, 5))
_FLOATS = (DType.float32, DType.float64)
_WHOLE = (DType.int8, DType.uint8, DType.int32, DType.uint32, DType.int64, DType.bool)
_INFIX = ("+", "-", "*", "<", "<=", ">", ">=", "==", "!=")
_OF_TWO = ("maximum", "minimum", "fmax", "fmin", "logical_and", "logical_or", "logical_xor")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random trees over arrays that broadcast, and over Python's and NumPy's numbers."""
    pool = draw(
        st.sampled_from([(DType.float32,), _FLOATS, _WHOLE, (*_FLOATS, *_WHOLE), (DType.complex128,)])
    )
    names = ("x", "y", "z")[: draw(st.integers(1, 3))]
    arguments: list[Argument] = []
    values: list[Any] = []
    for number in range(len(names)):
        dtype = draw(st.sampled_from(pool))
        shape = draw(st.sampled_from(_SHAPES))
        values.append(data(dtype, 60, draw(st.integers(0, 9)))[-int(np.prod(shape)) :].reshape(shape))
        arguments.append(Argument(dtype, True))
        if number and draw(st.booleans()):
            arguments[-1] = Argument(Weak.int, False)
            values[-1] = draw(st.integers(0, 100))
    text = draw(_tree(names, is_complex=pool == (DType.complex128,), depth=draw(st.integers(1, 4))))
    # Each name is read, and one of them first.
    text = f"({text}) * 1 + " + " + ".join(f"({name} != 0) * 1" for name in names)
    return Case(text, names, tuple(arguments), tuple(values))


@st.composite
def _tree(draw: st.DrawFn, names: tuple[str, ...], *, is_complex: bool, depth: int) -> str:
    if depth == 0:
        return draw(st.sampled_from([*names, *names, "2", "3", "1"]))
    left = draw(_tree(names, is_complex=is_complex, depth=depth - 1))
    right = draw(_tree(names, is_complex=is_complex, depth=depth - 1))
    if is_complex:
        return f"({left} {draw(st.sampled_from(['+', '-', '*', '==', '!=']))} {right} * 1)"
    operator = draw(st.sampled_from(_INFIX))
    # A comparison of two Python numbers makes an element of bool here, and a Python number in NumPy.
    wide = f" + {names[0]} * 0" if operator[0] in "<>=!" else ""
    infix = f"(({left}) * 1 {operator} ({right}) * 1{wide})"
    others = (
        f"{draw(st.sampled_from(_OF_TWO))}({left}, {right})",
        f"where({left} > 1, {right} * 1, {left} * 1)",
        f"(({left}) * 1 // (({right}) * 1 + 3))",
        f"absolute(({left}) * 1)",
    )
    return draw(st.sampled_from([infix, *others]))
