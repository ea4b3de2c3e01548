"""Expressions as text: a small part of Python's grammar with some functions, never run by Python."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn, TypeAlias

import attrs
import numpy as np

from ..contract.dtypes import DType, Strs

__all__ = [
    "COMBINED",
    "CONSTANTS",
    "FUNCTIONS",
    "OPERATORS",
    "REDUCTIONS",
    "SPECIAL",
    "Apply",
    "Break",
    "ElementCount",
    "ElementLoad",
    "Index",
    "Literal",
    "Location",
    "Loop",
    "Name",
    "Node",
    "ParsedExpression",
    "Reduce",
    "Rule",
    "ScalarFunction",
    "Statement",
    "assigned_in",
    "message_at",
]

Rule: TypeAlias = typing.Literal["ufunc", "cast", "where", "clip", "part", "angle", "round"]
"""How its types follow from those of its arguments; ``"ufunc"``: as the ufunc of NumPy says."""

_REAL: frozenset[str] = frozenset({"bool", "int", "uint", "float"})
_ALL: frozenset[str] = _REAL | {"complex"}
_FLOATS: frozenset[str] = frozenset({"float"})
_INEXACT: frozenset[str] = frozenset({"float", "complex"})
_INTEGER_KINDS: frozenset[str] = frozenset({"bool", "int", "uint"})


@attrs.frozen(eq=False)
class ScalarFunction:
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


def _ufuncs(kinds: frozenset[str], names: str) -> dict[str, ScalarFunction]:
    ufuncs = {name: getattr(np, name) for name in names.split()}
    return {
        name: ScalarFunction(ufunc.__name__, ufunc.nin, "ufunc", ufunc, kinds)
        for name, ufunc in ufuncs.items()
    }


SPECIAL: Mapping[str, str] = {
    "bessel_i0": "i0",
    "bessel_i1": "i1",
    "erf": "erf",
    "erfc": "erfc",
    "erfcinv": "erfcinv",
    "erfcx": "erfcx",
    "erfinv": "erfinv",
    "lgamma": "gammaln",
    "tgamma": "gamma",
}
"""By the name in an expression, the function of SciPy. Short names are left to arguments."""

_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
)

FUNCTIONS: Mapping[str, ScalarFunction] = {
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
    **_ufuncs(_INTEGER_KINDS, "bitwise_and bitwise_or bitwise_xor invert bitwise_not left_shift right_shift"),
    **{name: ScalarFunction(name, 1, "cast") for name in _DTYPES.split()},
    "int": ScalarFunction("int64", 1, "cast"),
    "float": ScalarFunction("float64", 1, "cast"),
    "complex": ScalarFunction("complex128", 1, "cast"),
    # SciPy's functions, imported when one is computed. They have the types of any floating-point function.
    **{name: ScalarFunction(name, 1, "ufunc", np.exp, _FLOATS) for name in SPECIAL},
    # The value itself; gradients treat it as a constant.
    "stop_gradient": ScalarFunction("stop_gradient", 1, "ufunc", np.positive),
    "where": ScalarFunction("where", 3, "where"),
    "clip": ScalarFunction("clip", 3, "clip"),
    "real": ScalarFunction("real", 1, "part"),
    "imag": ScalarFunction("imag", 1, "part"),
    "angle": ScalarFunction("angle", 1, "angle"),
    "round": ScalarFunction("rint", 1, "round", np.rint, _INEXACT),
}
"""By the name in an expression, what is called."""

OPERATORS: Mapping[str, str] = {
    "Add": "add", "Sub": "subtract", "Mult": "multiply", "Div": "divide", "FloorDiv": "floor_divide",
    "Mod": "remainder", "Pow": "power", "BitAnd": "bitwise_and", "BitOr": "bitwise_or",
    "BitXor": "bitwise_xor", "LShift": "left_shift", "RShift": "right_shift", "USub": "negative",
    "UAdd": "positive", "Invert": "invert", "Not": "logical_not", "And": "logical_and", "Or": "logical_or",
    "Lt": "less", "LtE": "less_equal", "Gt": "greater", "GtE": "greater_equal", "Eq": "equal",
    "NotEq": "not_equal",
}  # fmt: skip
"""By the name of a node of Python's grammar, the function that it means."""

COMBINED: Mapping[str, str] = {
    "sum": "add",
    "prod": "multiply",
    "min": "minimum",
    "max": "maximum",
    "any": "logical_or",
    "all": "logical_and",
}
"""By the name of a reduction over a range, or over a vector, the function that combines two values."""

REDUCTIONS: Strs = (
    "sum",
    "prod",
    "mean",
    "min",
    "max",
    "nanmin",
    "nanmax",
    "any",
    "all",
    "argmin",
    "argmax",
)
"""Reductions along axes that have names."""

CONSTANTS: Mapping[str, float] = {"pi": float(np.pi), "inf": float("inf"), "nan": float("nan")}
"""Names that are numbers."""


Location: TypeAlias = tuple[int, int]
"""Line, from 1 on, and column, from 0 on, in characters."""


@attrs.frozen
class Name:
    """A reference to an argument, or to a name that an earlier statement assigned."""

    name: str
    location: Location = attrs.field(eq=False)


@attrs.frozen
class Literal:
    """A number in the source."""

    value: complex
    location: Location = attrs.field(eq=False)


@attrs.frozen
class Apply:
    """A function of its arguments; operators are functions.

    The parser has three functions of its own: ``%wide`` converts a value to the dtype of sums, and ``%min``
    and ``%max`` are the results of an empty range.
    """

    function: str
    arguments: tuple[Node, ...]
    location: Location = attrs.field(eq=False)


@attrs.frozen
class Index:
    """``i(axis)``: the index of the element along an axis of the result, from the end for negative ones."""

    axis: int
    location: Location = attrs.field(eq=False)


@attrs.frozen
class ElementLoad:
    """``x[...]``: an element of an argument, at computed indices."""

    name: str
    indices: tuple[Node, ...]
    location: Location = attrs.field(eq=False)


@attrs.frozen
class ElementCount:
    """``n``: how many elements are reduced."""

    location: Location = attrs.field(eq=False)


@attrs.frozen
class Reduce:
    """A reduction of all elements along the axes of a call.

    Attributes:
        name: One of `REDUCTIONS`, or ``"expression"``.
        value: The value to reduce.
        location: Its place in the source.
        dtype: Dtype that the values are converted to before they are combined; None for NumPy's choice.
        combine: For ``"expression"``, an expression of ``a`` and ``b``.
        identity: For ``"expression"``, the result of no elements; None if there is none.
        post: Last step of the result, an expression of ``a`` and ``n``.
        is_result: Whether it is the result, which is rounded once.
    """

    name: str
    value: Node
    location: Location = attrs.field(eq=False)
    dtype: DType | None = None
    combine: ParsedExpression | None = None
    identity: complex | None = None
    post: ParsedExpression | None = None
    is_result: bool = False

    @property
    def takes_nothing(self) -> bool:
        """Whether there is a result of no elements."""
        return self.name in ("sum", "prod", "mean", "any", "all") or self.identity is not None

    @property
    def is_index(self) -> bool:
        """Whether the result is the number of an element."""
        return self.name in ("argmin", "argmax")


Node: TypeAlias = Name | Literal | Apply | Index | ElementLoad | ElementCount | Reduce


@attrs.frozen
class Loop:
    """``for ... in range(start, stop)``, or a reduction over a range.

    Attributes:
        index: The name of its index.
        start: The first index.
        stop: The index after the last one.
        body: The statements.
        location: Its place in the source.
    """

    index: str
    start: Node
    stop: Node
    body: tuple[Statement, ...]
    location: Location


@attrs.frozen
class Break:
    """The end of the innermost loop, where a condition holds."""

    condition: Node


Statement: TypeAlias = tuple[str, Node] | Loop | Break
"""An assignment of a value to a name, a loop, or its end."""


def assigned_in(statements: Sequence[Statement]) -> Iterator[str]:
    """Yield the names that statements assign."""
    for statement in statements:
        if isinstance(statement, Loop):
            yield from assigned_in(statement.body)
        elif not isinstance(statement, Break):
            yield statement[0]


@attrs.frozen
class ParsedExpression:
    """Parsed statements.

    Attributes:
        text: The source.
        inputs: Names of the arguments, in order.
        outputs: Names of the results, in order.
        statements: Assignments to names, and loops, in order. Vectors are numbers here: ``v.x``.
        elements: The arguments that are read element by element.
        loads: The arguments that elements are loaded from, and the number of indices that each takes.
        has_index: Whether the source uses an index.
        reductions: The reductions along axes, in order.
        is_along: Whether the names of reductions mean reductions along axes.
        options: The options of a declared reduction that are not in the source of its values.
        margin: The number of columns removed from the begin of each line in the user's source.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # These follow from the text.
    statements: tuple[Statement, ...] = attrs.field(eq=False)
    elements: frozenset[str] = attrs.field(eq=False)
    loads: Mapping[str, int] = attrs.field(eq=False)
    has_index: bool = attrs.field(eq=False)
    reductions: tuple[Reduce, ...] = attrs.field(eq=False, default=())
    is_along: bool = False
    options: tuple[object, ...] = ()
    margin: int = attrs.field(eq=False, default=0)

    @cached_property
    def read_outside(self) -> frozenset[str]:
        """The inputs that the results read otherwise than by reductions."""
        dependencies: dict[str, frozenset[str]] = {}
        _find_read(self.statements, dependencies)
        return (
            frozenset[str]().union(*[dependencies[name] for name in self.outputs]).intersection(self.inputs)
        )

    @cached_property
    def takes_nothing(self) -> bool:
        """Whether every reduction has a result of no elements."""
        return all(reduction.takes_nothing for reduction in self.reductions)

    @cached_property
    def is_index(self) -> bool:
        """Whether a reduction finds the number of an element, which is along one axis."""
        return any(reduction.is_index for reduction in self.reductions)

    def refuse(self, message: str, location: Location) -> NoReturn:
        """Raise a `ValueError` that shows a place of the text."""
        raise ValueError(message_at(self.text, message, location, self.margin))


def _read_by(dependencies: Mapping[str, frozenset[str]], node: Node) -> frozenset[str]:
    match node:
        case Name():
            return dependencies.get(node.name, frozenset([node.name]))
        case Apply():
            names = frozenset[str]()
            inner = node.arguments
        case ElementLoad():
            names = frozenset([node.name])
            inner = node.indices
        case _:
            return frozenset()
    return names.union(*[_read_by(dependencies, operand) for operand in inner])


def _find_read(statements: Sequence[Statement], dependencies: dict[str, frozenset[str]]) -> None:
    """Find the inputs that assigned names depend on otherwise than by reductions."""
    read = partial(_read_by, dependencies)
    for statement in statements:
        match statement:
            case Loop():
                assigned = [*assigned_in(statement.body)]
                over = dependencies[statement.index] = read(statement.start) | read(statement.stop)
                previous, after = (
                    dict[str, frozenset[str]](),
                    {name: dependencies.get(name, frozenset([name])) for name in assigned},
                )
                # An iteration may find more of a name in the iteration before it.
                while after != previous:
                    previous = after
                    _find_read(statement.body, dependencies)
                    breaks = [read(inner.condition) for inner in statement.body if isinstance(inner, Break)]
                    over = over.union(*breaks)
                    after = {name: previous[name] | dependencies[name] | over for name in assigned}
                    dependencies |= after
            case Break():
                pass
            case (name, node):
                dependencies[name] = read(node)


def message_at(text: str, message: str, location: Location, margin: int = 0) -> str:
    """Return a message that shows a place in a source that has lost `margin` columns of each line."""
    lines = text.split("\n")
    line, column = location
    shown = lines[min(line, len(lines)) - 1]
    # A long line is shown around the place only.
    start = max(0, column - 60)
    heading = f"{message}, in line {line}, column {column + 1 + margin}"
    return f"{heading}\n    {shown[start : start + 100]}\n    {' ' * (column - start)}^"
