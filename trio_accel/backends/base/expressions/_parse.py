"""Parse the source of expressions: Python's own syntax tree, of which a small part is allowed (D118, D187).

`parse` returns a `ParsedExpression`, a tuple of statements without types; `_typing` gives them dtypes. The
language has assignments, `for` over a range, `if`, `break`, and expressions of the tables in `_expression`. A
`_Parser` walks the tree once, in program order, and refuses every node that is not in its tables. Refusals
are `ValueError`s, and `_refuse` shows the line and marks the column. Other errors of Python's parser must not
leave `parse`, so `_tree` converts them.

Later modules know assignments, loops and breaks only, because the parser rewrites all other constructs:

* Vectors become one name for each component, such as ``p.x``. A `_Value` holds one node for each component.
* Reductions over ranges become loops with an accumulator (`_reduced`). The accumulator's first value is
  emitted before the loop, although the body determines the number of its components.
* Branches become assignments of ``where(condition, new, old)``. So both branches are computed, a loop is not
  allowed in a branch, and a name needs a value before, unless both branches assign it (`_if`).
* Reductions along axes become names of their own (`_along`), outside of loops and conditions only.

Names that the parser makes begin with ``%``, so they never equal a name of the source.

Three invariants hold. A name is either an argument or assigned when it is first read: `_known` has the names
with a value, `_gone` the names that a loop or branch has taken out of scope. A value that is read several
times is computed once, so `_hold` names it first; the statement that `_hold` emits must precede its readers,
also in a loop. `unread` has the names that no later statement reads, because these are the results by
default.

The limits on characters, nodes and depth keep long sources from exhausting Python's stack. Results are
cached, because programs pass the same sources again and again.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, cast

from ..contract.dtypes import Strs
from . import _expression as nodes  # pyright: ignore[reportPrivateUsage]  # of this package
from ._advice import label_of, not_allowed, of_other_languages, similar
from ._expression import (
    COMBINED,
    CONSTANTS,
    FUNCTIONS,
    OPERATORS,
    REDUCTIONS,
    Apply,
    Location,
    Name,
    Node,
    message_at,
)

__all__ = ["COUNT", "parse"]

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
COUNT = "n"
"""Name of the count of elements that are reduced, beside reductions along axes."""

_COMPONENTS = "xyzw"
# The values of an empty range; for other reductions the value depends on the dtype.
_FIRST = {"sum": 0, "prod": 1, "any": False, "all": True}
_REFUSED: dict[type[ast.stmt], str] = {
    ast.While: "a loop needs a bound: for k in range(1000): ... if not condition: break",
    ast.Continue: "continue is not allowed: write the rest under if not condition",
    ast.Expr: "a result that no name is given to: write name = expression",
}
_UNDEFINED_AFTER_LOOP = "has no value behind the loop: give it one before"
_UNDEFINED_AFTER_BRANCH = "has no value here: give it one before the if, and before the loop"
# Functions that take and make vectors, and how many arguments they take; names like any other likewise.
_OF_VECTORS = {"vector": 0, "dot": 2, "cross": 2, "length": 1, "normalize": 1}


_Value: TypeAlias = tuple[Node, ...]
"""One number, or those of a vector."""


@functools.lru_cache(1024)
def parse(
    text: str, inputs: Strs | None = None, outputs: Strs | None = None, *, is_along: bool = False
) -> nodes.ParsedExpression:
    """Parse statements such as ``"t = a - b; y = t * t"``.

    Args:
        text: Assignments and loops, with ``;`` or new lines between them; or one expression, whose result is
            ``out``.
        inputs: Names of the arguments, in order; by default in the order in which the source names them.
        outputs: Names of the results, in order. By default the assigned names that no later statement reads;
            with `is_along`, the last of them.
        is_along: Whether there are reductions along axes, such as ``"e = exp(x - max(x)); y = e / sum(e)"``:
            calls of `REDUCTIONS`. The number of elements that are reduced is `COUNT` then, unless an input
            has this name.

    Raises:
        ValueError: The source contains something that an expression does not allow; the message shows the
            place.
    """
    if not isinstance(cast("object", text), str):
        raise TypeError(f"an expression is a text, such as 'x * x', got {type(text).__name__}")
    # These are line ends for Python, and no others. Blank lines count.
    source = re.sub(r"\r\n?", "\n", text)
    text = textwrap.dedent(source).rstrip("\n")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters; at most {_MOST_CHARACTERS} are allowed")
    both = zip(source.split("\n"), text.split("\n"), strict=False)
    margin = next((len(original) - len(line) for original, line in both if line), 0)
    parser = _Parser(text, margin, inputs or (), is_along=is_along)
    statements = parser.statements()
    chosen = outputs
    if chosen is None:
        chosen = tuple(parser.unread)[-1:] if is_along else tuple(parser.unread)
    for name in chosen:
        parser.check_output(name)
        if name not in parser.assigned:
            listing = ", ".join(parser.assigned)
            listing = (
                "the expression assigns nothing" if listing == _DEFAULT_OUTPUT else f"assigned: {listing}"
            )
            raise ValueError(f"output {name!r} is not assigned; {listing}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"outputs must be different names, at least one, got {chosen}")
    ordered = _ordered(sorted(parser.reads, key=lambda name: parser.reads[name]), inputs)
    return nodes.ParsedExpression(
        text,
        ordered,
        tuple(chosen),
        statements,
        frozenset(parser.elements),
        parser.loads,
        parser.has_index,
        tuple(parser.reductions),
        is_along,
        margin=margin,
    )


def _ordered(names: list[str], inputs: Strs | None) -> Strs:
    """Return the arguments in the requested order."""
    if inputs is None:
        return tuple(names)
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ValueError(f"the expression reads {', '.join(missing)}, which inputs {inputs} do not name")
    unread = [name for name in inputs if name not in names]
    if unread or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"inputs must be different names that the expression reads, got {inputs}; it reads {names}"
        )
    return inputs


class _Parser:
    """Makes statements of Python's own syntax tree, and refuses nodes outside of the tables.

    Attributes:
        reads: Names of the arguments, and where each is read first.
        elements: Arguments that are read element by element.
        loads: Arguments that elements are loaded from, and the number of indices that each takes.
        has_index: Whether the source uses an index.
        reductions: The reductions along axes, in order.
        assigned: The assigned names, in order.
        unread: Names whose last value no later statement reads.
    """

    def __init__(self, text: str, margin: int, inputs: Sequence[str], *, is_along: bool) -> None:
        self._text, self._margin, self._is_along = text, margin, is_along
        self._lines = text.split("\n")
        self._inputs = inputs
        self._count, self._made = 0, itertools.count()
        # The statements so far, of each open loop.
        self._blocks: list[list[nodes.Statement]] = [[]]
        # Names with a value, and names that a loop or branch has taken out of scope.
        self._known, self._gone = set[str](), set[str]()
        self._vectors, self._indices = dict[str, int](), dict[str, str]()
        # The condition of the branch in progress.
        self._condition: _Value | None = None
        # A statement that may be the result without a name.
        self._last: ast.stmt | None = None
        # Names that both branches of an if assign, and the names among them that a branch has assigned so
        # far.
        self._fresh, self._begun = set[str](), set[str]()
        self.reads, self.assigned = dict[str, Location](), dict[str, Location]()
        self.elements, self.loads = set[str](), dict[str, int]()
        self.unread: dict[str, None] = {}
        self.has_index: bool = False
        self.reductions: list[nodes.Reduce] = []
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

    def statements(self) -> tuple[nodes.Statement, ...]:
        body = self._tree().body
        if not body:
            raise ValueError("the expression is empty")
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            self._assign(_DEFAULT_OUTPUT, self._node(body[0].value, 0), body[0])
        else:
            self._last = body[-1]
            self._block(body)
        return tuple(self._blocks[0])

    def check_output(self, name: str) -> None:
        """Refuse a vector as a result, or a name that is out of scope after its loop."""
        location = self.assigned.get(name, (1, 0))
        if (count := self._vectors.get(name, 1)) > 1:
            assignments = ", ".join(
                f"{name}_{component} = {name}.{component}" for component in _COMPONENTS[:count]
            )
            self._refuse_at(f"{name} is a vector, and a result is a number: write {assignments}", location)
        if name in self._gone:
            self._refuse_at(f"{name!r} {_UNDEFINED_AFTER_LOOP}", location)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Expr() if self._is_along and statement is self._last:
                    self._assign(_DEFAULT_OUTPUT, self._node(statement.value, 0), statement)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, self._node(value, 0), statement)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=operator, value=value):
                    function = self._operator(operator, statement)
                    both = [self._name(target, 0), self._node(value, 0)]
                    self._assign(name, self._apply(function, both, self._location(statement)), statement)
                case ast.For():
                    self._for(statement)
                case ast.If():
                    self._if(statement)
                case ast.Break():
                    self._break(statement, is_last=statement is body[-1])
                case _:
                    usual = f"{label_of(statement)} is not allowed: write name = expression"
                    self._refuse(_REFUSED.get(type(statement), usual), statement)

    def _assign(self, name: str, value: _Value, node: ast.stmt) -> None:
        if name in FUNCTIONS or name in CONSTANTS:
            self._refuse(
                f"{name!r} is a function or number, and cannot be assigned: choose another name", node
            )
        if name in self._indices:
            self._refuse(
                f"{name!r} is the index of the loop, and cannot be assigned: choose another name", node
            )
        location, former_count = value[0].location, self._vectors.get(name, 1)
        is_known = name in {*self._known, *self.reads, *self._inputs}
        is_begun = is_known or name in self._fresh & self._begun
        if is_begun and former_count != len(value):
            self._refuse(f"{name!r} was {_form(former_count)}, and is {_form(len(value))} here", node)
        if self._condition is not None:
            if is_begun:
                old_value = (
                    self._read(name, location) if is_known else self._named(name, former_count, location)
                )
                value = self._apply("where", [self._condition, value, old_value], location)
            elif name not in self._fresh:
                advice = f"or give it one in the other branch, too, or write {name} = a if condition else b"
                self._refuse(f"{name!r} needs a value before: the condition may not hold; {advice}", node)
            self._begun.add(name)
        if len(value) > 1:
            self._vectors[name] = len(value)
        self._known.add(name)
        self._gone.discard(name)
        self.unread[name] = None
        self.assigned[name] = location
        self._emit(name, value)

    def _emit(self, name: str, value: _Value) -> _Value:
        """Assign a value, and return the names that read it."""
        names = self._named(name, len(value), value[0].location)
        self._blocks[-1] += [(target.name, part) for target, part in zip(names, value, strict=True)]
        return names

    def _hold(self, value: _Value) -> _Value:
        """Return a value that may be read several times, because it is computed once."""
        is_held = all(isinstance(component, (Name, nodes.Literal)) for component in value)
        return value if is_held else self._emit(f"%{next(self._made)}", value)

    def _if(self, statement: ast.If) -> None:
        """Take both branches, each under its condition: names that both assign need no value before."""
        test, outer = self._hold(self._scalar(statement.test, 0)), self._condition
        location, outer_fresh = self._location(statement), self._fresh
        defined_names = {*self._known, *self.reads, *self._inputs}
        fresh = (_assigned(statement.body) & _assigned(statement.orelse)) - defined_names
        self._begun -= fresh - outer_fresh
        self._fresh = outer_fresh | fresh
        for body, holds in (
            (statement.body, test),
            (statement.orelse, self._apply("logical_not", [test], location)),
        ):
            self._condition = self._hold(
                self._apply("logical_and", [outer, holds], location) if outer else holds
            )
            self._block(body)
            # A name that only one branch assigns is undefined elsewhere.
            local = self._known - defined_names
            self._gone |= local
            self._known -= local
        self._known |= fresh
        self._gone -= fresh
        self._condition, self._fresh = outer, outer_fresh

    def _break(self, statement: ast.Break, *, is_last: bool) -> None:
        if len(self._blocks) == 1:
            self._refuse("break is for loops", statement)
        if self._condition is None or not is_last:
            self._refuse("break is the last statement under a condition: if condition: break", statement)
        self._blocks[-1].append(nodes.Break(self._condition[0]))

    def _for(self, statement: ast.For) -> None:
        if self._condition is not None:
            self._refuse("a loop under a condition is not allowed: for k in range(n if c else 0)", statement)
        if statement.orelse:
            self._refuse("else of a loop is not allowed: write it after the loop", statement.orelse[0])
        defined_names = {*self._known, *self.reads, *self._inputs}
        with self._loop(statement.target, statement.iter, 0) as index:
            if index in defined_names:
                self._refuse(f"{index!r} has a value: the index of a loop needs a name of its own", statement)
            self._block(statement.body)
        # Names of vectors have a point.
        loop = self._blocks[-1][-1:]
        changed = dict.fromkeys(name.partition(".")[0] for name in nodes.assigned_in(loop) if name[0] != "%")
        for name in changed.keys() & self.loads.keys():
            self._refuse(f"the loop assigns {name!r}, and elements are loaded from it", statement)
        local = changed.keys() - defined_names - self.reads.keys()
        self._known -= local
        self._gone |= {index, *local}
        if not self.unread:
            # Only the loop itself reads the names that it assigns.
            self.unread.update((name, None) for name in changed if name not in local)

    @contextmanager
    def _loop(self, target: ast.expr, over: ast.expr, depth: int) -> Generator[str]:
        """Take the statements within as the body of a loop."""
        if not isinstance(target, ast.Name) or target.id in FUNCTIONS or target.id in CONSTANTS:
            self._refuse("a loop has one index, with a name of its own: for k in range(n)", target)
        if len(self._blocks) > _MOST_LOOPS:
            self._refuse(f"loops are nested in each other at most {_MOST_LOOPS} times", target)
        start, stop = self._range(over, depth)
        outer, index = self._indices, f"%{next(self._made)}"
        self._indices = outer | {target.id: index}
        self._blocks.append([])
        yield target.id
        self._indices = outer
        body = tuple(self._blocks.pop())
        self._blocks[-1].append(nodes.Loop(index, start, stop, body, self._location(target)))

    def _range(self, node: ast.expr, depth: int) -> list[Node]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "range":
            self._refuse("a loop is over a range only: for k in range(n)", node)
        if not 1 <= len(node.args) <= 2 or node.keywords:
            self._refuse("range takes one or two integers: range(n), range(first, stop)", node)
        stop = [self._scalar(argument, depth)[0] for argument in node.args]
        return [nodes.Literal(0, self._location(node)), *stop][-2:]

    def _reduced(self, node: ast.Call, reduce: str, over: ast.GeneratorExp, depth: int) -> _Value:
        """Write a reduction over a range as a loop."""
        location, name, conditions = self._location(node), f"%{next(self._made)}", list[_Value]()

        def add(generators: Sequence[ast.comprehension]) -> _Value:
            if generators:
                if generators[0].is_async:
                    self._refuse("'async for' is not allowed: for k in range(n)", generators[0].target)
                with self._loop(generators[0].target, generators[0].iter, depth):
                    conditions.extend(
                        self._hold(self._scalar(condition, depth)) for condition in generators[0].ifs
                    )
                    return add(generators[1:])
            is_truth = reduce in ("any", "all")
            value = self._scalar(over.elt, depth) if is_truth else self._node(over.elt, depth)
            accumulator = self._named(name, len(value), location)
            wide = self._apply("%wide", [value], location) if reduce in ("sum", "prod") else value
            combined = self._apply(COMBINED[reduce], [accumulator, wide], location)
            if conditions:
                holds = self._chain("logical_and", conditions, location)
                combined = self._apply("where", [holds, combined, accumulator], location)
            self._emit(name, combined)
            if is_truth:
                end = accumulator if reduce == "any" else self._apply("logical_not", [accumulator], location)
                self._blocks[-1].append(nodes.Break(end[0]))
            return accumulator

        accumulator = add(over.generators)
        first = (
            nodes.Literal(_FIRST[reduce], location) if reduce in _FIRST else Apply(f"%{reduce}", (), location)
        )
        loop = self._blocks[-1].pop()
        self._emit(name, (first,) * len(accumulator))
        self._blocks[-1].append(loop)
        return accumulator

    def _tree(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._text)
        except SyntaxError as error:
            location = error.lineno or 1, max((error.offset or 1) - 1, 0)
            if isinstance(error, IndentationError):
                # Python counts these columns in several ways.
                line = self._line(location[0])
                location = location[0], len(line) - len(line.lstrip())
            problem = f"{error.msg}{of_other_languages(self._line(location[0]))}"
            raise ValueError(message_at(self._text, problem, location, self._margin)) from None
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
            self._refuse(not_allowed(node), node)
        # Each link of a chain counts as one level of nesting.
        links = len(getattr(node, "values", ())) + len(getattr(node, "comparators", ()))
        return make(node, depth + 1 + links)

    def _scalar(self, node: ast.expr, depth: int) -> _Value:
        value = self._node(node, depth)
        if len(value) > 1:
            self._refuse("a vector is not a number here: take .x, length(...), all(...) or any(...)", node)
        return value

    def _constant(self, node: ast.Constant, _: int) -> _Value:
        return (nodes.Literal(self._number(node.value, node), self._location(node)),)

    def _name(self, node: ast.Name, _: int) -> _Value:
        name, location = node.id, self._location(node)
        if name in self._indices:
            return (Name(self._indices[name], location),)
        if name in FUNCTIONS:
            self._refuse(f"{name} is a function: write {name}(...)", node)
        if name in self._gone and name not in self._inputs:
            self._refuse(
                f"{name!r} {_UNDEFINED_AFTER_LOOP if self._condition is None else _UNDEFINED_AFTER_BRANCH}",
                node,
            )
        return (
            (nodes.Literal(CONSTANTS[name], location),) if name in CONSTANTS else self._read(name, location)
        )

    def _read(self, name: str, location: Location) -> _Value:
        self.unread.pop(name, None)
        if name not in self._known:
            if self._is_along and name == COUNT and name not in self._inputs:
                return (nodes.ElementCount(location),)
            self.reads[name] = min(location, self.reads.get(name, location))
            self.elements.add(name)
        return self._named(name, self._vectors.get(name, 1), location)

    @staticmethod
    def _named(name: str, count: int, location: Location) -> tuple[Name, ...]:
        """Return the names that read a number, or the components of a vector."""
        names = [f"{name}.{component}" for component in _COMPONENTS[:count]] if count > 1 else [name]
        return tuple(Name(component, location) for component in names)

    def _component(self, node: ast.Attribute, depth: int) -> _Value:
        value = self._node(node.value, depth)
        if len(value) == 1:
            self._refuse(not_allowed(node), node)
        names = [*_COMPONENTS[: len(value)]]
        if node.attr not in names:
            self._refuse(f"{_form(len(names))} has .{' .'.join(names)}, and no .{node.attr}", node)
        return (value[names.index(node.attr)],)

    def _unary(self, node: ast.UnaryOp, depth: int) -> _Value:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return (nodes.Literal(-self._number(node.operand.value, node), self._location(node)),)
        return self._call(node.op, [node.operand], node, depth)

    def _binary(self, node: ast.BinOp, depth: int) -> _Value:
        return self._call(node.op, [node.left, node.right], node, depth)

    def _logical(self, node: ast.BoolOp, depth: int) -> _Value:
        values = [self._node(value, depth) for value in node.values]
        return self._chain(OPERATORS[type(node.op).__name__], values, self._location(node))

    def _conditional(self, node: ast.IfExp, depth: int) -> _Value:
        items = [self._node(operand, depth) for operand in (node.test, node.body, node.orelse)]
        return self._apply("where", items, self._location(node))

    def _call(
        self, operator: ast.operator | ast.unaryop, items: list[ast.expr], node: ast.expr, depth: int
    ) -> _Value:
        function = self._operator(operator, node)
        return self._apply(function, [self._node(item, depth) for item in items], self._location(node))

    def _apply(self, function: str, values: Sequence[_Value], location: Location) -> _Value:
        """Call a function, of vectors for each component."""
        counts = sorted({1, *map(len, values)})
        if len(counts) > 2:
            self._refuse_at(f"{function} of {' and '.join(map(_form, counts[1:]))}", location)
        if len(counts) > 1:
            values = [self._hold(operand) * counts[1] if len(operand) == 1 else operand for operand in values]
        return tuple(Apply(function, arguments, location) for arguments in zip(*values, strict=True))

    def _operator(self, operator: ast.AST, node: ast.expr | ast.stmt) -> str:
        function = OPERATORS.get(type(operator).__name__)
        if function is None:
            self._refuse(f"the operator {not_allowed(operator)}", node)
        return function

    def _chain(self, function: str, items: Sequence[_Value], location: Location) -> _Value:
        return functools.reduce(lambda lhs, rhs: self._apply(function, (lhs, rhs), location), items)

    def _compare(self, node: ast.Compare, depth: int) -> _Value:
        items = [self._node(operand, depth) for operand in (node.left, *node.comparators)]
        # An operand between two comparisons is read twice.
        items[1:-1] = map(self._hold, items[1:-1])
        comparisons: list[_Value] = []
        for operator, lhs, rhs in zip(node.ops, items, items[1:], strict=False):
            comparisons.append(self._apply(self._operator(operator, node), (lhs, rhs), self._location(node)))
        # Python reads a < b < c as a < b and b < c, and so does this.
        return self._chain("logical_and", comparisons, self._location(node))

    def _function(self, node: ast.Call, depth: int) -> _Value:
        if not isinstance(node.func, ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            advice = f": write {name}(...)" if name in FUNCTIONS else similar(name)
            self._refuse(f"only functions of the table can be called, by their names{advice}", node)
        name = node.func.id
        if name == _INDEX:
            return self._index(node)
        function = FUNCTIONS.get(name)
        is_reduction = name in (REDUCTIONS if self._is_along else COMBINED) and len(node.args) == 1
        if function is None and not is_reduction and name not in _OF_VECTORS:
            advice = f"; write {name}imum(x, y)" if name in ("max", "min") and len(node.args) > 1 else ""
            advice = "; a range is for loops and reductions: for k in range(n)" if name == "range" else advice
            self._refuse(f"there is no function {name!r} in expressions{advice or similar(name)}", node)
        if node.keywords:
            self._refuse(f"{name} takes its arguments by their places only", node.keywords[0])
        if name in COMBINED and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp):
            return self._reduced(node, name, node.args[0], depth)
        arity = _OF_VECTORS.get(name, 1 if function is None else function.arity)
        items = [self._node(argument, depth) for argument in node.args]
        if len(items) != arity and name != "vector":
            self._refuse(f"{name} takes {arity} arguments, got {len(items)}", node)
        if is_reduction and self._is_along and len(items[0]) == 1:
            return self._along(name, items[0][0], node)
        if function is None:
            return self._of_vectors(name, items, node)
        return self._apply(name, items, self._location(node))

    def _along(self, name: str, value: Node, node: ast.Call) -> _Value:
        """Reduce a value along the axes of a call."""
        if len(self._blocks) > 1 or self._condition is not None:
            self._refuse(f"{name}(...) along axes is neither in a loop nor under a condition", node)
        reduction = nodes.Reduce(name, value, self._location(node))
        self.reductions.append(reduction)
        return self._emit(f"%{next(self._made)}", (reduction,))

    def _of_vectors(self, name: str, items: list[_Value], node: ast.Call) -> _Value:
        location, sizes = self._location(node), [len(item) for item in items]
        if name == "vector":
            if not 2 <= len(items) <= len(_COMPONENTS) or max(sizes) > 1:
                self._refuse("a vector has two to four numbers: vector(x, y, z)", node)
            return tuple(component for (component,) in items)
        if min(sizes) == 1:
            advice = f", or a range: {name}(x[k] for k in range(n))" if name in COMBINED else ""
            self._refuse(f"{name} takes vectors, such as vector(x, y){advice}", node)
        # For a function of one argument, both are this argument.
        a, b = self._hold(items[0]), self._hold(items[-1])
        if name in COMBINED:
            return self._chain(COMBINED[name], [(component,) for component in a], location)
        if name == "cross":
            if sizes != [3, 3]:
                self._refuse("cross takes two vectors of 3 numbers", node)
            # The first component is a.y * b.z - a.z * b.y, and the others follow by turns.
            a, c, b, d = ((*vector[n:], *vector[:n]) for vector in (a, b) for n in (1, 2))
            both = [self._apply("multiply", factors, location) for factors in ((a, d), (c, b))]
            return self._apply("subtract", both, location)
        products = self._apply("multiply", (a, b), location)
        dot = self._chain("add", [(product,) for product in products], location)
        if name == "dot":
            return dot
        length = self._apply("sqrt", [dot], location)
        return length if name == "length" else self._apply("divide", (a, length), location)

    def _number(self, value: object, node: ast.expr) -> complex:
        if not isinstance(value, (bool, int, float, complex)):
            words: dict[type, str] = {str: "a string", bytes: "a byte string", type(None): "'None'"}
            label = words.get(type(value), "'...'")
            self._refuse(f"{label} is not allowed in an expression; numbers are", node)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _MOST_INTEGER:
            self._refuse("an integer must have at most 64 bits", node)
        return value

    def _location(self, node: ast.expr | ast.stmt | ast.keyword) -> Location:
        # Python counts bytes.
        prefix = self._line(node.lineno).encode()[: node.col_offset]
        return node.lineno, len(prefix.decode(errors="replace"))

    def _line(self, number: int) -> str:
        return self._lines[number - 1] if number <= len(self._lines) else ""

    def _index(self, node: ast.Call) -> _Value:
        self.has_index = True
        match = re.fullmatch(r"i\((-?\d+)\)", ast.unparse(node))
        if match is None:
            self._refuse("i takes an axis of the result as a number that is written: i(0), i(-1)", node)
        axis = int(match[1])
        if not -_MOST_AXES <= axis < _MOST_AXES:
            self._refuse(f"there is no axis {axis}: an array has at most {_MOST_AXES} axes", node)
        return (nodes.Index(axis, self._location(node)),)

    def _load(self, node: ast.Subscript, depth: int) -> _Value:
        if not isinstance(node.value, ast.Name):
            self._refuse("only arguments have elements to load: write x[...]", node)
        name, items, location = node.value.id, node.slice, self._location(node)
        if name in FUNCTIONS or name in CONSTANTS or name in {*self._known, *self._indices}:
            self._refuse(f"{name!r} is not an argument: only arguments have elements to load", node)
        several = items.elts if isinstance(items, ast.Tuple) else [items]
        if self.loads.setdefault(name, len(several)) != len(several) or not several:
            self._refuse(f"{name!r} takes one index for each of its axes, always as many", node)
        self.reads[name] = min(location, self.reads.get(name, location))
        slice_position = next(
            (n for n, item in enumerate(several) if isinstance(item, ast.Slice)), len(several)
        )
        rest = [self._scalar(item, depth) for n, item in enumerate(several) if n != slice_position]
        if slice_position == len(several):
            return (nodes.ElementLoad(name, tuple(index for (index,) in rest), location),)
        bounds = re.fullmatch(r"(\d*):(\d+)", ast.unparse(several[slice_position]))
        components = range(int(bounds[1] or 0), int(bounds[2])) if bounds else range(0)
        if not 2 <= len(components) <= len(_COMPONENTS):
            advice = "one of two to four elements, written as numbers, is a vector: x[k, 0:3]"
            self._refuse(f"a slice (a:b) is not allowed here; {advice}", several[slice_position])
        held = [index for (index,) in map(self._hold, rest)]
        literals = [nodes.Literal(n, location) for n in components]
        return tuple(
            nodes.ElementLoad(name, (*held[:slice_position], literal, *held[slice_position:]), location)
            for literal in literals
        )

    def _refuse(self, message: str, node: ast.expr | ast.stmt | ast.keyword) -> NoReturn:
        self._refuse_at(message, self._location(node))

    def _refuse_at(self, message: str, location: Location) -> NoReturn:
        raise ValueError(message_at(self._text, message, location, self._margin))


def _form(count: int) -> str:
    return f"a vector of {count}" if count > 1 else "a number"


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements assign in any case."""
    names = set[str]()
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.If(body=first, orelse=second):
                names |= _assigned(first) & _assigned(second)
            case _:
                pass
    return names
