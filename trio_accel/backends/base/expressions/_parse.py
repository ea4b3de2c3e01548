"""Texts become statements: Python's own syntax tree, of which a small part is allowed (D118, D187)."""

from __future__ import annotations

import ast
import functools
import textwrap
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, cast

import attrs

from ..contract.foreign_names import instead_of
from ._expression import (
    COMBINED,
    CONSTANTS,
    FUNCTIONS,
    OPERATORS,
    Apply,
    Break,
    Counter,
    Expression,
    Index,
    Literal,
    Load,
    Loop,
    Name,
    Node,
    Place,
    Start,
    Statement,
    message_at,
)

__all__ = ["parse"]

_MOST_CHARACTERS = 10_000
_MOST_NODES = 2_000
_MOST_DEPTH = 200
_MOST_INTEGER = 1 << 64
_MOST_LOOPS = 3
_MOST_AXES = 64
# The name of a bare expression's result.
_DEFAULT_OUTPUT = "out"
# The function that gives an index; a name like any other where it is not called.
_INDEX = "i"
_COMPONENTS = "xyzw"
# Functions that take and make vectors, and how many arguments they take; names like any other likewise.
_OF_VECTORS = {"vector": 0, "dot": 2, "cross": 2, "length": 1, "normalize": 1}


@attrs.frozen
class Vector:
    """Two to four numbers; every statement of these is one for each."""

    parts: tuple[Node, ...]
    place: Place


_Value: TypeAlias = "Node | Vector"


@functools.lru_cache(1024)
def parse(
    text: str, inputs: tuple[str, ...] | None = None, outputs: tuple[str, ...] | None = None
) -> Expression:
    """Parse statements such as ``"t = a - b; y = t * t"``.

    Args:
        text: Assignments and loops, with ``;`` or new lines between them; or one expression, whose result is
            ``out``.
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
    parser = _Parser(text, inputs or ())
    statements = parser.statements()
    chosen = tuple(parser.unread) if outputs is None else outputs
    for name in chosen:
        parser.check_output(name)
        if name not in parser.assigned:
            told = ", ".join(parser.assigned)
            told = "the expression assigns nothing" if told == _DEFAULT_OUTPUT else f"assigned: {told}"
            raise ValueError(f"output {name!r} is not assigned; {told}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"outputs must be different names, at least one, got {chosen}")
    ordered = _ordered(sorted(parser.reads, key=lambda name: parser.reads[name]), inputs)
    elements = frozenset(parser.elements)
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


def _stored(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements assign."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


class _Parser:
    """Makes statements of Python's own syntax tree, refusing what is not in the tables.

    Vectors become numbers here, and reductions over ranges become loops, so nothing else knows of them. Names
    that are made for that begin with ``%``.

    Attributes:
        reads: Names of the arguments, and where each is read first.
        elements: Those that are read element by element.
        loads: Those that elements are loaded from, and how many indices each takes.
        has_index: Whether there is an index.
        assigned: Names that are assigned, in order.
        unread: Names whose last value no later statement reads.
    """

    def __init__(self, text: str, inputs: Sequence[str]) -> None:
        self._text = text
        self._lines = text.splitlines()
        self._inputs = inputs
        self._count = self._made = self._loops = self._nested = 0
        # The statements so far, of each open loop.
        self._blocks: list[list[Statement]] = [[]]
        # Names that have a value now; and those that had one, with the reason that they have none any more.
        self._known: set[str] = set()
        self._gone: dict[str, str] = {}
        self._vectors: dict[str, int] = {}
        self._counters: dict[str, int] = {}
        # Names that open loops assign.
        self._changed: set[str] = set()
        self.reads: dict[str, Place] = {}
        self.elements: set[str] = set()
        self.loads: dict[str, int] = {}
        self.has_index: bool = False
        self.assigned: dict[str, Place] = {}
        self.unread: dict[str, None] = {}
        self._makers: dict[type[ast.expr], Callable[[Any, int], _Value]] = {
            ast.Attribute: self._component,
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

    def statements(self) -> tuple[Statement, ...]:
        body = self._tree().body
        if not body:
            raise ValueError("the expression is empty")
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            self._assign(_DEFAULT_OUTPUT, self._node(body[0].value, 0), body[0], None)
        else:
            self._block(body, None)
        return tuple(self._blocks[0])

    def check_output(self, name: str) -> None:
        """Refuse a result that is a vector, or that has no value behind its loop."""
        place = self.assigned.get(name, (1, 0))
        if count := self._vectors.get(name, 0):
            told = ", ".join(f"{name}_{each} = {name}.{each}" for each in _COMPONENTS[:count])
            self._refuse_at(f"{name} is a vector, and a result is a number: write {told}", place)
        if name in self._gone:
            self._refuse_at(f"{name!r} {self._gone[name]}", place)

    def _block(self, body: Sequence[ast.stmt], condition: Node | None) -> None:
        """Take statements, which count where a condition holds."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, self._node(value, 0), statement, condition)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=operator, value=value):
                    function = OPERATORS.get(type(operator).__name__)
                    if function is None:
                        self._refuse(f"{_what(operator)} is not allowed", statement)
                    both = [self._name(target, 0), self._node(value, 0)]
                    self._assign(
                        name, self._apply(function, both, self._place(statement)), statement, condition
                    )
                case ast.For():
                    self._for(statement, condition)
                case ast.If():
                    self._if(statement, condition)
                case ast.Break():
                    self._break(statement, condition, is_last=statement is body[-1])
                case _:
                    self._refuse_statement(statement)

    def _refuse_statement(self, statement: ast.stmt) -> NoReturn:
        told: dict[type[ast.stmt], str] = {
            ast.While: "a loop needs a bound: for k in range(1000): ... if not condition: break",
            ast.Continue: "continue is not allowed: write the rest under if not condition",
            ast.Expr: "a result that no name is given to",
        }
        usual = f"{_what(statement)} is not allowed: write name = expression"
        self._refuse(told.get(type(statement), usual), statement)

    def _assign(self, name: str, value: _Value, node: ast.stmt, condition: Node | None) -> None:
        if name in FUNCTIONS or name in CONSTANTS:
            self._refuse(f"{name!r} is a function or number, and cannot be assigned", node)
        if name in self._counters:
            self._refuse(f"{name!r} is the index of the loop, and cannot be assigned", node)
        count = len(value.parts) if isinstance(value, Vector) else 0
        if self._is_known(name) and self._vectors.get(name, 0) != count:
            self._refuse(
                f"{name!r} was {_form(self._vectors.get(name, 0))}, and is {_form(count)} here", node
            )
        if condition is not None and self._is_known(name):
            self._gone.pop(name, None)
            old = self._read(name, value.place)
            value = self._apply("where", [condition, value, old], value.place)
        if count:
            self._vectors[name] = count
        self._known.add(name)
        self._gone.pop(name, None)
        self.unread[name] = None
        self.assigned[name] = value.place
        self._emit(name, value)

    def _emit(self, name: str, value: _Value) -> _Value:
        """Assign a value, and return what reads it."""
        if not isinstance(value, Vector):
            self._blocks[-1].append((name, value))
            return Name(name, value.place)
        parts = zip(_COMPONENTS, value.parts, strict=False)
        names: list[Any] = [self._emit(f"{name}.{each}", part) for each, part in parts]
        return Vector(tuple(names), value.place)

    def _hold(self, value: _Value) -> Any:
        """Return what may be read several times, and is computed once."""
        if isinstance(value, Vector):
            return Vector(tuple([self._hold(part) for part in value.parts]), value.place)
        return value if isinstance(value, (Name, Literal, Counter)) else self._emit(self._new(), value)

    def _new(self) -> str:
        self._made += 1
        return f"%{self._made}"

    def _is_known(self, name: str) -> bool:
        return name in self._known or name in self.reads or name in self._inputs

    def _if(self, statement: ast.If, condition: Node | None) -> None:
        test = self._hold(self._scalar(statement.test, 0))
        place, known = self._place(statement), set(self._known)
        made: list[set[str]] = []
        for body, holds in (
            (statement.body, test),
            (statement.orelse, Apply("logical_not", (test,), place)),
        ):
            if not body:
                break
            both = holds if condition is None else Apply("logical_and", (condition, holds), place)
            self._block(body, self._hold(both))
            made.append({name for name in _stored(body) if name not in known and name not in self.reads})
            self._forget(made[-1], "is assigned only where a condition holds: give it a value before")
        if len(made) > 1:
            for name in made[0] & made[1]:
                del self._gone[name]

    def _forget(self, names: set[str], reason: str) -> None:
        """Let names have no value any more, unless they are arguments."""
        self._gone.update({name: reason for name in names if name not in self._inputs})

    def _break(self, statement: ast.Break, condition: Node | None, *, is_last: bool) -> None:
        if not self._nested:
            self._refuse("break is for loops", statement)
        if condition is None or not is_last:
            self._refuse("break is the last statement under a condition: if condition: break", statement)
        self._blocks[-1].append(Break(condition))

    def _for(self, statement: ast.For, condition: Node | None) -> None:
        if condition is not None:
            self._refuse("a loop under a condition is not allowed: for k in range(n if c else 0)", statement)
        if statement.orelse:
            self._refuse("else of a loop is not allowed", statement.orelse[0])
        stored, known = _stored(statement.body), set(self._known)
        changed, self._changed = self._changed, self._changed | stored
        with self._loop(statement.target, statement.iter, 0) as name:
            if self._is_known(name):
                self._refuse(f"{name!r} has a value: the index of a loop needs a name of its own", statement)
            self._block(statement.body, None)
        self._changed = changed
        local = {each for each in stored if each not in known and each not in self.reads}
        self._forget(local, "is assigned only in the loop: give it a value before")
        self._known -= local
        if not self.unread:
            # The loop alone reads what it assigns.
            self.unread.update(dict.fromkeys(each for each in self.assigned if each in stored - local))
        self._forget({name}, "is the index of the loop, and has no value behind it")

    @contextmanager
    def _loop(self, target: ast.expr, over: ast.expr, depth: int) -> Generator[str]:
        """Take the statements within as the body of a loop."""
        if not isinstance(target, ast.Name):
            self._refuse("a loop has one index: for k in range(n)", target)
        name = target.id
        if name in FUNCTIONS or name in CONSTANTS:
            self._refuse(f"{name!r} is a function or number, and no index of a loop", target)
        if self._nested == _MOST_LOOPS:
            self._refuse(f"loops are nested in each other at most {_MOST_LOOPS} times", target)
        start, stop = self._range(over, depth)
        number = self._loops
        self._loops += 1
        self._nested += 1
        outer, self._counters = self._counters, self._counters | {name: number}
        self._blocks.append([])
        yield name
        body = tuple(self._blocks.pop())
        self._counters = outer
        self._nested -= 1
        self._blocks[-1].append(Loop(number, start, stop, body, self._place(target)))

    def _range(self, node: ast.expr, depth: int) -> tuple[Node, Node]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "range":
            self._refuse("a loop is over a range only: for k in range(n)", node)
        if not 1 <= len(node.args) <= 2 or node.keywords:
            self._refuse("range takes one or two whole numbers: range(n), range(first, stop)", node)
        start, stop = [Literal(0, self._place(node)), *[self._scalar(each, depth) for each in node.args]][-2:]
        return start, stop

    def _reduced(self, node: ast.Call, function: str, over: ast.GeneratorExp, depth: int) -> _Value:
        """Write a reduction over a range as a loop."""
        place, name = self._place(node), self._new()
        conditions: list[Node] = []

        def one(generators: Sequence[ast.comprehension]) -> _Value:
            if not generators:
                value = self._node(over.elt, depth)
                if isinstance(value, Vector) and function in ("any", "all"):
                    self._refuse(f"{function} is of one number: reduce the vector first", over.elt)
                parts = value.parts if isinstance(value, Vector) else (value,)
                given = (self._chain("logical_and", conditions, place),) if conditions else ()
                names = [f"{name}.{at}" for at in _COMPONENTS] if isinstance(value, Vector) else [name]
                for at, part in zip(names, parts, strict=False):
                    self._blocks[-1].append((at, Apply(function, (Name(at, place), part, *given), place)))
                if function in ("any", "all"):
                    found = Name(name, place)
                    end = found if function == "any" else Apply("logical_not", (found,), place)
                    self._blocks[-1].append(Break(end))
                return value
            first, *rest = generators
            with self._loop(first.target, first.iter, depth):
                conditions.extend(self._hold(self._scalar(each, depth)) for each in first.ifs)
                return one(rest)

        value = one(over.generators)
        start = Start(function, place)
        loop = self._blocks[-1].pop()
        count = len(value.parts) if isinstance(value, Vector) else 0
        found = self._emit(name, Vector((start,) * count, place) if count else start)
        self._blocks[-1].append(loop)
        return found

    def _tree(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._text)
        except SyntaxError as error:
            place = error.lineno or 1, max((error.offset or 1) - 1, 0)
            raise ValueError(message_at(self._text, str(error.msg), place)) from None
        except (RecursionError, MemoryError):
            raise ValueError("the expression is nested too deeply") from None
        except ValueError as error:
            # A zero byte, or digits without end.
            raise ValueError(f"the expression cannot be read: {error}") from None

    def _node(self, node: ast.expr, depth: int) -> _Value:
        self._count += 1
        if depth > _MOST_DEPTH or self._count > _MOST_NODES:
            self._refuse("the expression is too long, or nested too deeply, from here on", node)
        make: Callable[[Any, int], _Value] | None = self._makers.get(type(node))
        if make is None:
            self._refuse(f"{_what(node)} is not allowed in an expression", node)
        # A chain is nested, too.
        links = len(getattr(node, "values", ())) + len(getattr(node, "comparators", ()))
        return make(node, depth + 1 + links)

    def _scalar(self, node: ast.expr, depth: int) -> Node:
        value = self._node(node, depth)
        if isinstance(value, Vector):
            self._refuse("a vector is no number here: take .x, length(...), all(...) or any(...)", node)
        return value

    def _constant(self, node: ast.Constant, _: int) -> Node:
        return Literal(self._number(node.value, node), self._place(node))

    def _name(self, node: ast.Name, _: int) -> _Value:
        name, place = node.id, self._place(node)
        if name in self._counters:
            return Counter(self._counters[name], place)
        if name in FUNCTIONS:
            self._refuse(f"{name} is a function: write {name}(...)", node)
        if name in CONSTANTS:
            return Literal(CONSTANTS[name], place)
        if name in self._gone:
            self._refuse(f"{name!r} {self._gone[name]}", node)
        return self._read(name, place)

    def _read(self, name: str, place: Place) -> _Value:
        self.unread.pop(name, None)
        if count := self._vectors.get(name, 0):
            return Vector(tuple(Name(f"{name}.{each}", place) for each in _COMPONENTS[:count]), place)
        if name not in self._known:
            self.reads[name] = min(place, self.reads.get(name, place))
            self.elements.add(name)
        return Name(name, place)

    def _component(self, node: ast.Attribute, depth: int) -> Node:
        value = self._node(node.value, depth)
        if not isinstance(value, Vector):
            self._refuse(f"{_what(node)} is not allowed in an expression", node)
        names = _COMPONENTS[: len(value.parts)]
        if node.attr not in [*names]:
            self._refuse(f"{_form(len(names))} has .{' .'.join(names)}, and no .{node.attr}", node)
        return value.parts[names.index(node.attr)]

    def _unary(self, node: ast.UnaryOp, depth: int) -> _Value:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return Literal(-self._number(node.operand.value, node), self._place(node))
        return self._call(node.op, [node.operand], node, depth)

    def _binary(self, node: ast.BinOp, depth: int) -> _Value:
        return self._call(node.op, [node.left, node.right], node, depth)

    def _logical(self, node: ast.BoolOp, depth: int) -> _Value:
        values = [self._node(value, depth) for value in node.values]
        return cast("_Value", self._chain(OPERATORS[type(node.op).__name__], values, self._place(node)))

    def _conditional(self, node: ast.IfExp, depth: int) -> _Value:
        items = [self._node(each, depth) for each in (node.test, node.body, node.orelse)]
        return self._apply("where", items, self._place(node))

    def _call(
        self, operator: ast.operator | ast.unaryop, items: list[ast.expr], node: ast.expr, depth: int
    ) -> _Value:
        function = self._operator(operator, node)
        return self._apply(function, [self._node(item, depth) for item in items], self._place(node))

    def _apply(self, function: str, values: Sequence[_Value], place: Place) -> _Value:
        """Call a function, of vectors for each component."""
        counts = {len(value.parts) for value in values if isinstance(value, Vector)}
        if not counts:
            return Apply(function, cast("tuple[Node, ...]", tuple(values)), place)
        if len(counts) > 1:
            self._refuse_at(f"{function} of {' and '.join(map(_form, sorted(counts)))}", place)
        count = counts.pop()
        columns = [
            value.parts if isinstance(value, Vector) else (self._hold(value),) * count for value in values
        ]
        return Vector(tuple(Apply(function, each, place) for each in zip(*columns, strict=True)), place)

    def _operator(self, operator: ast.AST, node: ast.expr) -> str:
        function = OPERATORS.get(type(operator).__name__)
        if function is None:
            self._refuse(f"the operator {_what(operator)} is not allowed in an expression", node)
        return function

    def _chain(self, function: str, items: Sequence[_Value], place: Place) -> Any:
        return functools.reduce(lambda left, right: self._apply(function, (left, right), place), items)

    def _compare(self, node: ast.Compare, depth: int) -> _Value:
        items = [self._node(each, depth) for each in (node.left, *node.comparators)]
        found: list[_Value] = []
        for operator, left, right in zip(node.ops, items, items[1:], strict=False):
            found.append(self._apply(self._operator(operator, node), (left, right), self._place(node)))
        # Python reads a < b < c as a < b and b < c, and so does this.
        return cast("_Value", self._chain("logical_and", found, self._place(node)))

    def _function(self, node: ast.Call, depth: int) -> _Value:
        if not isinstance(node.func, ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            told = f": write {name}(...)" if name in FUNCTIONS else _similar(name)
            self._refuse(f"only functions of the table can be called, by their names{told}", node)
        name = node.func.id
        if name == _INDEX:
            return self._index(node)
        function = FUNCTIONS.get(name)
        is_reduction = name in COMBINED and len(node.args) == 1
        if function is None and not is_reduction and name not in _OF_VECTORS:
            told = f"; write {name}imum(x, y)" if name in ("max", "min") and len(node.args) == 2 else ""
            told = "; a range is for loops and reductions: for k in range(n)" if name == "range" else told
            self._refuse(f"there is no function {name!r} in expressions{told or _similar(name)}", node)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            self._refuse(f"{name} takes its arguments by their places only", node)
        if is_reduction and isinstance(node.args[0], ast.GeneratorExp):
            return self._reduced(node, name, node.args[0], depth)
        arity = _OF_VECTORS.get(name, 1 if function is None else function.arity)
        if len(node.args) != arity and name != "vector":
            self._refuse(f"{name} takes {arity} arguments, got {len(node.args)}", node)
        items = [self._node(argument, depth) for argument in node.args]
        return (
            self._of_vectors(name, items, node)
            if function is None
            else self._apply(name, items, self._place(node))
        )

    def _of_vectors(self, name: str, items: list[_Value], node: ast.Call) -> _Value:
        place = self._place(node)
        if name == "vector":
            if not 2 <= len(items) <= len(_COMPONENTS) or any(isinstance(each, Vector) for each in items):
                self._refuse("a vector has two to four numbers: vector(x, y, z)", node)
            return Vector(tuple(cast("list[Node]", items)), place)
        a, b = vectors = [self._hold(items[0]), self._hold(items[-1])]
        if any(not isinstance(each, Vector) for each in vectors):
            told = f", or a range: {name}(x[k] for k in range(n))" if name in COMBINED else ""
            self._refuse(f"{name} takes vectors, such as vector(x, y){told}", node)
        if name in COMBINED:
            return cast("_Value", self._chain(COMBINED[name], a.parts, place))
        if name == "cross":
            if len(a.parts) != 3 or len(b.parts) != 3:
                self._refuse("cross takes two vectors of 3 numbers", node)
            return Vector(
                tuple(
                    self._difference(a.parts[n - 2], b.parts[n - 1], a.parts[n - 1], b.parts[n - 2], place)
                    for n in range(3)
                ),
                place,
            )
        # Of one argument, both are the same.
        products = self._apply("multiply", (a, b), place)
        dot = self._chain("add", cast("Vector", products).parts, place)
        if name == "dot":
            return cast("Node", dot)
        length = self._hold(Apply("sqrt", (dot,), place))
        return cast("_Value", length if name == "length" else self._apply("divide", (a, length), place))

    @staticmethod
    def _difference(a: Node, b: Node, c: Node, d: Node, place: Place) -> Node:
        """Write ``a * b - c * d``."""
        return Apply("subtract", (Apply("multiply", (a, b), place), Apply("multiply", (c, d), place)), place)

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

    def _load(self, node: ast.Subscript, depth: int) -> _Value:
        if not isinstance(node.value, ast.Name):
            self._refuse("only arguments have elements to load: write x[...]", node)
        name, items, place = node.value.id, node.slice, self._place(node)
        if name in FUNCTIONS or name in CONSTANTS or name in {*self._known, *self._changed, *self._counters}:
            self._refuse(f"{name!r} is no argument: only arguments have elements to load", node)
        several = items.elts if isinstance(items, ast.Tuple) else [items]
        if self.loads.setdefault(name, len(several)) != len(several) or not several:
            self._refuse(f"{name!r} takes one index for each of its axes, always as many", node)
        self.reads[name] = min(place, self.reads.get(name, place))
        at = next((n for n, item in enumerate(several) if isinstance(item, ast.Slice)), None)
        if at is None:
            return Load(name, tuple(self._scalar(item, depth) for item in several), place)
        components = self._slice(cast("ast.Slice", several[at]))
        rest = [self._hold(self._scalar(item, depth)) for n, item in enumerate(several) if n != at]
        return Vector(
            tuple(Load(name, (*rest[:at], Literal(n, place), *rest[at:]), place) for n in components), place
        )

    def _slice(self, node: ast.Slice) -> range:
        """Return the elements that are loaded as a vector."""
        numbers = [each.value for each in (node.lower, node.upper) if isinstance(each, ast.Constant)]
        bounds = numbers if node.lower else [0, *numbers]
        is_plain = node.step is None and [type(each) for each in bounds] == [int, int]
        found = range(*cast("list[int]", bounds)) if is_plain else range(0)
        if not 2 <= len(found) <= len(_COMPONENTS):
            told = "one of two to four elements, written as numbers, is a vector: x[k, 0:3]"
            self._refuse(f"a slice (a:b) is not allowed here; {told}", node)
        return found

    def _refuse(self, message: str, node: ast.expr | ast.stmt) -> NoReturn:
        self._refuse_at(message, self._place(node))

    def _refuse_at(self, message: str, place: Place) -> NoReturn:
        raise ValueError(message_at(self._text, message, place))


def _form(count: int) -> str:
    return f"a vector of {count}" if count else "a number"


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
