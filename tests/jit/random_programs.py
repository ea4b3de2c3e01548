"""Random programs of all kinds, and the bits that NumPy's executor computes of them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from hypothesis import reject
from hypothesis import strategies as st

from trio_accel.backends.base import DType, NotSupportedError, OutOfRangeError
from trio_accel.backends.base.contract.ops import Reduce, real_of
from trio_accel.backends.base.expressions import (
    Argument,
    ParsedExpression,
    TypedExpression,
    TypedStep,
    Weak,
    evaluate,
    parse,
    parse_reduction,
    scatter_program,
    typed,
    unrolled,
)

Array = npt.NDArray[Any]

SHAPE = (3, 4)
POOLS = [
    ("float64",),
    ("float32", "float64"),
    ("float16", "bfloat16"),
    ("int8", "int64", "bool"),
    ("uint8", "uint64", "int32"),
    ("complex64", "float32"),
    ("float32", "int32", "bool"),
]
_UNARY = [
    *("absolute", "sqrt", "exp", "sign", "negative", "floor", "isnan", "conjugate", "square", "logical_not"),
    *("erf", "stop_gradient"),
]
_BINARY = [
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "less", "equal", "remainder", "power"),
    *("copysign", "logical_or"),
]
_FOLDS = ["a + b", "a if abs(a) > abs(b) else b", "where(a == 0, b, a * 2 - b)"]
_NAMED = ["sum", "prod", "mean", "min", "max", "nanmax", "any", "all", "argmax"]
_ROWS = [
    "e = exp(x - max(x)); y = e / sum(e)",
    "d = x - mean(x); y = d / sqrt(mean(d * d) + 1)",
    "sum(x * {0}) / n + max(x)",
    "y = where(any({0} > 1), x, min(x * x)) + sum(x)",
]


@attrs.frozen
class Sample:
    """A program with the form of its arguments.

    Attributes:
        program: The program.
        arguments: How it gets its arguments.
    """

    program: TypedExpression
    arguments: tuple[Argument, ...]


def trees(leaves: Sequence[str], depth: int = 2) -> st.SearchStrategy[str]:
    """Draw expressions of these leaves."""
    strategy: st.SearchStrategy[str] = st.sampled_from(leaves)
    for _ in range(depth):
        one = strategy
        strategy = st.one_of(
            one,
            st.builds("{}({})".format, st.sampled_from(_UNARY), one),
            st.builds("{}({}, {})".format, st.sampled_from(_BINARY), one, one),
            st.builds("where({} != 0, {}, {})".format, one, one, one),
        )
    return strategy


_LEAVES = ["x", "x", "y", "n", "2", "0.5", "-1", "i(0)", "i(-1)", "z[m, i(1)]", "z[i(0), n]"]
_BOUNDS = ["3", "n", "m", "-1, 2", "m, 40", "40, 43", "2, 2"]
_VALUES = ["x", "s * 0.5", "t - k0", "z[k{0}, m]", "z[i(0) + k{0}, 1]", "minimum(s, t)", "k{0} * y"]


@st.composite
def _loops(draw: st.DrawFn, dtype: str, depth: int = 0) -> list[str]:
    indent, lines = (
        "    " * (depth + 1),
        [f"{'    ' * depth}for k{depth} in range({draw(st.sampled_from(_BOUNDS))}):"],
    )
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["add", "swap", "break", "for"]))
        value = draw(st.sampled_from(_VALUES)).format(draw(st.integers(0, depth)))
        if kind == "for" and depth < 2:
            lines += draw(_loops(dtype, depth + 1))
        elif kind == "swap":
            lines += [f"{indent}u = s", f"{indent}s = {dtype}(t + {value})", f"{indent}t = u"]
        elif kind == "break":
            lines.append(f"{indent}if absolute(s) > 4: break")
        else:
            lines.append(f"{indent}s = {dtype}(s + {value})")
    return lines


@st.composite
def _texts(draw: st.DrawFn, dtype: str) -> str:
    """Draw statements of s, t and r."""
    lines = [f"s = {draw(trees(_LEAVES))}", f"t = {draw(trees(['s', *_LEAVES]))}"]
    if draw(st.booleans()):
        lines = [*[f"{line[:4]}{dtype}({line[4:]})" for line in lines], *draw(_loops(dtype))]
    return "\n".join([*lines, f"r = {draw(trees(['s', 't', 'x']))}"])


def arguments_of(inputs: Sequence[str], dtypes: tuple[str, ...]) -> tuple[Argument, ...]:
    """Return how an expression gets its arguments: n is a Python number, and m has integers."""
    kinds: dict[str, Argument] = {"n": Argument(Weak.int, False), "m": Argument(DType.int64, True)}
    found = dict(zip("xyz", itertools.cycle(dtypes), strict=False))
    return tuple([kinds.get(name) or Argument(DType(found[name]), True) for name in inputs])


def _typed(expression: ParsedExpression, arguments: Sequence[Argument], *more: Any) -> TypedExpression:
    try:
        return unrolled(typed(expression, tuple(each.kind for each in arguments), *more))
    except (TypeError, ValueError, NotSupportedError):
        reject()


@st.composite
def elements(draw: st.DrawFn, *, results: int = 2, result: DType | None = None) -> Sample:
    """Draw programs of elements.

    Args:
        draw: The function of Hypothesis.
        results: The largest number of results.
        result: The dtype of the results; by default a random one.
    """
    dtypes = draw(st.sampled_from(POOLS))
    text, names = draw(_texts(dtypes[0])), ("r", "s", "t")[: draw(st.integers(1, results))]
    expression = parse(text, None, names)
    arguments = arguments_of(expression.inputs, dtypes)
    wanted = draw(st.sampled_from([None, *map(DType, dtypes)])) if result is None else result
    return Sample(_typed(expression, arguments, (wanted,) * len(names), draw(st.booleans())), arguments)


@st.composite
def scatters(draw: st.DrawFn) -> Sample:
    """Draw programs that store."""
    reduces: list[Reduce] = ["set", "add", "multiply", "min", "max"]
    dtypes = draw(st.sampled_from(POOLS[:5]))
    place, value = draw(st.sampled_from(["m", "i(0)", "1"])), draw(trees(["x", "y", "n"]))
    expression = parse(f"place = z[{place}, i(1)]\nvalue = {value}", None, ("place", "value"))
    arguments = arguments_of(expression.inputs, dtypes)
    made = _typed(expression, arguments, (None, DType((dtypes * 3)[2])), True)
    return Sample(scatter_program(made, draw(st.sampled_from(reduces))), arguments)


@st.composite
def reductions(draw: st.DrawFn) -> Sample:
    """Draw programs with a reduction, or with several reductions of a row."""
    dtypes = draw(st.sampled_from(POOLS))
    value = draw(trees(["x", "x", "y", "n", "0.5"]))
    try:
        if draw(st.booleans()):
            name = draw(st.sampled_from([*_NAMED, *_FOLDS]))
            post = None if name == "mean" else draw(st.sampled_from([None, "a / n", "a * 2"]))
            identity = 1 if name in _FOLDS and draw(st.booleans()) else None
            reduction = parse_reduction(f"x + {value}", name, identity=identity, post=post)
            arguments = arguments_of(reduction.inputs, dtypes)
            kinds = tuple(each.kind for each in arguments)
            return Sample(typed(reduction, kinds), arguments)
        rows = parse(draw(st.sampled_from(_ROWS)).format(value), ("x", "y"), is_along=True)
        arguments = arguments_of(rows.inputs, dtypes)
        return Sample(typed(rows, tuple([each.kind for each in arguments])), arguments)
    except (TypeError, ValueError, NotSupportedError):
        reject()


def looping_stores() -> Sample:
    """Return the program ``for k in range(m): if k >= x: break; z[k] += x * k``."""
    f, w = DType.float64, DType.int64
    steps = (
        TypedStep("argument", w, (), 0),
        TypedStep("argument", f, (), 1),
        TypedStep("constant", w, (), 0),
        TypedStep("carried", w, (2,)),
        TypedStep("loop", w, (2, 0, 3), 10),
        TypedStep("cast", f, (4,)),
        TypedStep("greater_equal", DType.bool, (5, 1)),
        TypedStep("break", DType.bool, (4, 6, 3)),
        TypedStep("multiply", f, (1, 5)),
        TypedStep("store_add", f, (8, 4), 2),
        TypedStep("end", w, (4, 3)),
    )
    program = TypedExpression(steps, (), elements=(0, 1), loads=((2, 1),))
    return Sample(program, (Argument(w, True), Argument(f, True), Argument(f, True)))


def samples() -> st.SearchStrategy[Sample]:
    """Draw programs of all kinds."""
    return st.one_of(elements(), elements(), scatters(), reductions(), st.builds(looping_stores))


def values_of(arguments: Sequence[Argument], seed: int) -> list[Any]:
    """Return small numbers for arguments; integers may be the bounds of loops."""
    rng = np.random.default_rng(seed)
    made: list[Any] = []
    for argument in arguments:
        shape = ((), SHAPE, (1, 4), (3, 1))[rng.integers(4)] if argument.is_array else ()
        kind = argument.dtype.kind
        numbers: Array = np.asarray(rng.normal(0, 3, shape))
        if kind == "complex":
            numbers = numbers + 1j * rng.normal(size=shape)
        elif kind != "float":
            numbers = np.asarray(rng.integers(-2 if kind == "int" else 0, 5, shape))
        made.append(numbers.astype(argument.dtype.dtype))
    return made


def loaded_of(loads: Sequence[tuple[int, int]], arguments: Sequence[Argument], seed: int) -> dict[int, Array]:
    """Return an array for each argument that elements are loaded from."""
    rng = np.random.default_rng(seed)
    return {
        number: np.asarray(rng.integers(0, 9, (3, 5, *(1,) * count)[:count])).astype(
            arguments[number].dtype.dtype
        )
        for number, count in loads
    }


def computed(
    program: TypedExpression,
    values: Sequence[Any],
    loaded: Mapping[int, Array],
    shape: tuple[int, ...] = SHAPE,
) -> list[tuple[np.dtype[Any], tuple[int, ...], bytes]] | str:
    """Return the bits of the results and the stored arrays, or the error for a wrong index."""
    kept = {number: array.copy() for number, array in loaded.items()}
    indices: dict[int, Array] = {}
    for axis in program.axes:
        at = axis % len(shape)
        indices[axis] = np.arange(shape[at]).reshape([-1 if each == at else 1 for each in range(len(shape))])
    try:
        made = evaluate(program, values, indices, kept, shape=shape, axes=(len(shape) - 1,))
    except OutOfRangeError as error:
        return str(error)
    stored = {int(step.value.real) for step in program.steps if step.function.startswith("store_")}
    made = [np.array(np.broadcast_to(each, shape), order="C") for each in made]
    made += [kept[number] for number in sorted(stored)]
    for each in made:
        if DType.of(each.dtype).is_inexact:
            # The sign of NaN depends on the layout of NumPy's operands.
            parts = each.view(real_of(DType.of(each.dtype)).dtype)
            parts[np.isnan(parts)] = np.nan
    return [(each.dtype, each.shape, each.tobytes()) for each in made]


def exact(program: TypedExpression) -> object:
    """Return a program in a form with an equality that includes the kinds and bits of numbers."""
    steps = [(step.function, step.dtype, step.steps, bits(step.value)) for step in program.steps]
    return steps, attrs.evolve(program, steps=(), bounds=())


def bits(value: complex) -> object:
    """Return the kind and the bits of a number."""
    if isinstance(value, int):
        return type(value), value
    return type(value), struct.pack("=2d", value.real, value.imag)
