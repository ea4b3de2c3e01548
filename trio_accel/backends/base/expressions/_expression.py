"""Expressions as text: a small part of Python's grammar with some functions, never run by Python."""

from __future__ import annotations

import ast
import functools
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, cast

import attrs
import numpy as np

from ..contract.foreign_names import instead_of

__all__ = [
    "CONSTANTS", "FUNCTIONS", "OPERATORS", "SPECIAL", "Apply", "Expression", "Function", "Index", "Literal",
    "Load", "Name", "Node", "Place", "Rule", "parse",
]  # fmt: skip

Rule: TypeAlias = typing.Literal["ufunc", "cast", "where", "clip", "part", "angle", "round"]
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


Place: TypeAlias = tuple[int, int]
"""Line, from 1 on, and column, from 0 on, in characters."""

_MOST_CHARACTERS = 10_000
_MOST_NODES = 2_000
_MOST_DEPTH = 200
_MOST_INTEGER = 1 << 64
# The name of a bare expression's result.
_DEFAULT_OUTPUT = "out"
# The function that gives an index; a name like any other where it is not called.
_INDEX = "i"
_MOST_AXES = 64


@attrs.frozen
class Name:
    """An argument, or what an earlier statement assigned."""

    name: str
    place: Place = attrs.field(eq=False)


@attrs.frozen
class Literal:
    """A number that is written in the expression."""

    value: complex
    place: Place = attrs.field(eq=False)


@attrs.frozen
class Apply:
    """A function of its arguments; operators are functions."""

    function: str
    arguments: tuple[Node, ...]
    place: Place = attrs.field(eq=False)


@attrs.frozen
class Index:
    """``i(axis)``: the index of the element along an axis of the result, from the end for negative ones."""

    axis: int
    place: Place = attrs.field(eq=False)


@attrs.frozen
class Load:
    """``x[...]``: an element of an argument, at indices that are computed."""

    name: str
    indices: tuple[Node, ...]
    place: Place = attrs.field(eq=False)


Node: TypeAlias = "Name | Literal | Apply | Index | Load"


@attrs.frozen
class Expression:
    """Parsed statements.

    Attributes:
        text: The source of these.
        inputs: Names of the arguments, in order.
        outputs: Names of the results, in order.
        statements: Assignments of expressions to names, in order.
        elements: The arguments that are read element by element.
        loads: The arguments that elements are loaded from, and how many indices each takes.
        has_index: Whether there is an index.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # These follow from the text.
    statements: tuple[tuple[str, Node], ...] = attrs.field(eq=False)
    elements: frozenset[str] = attrs.field(eq=False)
    loads: Mapping[str, int] = attrs.field(eq=False)
    has_index: bool = attrs.field(eq=False)

    def refuse(self, message: str, place: Place) -> NoReturn:
        """Raise a `ValueError` that shows a place of the text."""
        raise ValueError(_told(self.text, message, place))


def _told(text: str, message: str, place: Place) -> str:
    lines = text.splitlines() or [""]
    line, column = place
    shown = lines[min(line, len(lines)) - 1]
    # A long line is shown around the place only.
    start = max(0, column - 60)
    return f"{message}, in line {line}, column {column + 1}\n    {shown[start : start + 100]}\n    " + (
        " " * (column - start) + "^"
    )


@functools.lru_cache(1024)
def parse(
    text: str, inputs: tuple[str, ...] | None = None, outputs: tuple[str, ...] | None = None
) -> Expression:
    """Parse statements such as ``"t = a - b; y = t * t"``.

    Args:
        text: Assignments, with ``;`` or new lines between them; or one expression, whose result is ``out``.
        inputs: Names of the arguments, in order; by default in the order in which the text names them.
        outputs: Names of the results, in order; by default what is assigned and not read
            by a later statement.

    Raises:
        ValueError: Something that is not allowed in an expression; the message shows where.
    """
    if not isinstance(cast("object", text), str):
        raise TypeError(f"an expression is a text, such as 'x * x', got {type(text).__name__}")
    text = textwrap.dedent(text).strip("\n")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters; at most {_MOST_CHARACTERS} are allowed")
    parser = _Parser(text)
    statements = tuple(parser.statements())
    found = _inputs(statements, Name, Load)
    assigned = list(dict.fromkeys(name for name, _ in statements))
    chosen = _unread(statements) if outputs is None else outputs
    for name in chosen:
        if name not in assigned:
            told = ", ".join(assigned)
            told = "the expression assigns nothing" if told == _DEFAULT_OUTPUT else f"assigned: {told}"
            raise ValueError(f"output {name!r} is not assigned; {told}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"outputs must be different names, at least one, got {chosen}")
    elements = frozenset(_inputs(statements, Name))
    ordered = _ordered(found, inputs)
    return Expression(text, ordered, tuple(chosen), statements, elements, parser.loads, parser.has_index)


def _ordered(found: list[str], inputs: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the arguments in the order that was asked for."""
    if inputs is None:
        return tuple(found)
    missing = [name for name in found if name not in inputs]
    if missing:
        raise ValueError(f"the expression reads {', '.join(missing)}, which inputs {inputs} do not name")
    unread = [name for name in inputs if name not in found]
    if unread or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"inputs must be different names that the expression reads, got {inputs}; it reads {found}"
        )
    return inputs


def _inputs(statements: Iterable[tuple[str, Node]], *kinds: type[Name | Load]) -> list[str]:
    """Return the names that nodes of these kinds read before they are assigned, in the text's order."""
    found: dict[str, None] = {}
    assigned: set[str] = set()
    for name, node in statements:
        # The text of ``a if c else b`` is not in the order in which its parts are computed.
        read = sorted(_names(node, *kinds), key=lambda each: each.place)
        found.update(dict.fromkeys(each.name for each in read if each.name not in assigned))
        assigned.add(name)
    return list(found)


def _unread(statements: Sequence[tuple[str, Node]]) -> tuple[str, ...]:
    """Return the names whose last value no later statement reads."""
    kept: dict[str, None] = {}
    for name, node in statements:
        for read in _names(node, Name, Load):
            kept.pop(read.name, None)
        kept[name] = None
    return tuple(kept)


def _names(node: Node, *kinds: type[Name | Load]) -> Iterator[Name | Load]:
    if isinstance(node, kinds):
        yield node
    for part in node.indices if isinstance(node, Load) else node.arguments if isinstance(node, Apply) else ():
        yield from _names(part, *kinds)


class _Parser:
    """Makes nodes of Python's own syntax tree, refusing what is not in the tables."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines()
        self._count = 0
        self._assigned: set[str] = set()
        self.loads: dict[str, int] = {}
        self.has_index: bool = False
        self._makers: dict[type[ast.expr], Callable[[Any, int], Node]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.BoolOp: self._logical,
            ast.Compare: self._compare,
            ast.IfExp: self._conditional,
            ast.Call: self._function,
            ast.Subscript: self._load,
        }

    def statements(self) -> Iterable[tuple[str, Node]]:
        tree = self._tree()
        if not tree.body:
            raise ValueError("the expression is empty")
        for statement in tree.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if name in FUNCTIONS or name in CONSTANTS:
                        self._refuse(f"{name!r} is a function or number, and cannot be assigned", statement)
                    yield name, self._node(value, 0)
                    self._assigned.add(name)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=operator, value=value):
                    function = OPERATORS.get(type(operator).__name__)
                    if function is None:
                        self._refuse(f"{_what(operator)} is not allowed", statement)
                    read = Name(name, self._place(target))
                    yield name, Apply(function, (read, self._node(value, 0)), self._place(statement))
                    self._assigned.add(name)
                case ast.Expr(value=value) if len(tree.body) == 1:
                    yield _DEFAULT_OUTPUT, self._node(value, 0)
                case ast.Expr():
                    self._refuse("a result that no name is given to", statement)
                case _:
                    self._refuse(f"{_what(statement)} is not allowed: write name = expression", statement)

    def _tree(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._text)
        except SyntaxError as error:
            place = error.lineno or 1, max((error.offset or 1) - 1, 0)
            raise ValueError(_told(self._text, str(error.msg), place)) from None
        except (RecursionError, MemoryError):
            raise ValueError("the expression is nested too deeply") from None
        except ValueError as error:
            # A zero byte, or digits without end.
            raise ValueError(f"the expression cannot be read: {error}") from None

    def _node(self, node: ast.expr, depth: int) -> Node:
        self._count += 1
        if depth > _MOST_DEPTH or self._count > _MOST_NODES:
            self._refuse("the expression is too long, or nested too deeply, from here on", node)
        make: Callable[[Any, int], Node] | None = self._makers.get(type(node))
        if make is None:
            self._refuse(f"{_what(node)} is not allowed in an expression", node)
        # A chain is nested, too.
        links = len(getattr(node, "values", ())) + len(getattr(node, "comparators", ()))
        return make(node, depth + 1 + links)

    def _constant(self, node: ast.Constant, _: int) -> Node:
        return Literal(self._number(node.value, node), self._place(node))

    def _name(self, node: ast.Name, _: int) -> Node:
        if node.id in FUNCTIONS:
            self._refuse(f"{node.id} is a function: write {node.id}(...)", node)
        place = self._place(node)
        return Literal(CONSTANTS[node.id], place) if node.id in CONSTANTS else Name(node.id, place)

    def _unary(self, node: ast.UnaryOp, depth: int) -> Node:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return Literal(-self._number(node.operand.value, node), self._place(node))
        return self._call(node.op, [node.operand], node, depth)

    def _binary(self, node: ast.BinOp, depth: int) -> Node:
        return self._call(node.op, [node.left, node.right], node, depth)

    def _logical(self, node: ast.BoolOp, depth: int) -> Node:
        return self._chain(node.op, [self._node(value, depth) for value in node.values], self._place(node))

    def _conditional(self, node: ast.IfExp, depth: int) -> Node:
        items = tuple(self._node(each, depth) for each in (node.test, node.body, node.orelse))
        return Apply("where", items, self._place(node))

    def _call(
        self, operator: ast.operator | ast.unaryop, items: list[ast.expr], node: ast.expr, depth: int
    ) -> Node:
        function = self._operator(operator, node)
        return Apply(function, tuple(self._node(item, depth) for item in items), self._place(node))

    def _operator(self, operator: ast.AST, node: ast.expr) -> str:
        function = OPERATORS.get(type(operator).__name__)
        if function is None:
            self._refuse(f"the operator {_what(operator)} is not allowed in an expression", node)
        return function

    def _chain(self, operator: ast.boolop, items: list[Node], place: Place) -> Node:
        function = OPERATORS[type(operator).__name__]
        return functools.reduce(lambda left, right: Apply(function, (left, right), place), items)

    def _compare(self, node: ast.Compare, depth: int) -> Node:
        items = [self._node(each, depth) for each in (node.left, *node.comparators)]
        found: list[Node] = []
        for operator, left, right in zip(node.ops, items, items[1:], strict=False):
            found.append(Apply(self._operator(operator, node), (left, right), self._place(node)))
        # Python reads a < b < c as a < b and b < c, and so does this.
        return self._chain(ast.And(), found, self._place(node))

    def _function(self, node: ast.Call, depth: int) -> Node:
        if not isinstance(node.func, ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            told = f": write {name}(...)" if name in FUNCTIONS else _similar(name)
            self._refuse(f"only functions of the table can be called, by their names{told}", node)
        name = node.func.id
        if name == _INDEX:
            return self._index(node)
        function = FUNCTIONS.get(name)
        if function is None:
            told = f"; write {name}imum(x, y)" if name in ("max", "min") and len(node.args) == 2 else ""
            self._refuse(f"there is no function {name!r} in expressions{told or _similar(name)}", node)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            self._refuse(f"{name} takes its arguments by their places only", node)
        if len(node.args) != function.arity:
            self._refuse(f"{name} takes {function.arity} arguments, got {len(node.args)}", node)
        items = tuple(self._node(argument, depth) for argument in node.args)
        return Apply(name, items, self._place(node))

    def _number(self, value: object, node: ast.expr) -> complex:
        if not isinstance(value, (bool, int, float, complex)):
            self._refuse(f"a {type(value).__name__} is not allowed in an expression; numbers are", node)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _MOST_INTEGER:
            self._refuse("a whole number must have at most 64 bits", node)
        return value

    def _place(self, node: ast.expr | ast.stmt) -> Place:
        # Python counts bytes.
        line = self._lines[node.lineno - 1] if node.lineno <= len(self._lines) else ""
        return node.lineno, len(line.encode()[: node.col_offset].decode(errors="replace"))

    def _index(self, node: ast.Call) -> Node:
        self.has_index = True
        match node:
            case ast.Call(args=[ast.Constant(value=int(axis))], keywords=[]):
                pass
            case ast.Call(
                args=[ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(axis)))], keywords=[]
            ):
                axis = -axis
            case _:
                self._refuse("i takes an axis of the result as a number that is written: i(0), i(-1)", node)
        if isinstance(axis, bool) or not -_MOST_AXES <= axis < _MOST_AXES:
            self._refuse(f"there is no axis {axis}: an array has at most {_MOST_AXES} axes", node)
        return Index(axis, self._place(node))

    def _load(self, node: ast.Subscript, depth: int) -> Node:
        if not isinstance(node.value, ast.Name):
            self._refuse("only arguments have elements to load: write x[...]", node)
        name, items = node.value.id, node.slice
        if name in FUNCTIONS or name in CONSTANTS or name in self._assigned:
            self._refuse(f"{name!r} is no argument: only arguments have elements to load", node)
        several = items.elts if isinstance(items, ast.Tuple) else [items]
        if self.loads.setdefault(name, len(several)) != len(several) or not several:
            self._refuse(f"{name!r} takes one index for each of its axes, always as many", node)
        return Load(name, tuple(self._node(item, depth) for item in several), self._place(node))

    def _refuse(self, message: str, node: ast.expr | ast.stmt) -> NoReturn:
        raise ValueError(_told(self._text, message, self._place(node)))


def _what(node: ast.AST) -> str:
    """Name a node in words."""
    names = {
        "MatMult": "@",
        "Is": "is",
        "IsNot": "is not",
        "In": "in",
        "NotIn": "not in",
        "Attribute": "an attribute (.name)",
        "Slice": "a slice (a:b)",
        "NamedExpr": "an assignment (:=)",
        "JoinedStr": "a string",
    }
    name = type(node).__name__
    return names.get(name, f"{name!r}")


def _similar(name: str) -> str:
    import difflib

    similar = difflib.get_close_matches(name, FUNCTIONS, 3)
    return instead_of(name) or (f"; there is {', '.join(similar)}" if similar else "")
