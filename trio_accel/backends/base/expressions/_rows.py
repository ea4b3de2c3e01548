"""Expressions and their types as texts, which specifications hold; and expressions of rows (D145)."""

from __future__ import annotations

import ast
import functools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from ..contract.dtypes import DType, Strs
from ..contract.ops import Reduce
from ._builder import Builder
from ._evaluate import scatter_program
from ._expression import CONSTANTS, FUNCTIONS, Expression
from ._parse import parse
from ._reduction import REDUCTIONS, WIDER, Reduction, TypedReduction, typed_reduction
from ._steps import ArgumentType, TypedExpression, Weak
from ._typing import typed
from ._unroll import unrolled

__all__ = [
    "COUNT", "SCALAR_BYTES", "WIDE", "Argument", "RowExpression", "SpecializedExpression",
    "SpecializedReduction", "SpecializedRows", "TypedRows", "found", "pack_scalars", "typed_rows",
    "unpack_scalars",
]  # fmt: skip

SCALAR_BYTES = 16
"""Bytes of each scalar: as many as the longest has."""

_FLOAT = struct.Struct("=d8x")
# First letter of a kind of argument in a text.
_ARRAY, _SCALAR, _WEAK = "[]", "", "python "


@attrs.frozen
class Argument:
    """The form in which an expression gets one argument.

    Attributes:
        kind: Its type.
        is_array: Whether it is an array; otherwise it is a number that is handed over with the launch.
    """

    kind: ArgumentType
    is_array: bool

    @property
    def dtype(self) -> DType:
        """The dtype that it comes in."""
        return self.kind.carrier if isinstance(self.kind, Weak) else self.kind

    def encode(self) -> str:
        """It as a text."""
        if isinstance(self.kind, Weak):
            return f"{_WEAK}{self.kind.value}"
        return f"{self.kind.value}{_ARRAY if self.is_array else _SCALAR}"

    @staticmethod
    @functools.cache
    def decode(text: str) -> Argument:
        """Decode a text of `encode`; there are three texts for each dtype at most."""
        if text.startswith(_WEAK):
            return Argument(Weak(text.removeprefix(_WEAK)), False)
        return Argument(DType(text.removesuffix(_ARRAY)), text.endswith(_ARRAY))


@attrs.frozen
class SpecializedExpression:
    """An expression for arguments of certain types.

    Attributes:
        expression: The expression.
        arguments: How it gets its inputs.
        dtypes: Types that the results are converted to; None for no conversion.
        is_checked: Whether an index outside of an array fails the operation.
    """

    expression: Expression
    arguments: tuple[Argument, ...]
    dtypes: tuple[DType | None, ...]
    is_checked: bool = False

    @functools.cached_property
    def typed(self) -> TypedExpression:
        """Its steps."""
        kinds = tuple(each.kind for each in self.arguments)
        return unrolled(typed(self.expression, kinds, self.dtypes, self.is_checked))

    def encode(self) -> str:
        """It as a text; what is equal has equal texts."""
        return _encoded(self.expression, self.arguments, self.dtypes, self.is_checked)

    @staticmethod
    @functools.lru_cache(1024)
    def decode(text: str) -> SpecializedExpression:
        """Decode a text of `encode`."""
        expression, kinds, names, is_checked = json.loads(text)
        arguments, dtypes = tuple(map(Argument.decode, kinds)), tuple(map(_dtype, names))
        return SpecializedExpression(_expression(expression), arguments, dtypes, is_checked)

    @staticmethod
    @functools.lru_cache(1024)
    def decode_scatter(text: str, reduce: Reduce) -> TypedExpression:
        """Decode a scatter, whose results are an element and a value, as a program that stores."""
        return scatter_program(SpecializedExpression.decode(text).typed, reduce)


@attrs.frozen
class SpecializedReduction:
    """A reduction for arguments of certain types.

    Attributes:
        reduction: The reduction.
        arguments: How it gets its inputs.
        dtype: Type that values are converted to before they are combined; None for NumPy's choice.
        result: Type that the result is converted to; None for no conversion.
    """

    reduction: Reduction
    arguments: tuple[Argument, ...]
    dtype: DType | None
    result: DType | None

    @functools.cached_property
    def typed(self) -> TypedReduction:
        """Its steps."""
        kinds = tuple(each.kind for each in self.arguments)
        return typed_reduction(self.reduction, kinds, self.dtype, self.result)

    def encode(self) -> str:
        """It as a text; what is equal has equal texts."""
        return _encoded(self.reduction, self.arguments, self.dtype, self.result)

    @staticmethod
    @functools.lru_cache(1024)
    def decode(text: str) -> SpecializedReduction:
        """Decode a text of `encode`."""
        (mapped, name, combine, identity, post), kinds, dtype, result = json.loads(text)
        combined, after = (None if part is None else _expression(part) for part in (combine, post))
        value = complex(*cast("list[float]", identity)) if isinstance(identity, list) else identity
        reduction = Reduction(_expression(mapped), name, combined, value, after)
        arguments = tuple(map(Argument.decode, kinds))
        return SpecializedReduction(reduction, arguments, _dtype(dtype), _dtype(result))


def _encoded(*parts: object) -> str:
    return json.dumps(parts, default=_plain)


def _plain(part: object) -> object:
    """Return a part of a text as what JSON has."""
    match part:
        case Expression():
            return part.text, part.inputs, part.outputs
        case Reduction():
            return part.map, part.name, part.combine, part.identity, part.post
        case RowExpression():
            return part.text
        case Argument():
            return part.encode()
        case DType():
            return part.value
        case complex():
            return part.real, part.imag
        case _:
            raise TypeError(f"a text of an expression has no {part!r}")


def _expression(plain: list[Any]) -> Expression:
    text, inputs, outputs = plain
    return parse(text, tuple(inputs), tuple(outputs))


def _dtype(name: str | None) -> DType | None:
    return None if name is None else DType(name)


def pack_scalars(values: Sequence[complex], dtypes: Sequence[DType]) -> bytes:
    """Return the numbers as bytes, each of its own type."""
    return b"".join([_packed(value, dtype) for value, dtype in zip(values, dtypes, strict=True)])


def _packed(value: complex, dtype: DType) -> bytes:
    if dtype is DType.float64:
        return _FLOAT.pack(value)
    return np.array(value, dtype.dtype).tobytes().ljust(SCALAR_BYTES, b"\0")


def unpack_scalars(data: bytes, dtypes: Sequence[DType]) -> list[Any]:
    """Return the numbers that `pack_scalars` made bytes of, as NumPy's."""
    return [
        np.frombuffer(data, dtype.dtype, 1, number * SCALAR_BYTES)[0] for number, dtype in enumerate(dtypes)
    ]


COUNT = "n"
"""Name of the count of elements that are reduced, in the statements."""

_WHOLE = {dtype.value: DType.float64 for dtype in DType if dtype.kind in ("bool", "int", "uint")}

# The keys are names, because the hash of a low-precision dtype imports ml_dtypes.
WIDE: Mapping[str, Mapping[str, DType]] = {
    "float32": {**_WHOLE, "float16": DType.float32, "bfloat16": DType.float32},
    "float64": {**_WHOLE, **WIDER},
}
"""By the least precision that is asked for: the dtypes that arrays are converted to."""

_RESULT = "out"


@attrs.frozen
class RowExpression:
    """Parsed statements, cut where something is reduced.

    Attributes:
        text: The statements.
        inputs: Names of the arguments, in order.
        stages: The reductions, in order. What one finds is an argument of those behind it, and of `last`,
            named by `found`.
        last: Makes the result.
    """

    text: str
    inputs: Strs
    # These follow from the text.
    stages: tuple[Reduction, ...] = attrs.field(eq=False)
    last: Expression = attrs.field(eq=False)

    @staticmethod
    @functools.lru_cache(1024)
    def parse(text: str, inputs: Strs) -> RowExpression:
        """Parse statements such as ``"e = exp(x - max(x)); y = e / sum(e)"``.

        Args:
            text: Statements as `parse` takes them, with calls of `REDUCTIONS`; the result is what the last
                one assigns. The count of elements that are reduced is `COUNT`.
            inputs: Names of the arguments, in order; `COUNT` is none of them.

        Raises:
            ValueError: Something that is not allowed in an expression.
        """
        cutter = _Cutter()
        stages = tuple(_staged(*stage) for stage in cutter.cut(text))
        last = parse(_pruned(cutter.statements, _RESULT), None, (_RESULT,))
        read = {name for stage in stages for name in stage.map.inputs} | set(last.inputs)
        foreign = read - {*inputs, COUNT} - {found(number) for number in range(len(stages))}
        if foreign:
            raise ValueError(f"the expression of rows reads {', '.join(sorted(foreign))}: {text}")
        return RowExpression(text, inputs, stages, last)

    @property
    def elements(self) -> frozenset[str]:
        """The arguments that are read element by element: all, as in `Expression`."""
        return frozenset(self.inputs)

    @property
    def loads(self) -> Mapping[str, int]:
        """The arguments that elements are loaded from: none, as in `Expression`."""
        return {}

    def widened(self, dtypes: Mapping[str, DType]) -> RowExpression:
        """Return the same with arguments of these names converted to dtypes first."""
        if not dtypes:
            return self
        casts = "; ".join(f"{name} = {dtype}({name})" for name, dtype in dtypes.items())
        return RowExpression.parse(f"{casts}\n{self.text}", self.inputs)


def found(stage: int) -> str:
    """Return the name of what a reduction has found."""
    return f"found_{stage}"


def _staged(name: str, text: str) -> Reduction:
    mapped = parse(text, None, (_RESULT,))
    return Reduction.parse(text, name, inputs=mapped.inputs)


class _Cutter(ast.NodeTransformer):
    """Takes reductions out of statements, from the inside outwards."""

    def __init__(self) -> None:
        self.statements: list[ast.stmt] = []
        self._stages: list[tuple[str, str]] = []

    def cut(self, text: str) -> Sequence[tuple[str, str]]:
        """Return the name and the statements of each reduction; what is left is in `statements`."""
        for statement in ast.parse(text).body:
            cut = self.visit(statement)
            if isinstance(cut, ast.Expr):
                cut = _assign(_RESULT, cut.value)
            self.statements.append(cut)
        last = self.statements[-1]
        if isinstance(last, ast.Assign) and isinstance(last.targets[0], ast.Name):
            self.statements.append(_assign(_RESULT, ast.Name(last.targets[0].id)))
        return self._stages

    def visit_Call(self, node: ast.Call) -> ast.expr:  # the visitor's name
        self.generic_visit(node)
        is_range = ast.GeneratorExp in map(type, node.args)
        if not isinstance(node.func, ast.Name) or node.func.id not in REDUCTIONS or is_range:
            return node
        if len(node.args) != 1 or node.keywords:
            raise ValueError(f"{node.func.id} of one value reduces: {ast.unparse(node)}")
        value = _assign(_RESULT, node.args[0])
        self._stages.append((node.func.id, _pruned([*self.statements, value], _RESULT)))
        return ast.Name(found(len(self._stages) - 1))


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.fix_missing_locations(ast.Assign([ast.Name(name)], value, lineno=1))


def _pruned(statements: Sequence[ast.stmt], result: str) -> str:
    """Return the text of the statements that a name depends on."""
    needed, kept = {result}, list[str]()
    for statement in reversed(statements):
        written, read = _names(statement)
        if written in needed:
            kept.append(ast.unparse(statement))
            needed = (needed - {written}) | read
    return "\n".join(reversed(kept))


def _names(statement: ast.stmt) -> tuple[str, set[str]]:
    """Return what a statement assigns, and what it reads."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            return name, read - set(FUNCTIONS) - set(CONSTANTS)
        case _:
            raise ValueError(f"a statement of rows assigns to one name: {ast.unparse(statement)}")


@attrs.frozen
class TypedRows:
    """An expression of rows for arguments of certain types.

    Attributes:
        rows: The expression.
        stages: Its reductions.
        last: Makes the result, of arguments and of what was found.
    """

    rows: RowExpression
    stages: tuple[TypedReduction, ...]
    last: TypedExpression

    @property
    def dtype(self) -> DType:
        """Dtype of the result."""
        return self.last.dtypes[0]

    @functools.cached_property
    def program(self) -> TypedExpression:
        """The expression as one list of steps, in which equal steps are made once."""
        builder = Builder(self.rows.inputs)
        for number, stage in enumerate(self.stages):
            builder.values[found(number)] = stage.added_to(builder)
        numbers = builder.copied(self.last, self.rows.last.inputs, builder.read)
        return builder.finish(numbers[self.last.outputs[0]], tuple(range(len(self.rows.inputs))))

    @property
    def parts(self) -> list[tuple[TypedExpression, Strs]]:
        """Its expressions, and what each of them reads."""
        stages = [(stage.map, stage.reduction.map.inputs) for stage in self.stages]
        return [*stages, (self.last, self.rows.last.inputs)]


def typed_rows(
    rows: RowExpression, arguments: Sequence[ArgumentType], result: DType | None = None
) -> TypedRows:
    """Find the types of an expression of rows.

    Args:
        rows: The expression.
        arguments: Types of its inputs.
        result: Type that the result is converted to; None for no conversion.

    Raises:
        TypeError, NotSupportedError, ValueError: See `typed` and `typed_reduction`.
    """
    kinds: dict[str, ArgumentType] = {**dict(zip(rows.inputs, arguments, strict=True)), COUNT: Weak.int}
    stages: list[TypedReduction] = []
    for number, stage in enumerate(rows.stages):
        stages.append(typed_reduction(stage, tuple(kinds[name] for name in stage.map.inputs)))
        kinds[found(number)] = stages[-1].dtype
    last = unrolled(typed(rows.last, tuple(kinds[name] for name in rows.last.inputs), (result,)))
    return TypedRows(rows, tuple(stages), last)


@attrs.frozen
class SpecializedRows:
    """An expression of rows for arguments of certain types.

    Attributes:
        rows: The expression.
        arguments: How it gets its inputs; behind the last one, it gets the count of elements.
        result: Type that the result is converted to.
        usual: What makes the same in less time where no step of it over- or underflows; None for nothing.
    """

    rows: RowExpression
    arguments: tuple[Argument, ...]
    result: DType
    usual: RowExpression | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the result is of the shape of the arrays, as the last step reads their elements."""
        pairs = zip(self.rows.inputs, self.arguments, strict=True)
        return any(argument.is_array and name in self.rows.last.inputs for name, argument in pairs)

    @property
    def takes_nothing(self) -> bool:
        """Whether every reduction has a result of no elements."""
        return all(stage.takes_nothing for stage in self.rows.stages)

    @functools.cached_property
    def typed(self) -> TypedRows:
        """Its steps."""
        return typed_rows(self.rows, [argument.kind for argument in self.arguments], self.result)

    @functools.cached_property
    def typed_usual(self) -> TypedRows | None:
        """The steps of `usual`."""
        if self.usual is None:
            return None
        return typed_rows(self.usual, [argument.kind for argument in self.arguments], self.result)

    def encode(self) -> str:
        """It as a text; what is equal has equal texts."""
        return _encoded(self.rows, self.rows.inputs, self.arguments, self.result, self.usual)

    @staticmethod
    @functools.lru_cache(1024)
    def decode(text: str) -> SpecializedRows:
        """Decode a text of `encode`."""
        statements, inputs, kinds, result, other = json.loads(text)
        rows = RowExpression.parse(statements, tuple(inputs))
        usual = None if other is None else RowExpression.parse(other, tuple(inputs))
        return SpecializedRows(rows, tuple(map(Argument.decode, kinds)), DType(result), usual)
