"""Expressions that are computed for each element, and such as change elements of an array in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, get_args

import attrs
import numpy as np

from ..backends.base import DType, DTypeLike, Ints, Strs
from ..backends.base.contract.ops import ArraySpec, ElementwiseSpec, Reduce, ScatterSpec
from ..backends.base.expressions import (
    WIDE,
    Argument,
    ArgumentType,
    Expression,
    SpecializedExpression,
    TypedExpression,
    Weak,
    parse,
    typed,
)
from ..devices import AccelRef, Call, Function, Operation, Planned, Planner
from ..devices.operations._plan_source import refuse_value, written
from ._arguments import (
    ARRAYS,
    ExpressionArgument,
    Taken,
    bind,
    check_out,
    check_promotion,
    check_truths,
    extents_of,
    find_types,
    result_dtype,
    served_by,
    take,
)

__all__ = [
    "ComputeElementwise", "ComputeScatter", "Elementwise", "KnownExpression", "Scatter",
]  # fmt: skip

ReplyT = TypeVar("ReplyT")

_RESERVED = ("out", "shape")
_NO_SLOPES: Mapping[str, str] = MappingProxyType({})
# The gradient of the result, in the text of a slope.
_GRADIENT = "g"
_OTHERWISE = "; or take jit.elementwise, which promotes as NumPy does"


@attrs.frozen
class KnownExpression:
    """Facts that are found once for arguments of certain types.

    Attributes:
        expression: The expression and its types, as specifications hold them.
        dtypes: Dtypes of the results.
        typed: Its steps.
        has_places: Whether there are indices or loads, whose places depend on the shapes.
    """

    expression: str
    dtypes: tuple[DType, ...]
    typed: TypedExpression
    has_places: bool


class Elementwise(Generic[ReplyT]):
    """An expression over arrays, computed for each element: ``Elementwise[AccelRef]("a * x", ...)``.

    On CUDA it is compiled at its first call with certain dtypes and layouts; on the CPU, NumPy computes it.

    Args:
        text: Assignments, or one expression.
        inputs: Names of the arguments, in order; None for the order in which the text reads them.
        outputs: Names of the results; a call then returns a tuple. None for one result.
        dtypes: Types that the results are converted to: one for all, or by their names.
        operation: Name of the operation, such as ``"jit.saxpy"``.
        library: Import path of the library actor that serves it.
        promoted: Names of the inputs that the array API standard promotes to one dtype. They must be of one
            kind: truth values, whole numbers, or floating and complex ones; and uint64 goes with no signed
            dtype. Empty for NumPy's promotion, which takes all.
        truths: Names of the inputs that must be truth values.
        is_checked: Whether an index outside of an array that elements are loaded from fails the operation,
            with an `OutOfRangeError`. Otherwise it is the nearest one inside. A loop fails by what its
            iterations load; an `if` computes both sides, and so checks both.
        precision: The least that arrays are computed in, ``"float32"`` or ``"float64"``, as of `Rowwise`.
            Each result is rounded once, to the dtype that it would have without. Whole numbers become
            float64. The text has assignments then. What elements are loaded from stays as it is. None for the
            dtypes of the arguments.
        slopes: By the name of an input the text of its gradient, which reads `g`, the gradient of the result,
            the inputs, and the result by its name. Other inputs have the derived gradient.

    Raises:
        ValueError: The expression has something that is not allowed; the message shows where. Or results
            are not named by `outputs`.
        TypeError: There is no such dtype.

    Attributes:
        operation: Name of the operation.
        precision: The least that arrays are computed in.
        dtypes: Types that the results are converted to; None for no conversion.
        slopes: The texts of gradients, by the names of inputs.
    """

    __slots__ = (
        "_asked", "_expression", "_is_checked", "_is_single", "_known", "_message", "_promoted", "_told",
        "_truths", "_wide", "dtypes", "operation", "precision", "slopes",
    )  # fmt: skip

    def __init__(
        self,
        text: str,
        *,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | str | None = None,
        dtypes: DTypeLike | Mapping[str, DTypeLike] | None = None,
        operation: str,
        library: str = ARRAYS,
        promoted: Sequence[str] = (),
        truths: Sequence[str] = (),
        is_checked: bool = False,
        precision: str | None = None,
        slopes: Mapping[str, str] | None = None,
    ) -> None:
        is_single = outputs is None or isinstance(outputs, str)
        chosen = (outputs,) if isinstance(outputs, str) else None if outputs is None else tuple(outputs)
        self._expression = expression = parse(text, None if inputs is None else tuple(inputs), chosen)
        if chosen is None and len(expression.outputs) > 1:
            names = ", ".join(map(repr, expression.outputs))
            raise ValueError(
                f"the expression has several results: name those that you want, outputs=({names})"
            )
        reserved = [name for name in expression.inputs if name in _RESERVED]
        if reserved:
            raise ValueError(f"an input cannot have the name {reserved[0]}: that is an argument of each call")
        found = _dtypes(expression, dtypes)
        self.dtypes: tuple[DType | None, ...]
        self.dtypes = tuple(found.get(output) for output in expression.outputs)
        self.slopes: Mapping[str, str] = _checked_slopes(expression, slopes)
        self._is_single = is_single
        # The names of the results in errors: the text has a name of its own for a single one.
        self._told = ("out",) if is_single else expression.outputs
        self._is_checked = is_checked
        self._message = served_by(ComputeElementwise, library)
        self._promoted, self._truths = tuple(promoted), tuple(truths)
        self._wide: Mapping[str, DType] = {} if precision is None else WIDE[precision]
        self.operation: str = operation
        self._asked = Function(operation, self.compute)
        self.precision: str | None = precision
        # The key is the types of the arguments, and of results that are given.
        self._known = functools.lru_cache(256)(self._find_types)

    def __repr__(self) -> str:
        return f"<Elementwise {self.operation}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}>"

    @property
    def text(self) -> str:
        """The expression, as it was written."""
        return self._expression.text

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its arguments, in order."""
        return self._expression.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its results, in order."""
        return self._expression.outputs

    def typed(self, kinds: tuple[ArgumentType, ...]) -> TypedExpression:
        """Return its steps for arguments of certain types, widened as `precision` says."""
        expression, _ = self._widened(dict(zip(self.inputs, kinds, strict=True)))
        return typed(expression, kinds, self.dtypes, self._is_checked)

    def is_loaded(self, name: str) -> bool:
        """Tell whether elements of an input are loaded by indices."""
        return name in self._expression.loads

    def compute(
        self,
        *arguments: ExpressionArgument,
        out: AccelRef | Sequence[AccelRef | None] | None = None,
        shape: int | Sequence[int] | None = None,
        **named: ExpressionArgument,
    ) -> ComputeElementwise[ReplyT]:
        """Make the message that computes it: ``await device.ask(expression.compute(...))``.

        Raises:
            TypeError: There are too few or too many arguments, or one that the expression does not have; or
                `shape` is no shape.
            ValueError: `shape` has a negative extent.
        """
        given = bind(self.operation, self.inputs, arguments, named, options=_RESERVED)
        if out is None or isinstance(out, AccelRef):
            outs: tuple[AccelRef | None, ...] = (out,) * len(self.outputs) if out is None else (out,)
        else:
            # One that is no sequence is refused itself.
            outs = tuple(out) if isinstance(cast("object", out), (tuple, list)) else (cast("Any", out),)
            for each in outs:
                check_out(self.operation, each)
        if len(outs) != len(self.outputs):
            raise TypeError(
                f"{self.operation}: out must name {len(self.outputs)} arrays, for {', '.join(self.outputs)}; "
                f"got {len(outs)}"
            )
        extents = None if shape is None else extents_of(self.operation, shape)
        return self._message(self, given, outs, extents)

    def __call__(
        self,
        *arguments: ExpressionArgument,
        out: AccelRef | Sequence[AccelRef | None] | None = None,
        shape: int | Sequence[int] | None = None,
        **named: ExpressionArgument,
    ) -> Call[ReplyT]:
        """Compute it on the device of its arrays, once it is awaited.

        Args:
            *arguments: Arrays and numbers, in the order of `inputs`; arrays broadcast. A Python number takes
                the dtype of the arrays that it meets, as in NumPy.
            out: Array to write to, of the broadcast shape and any strides; or a sequence of these, one for
                each result, with None for a new one. It may be an argument that is not broadcast: then that
                is changed in place.
            shape: Shape of the results; by default the one that the arrays broadcast to which are read
                element by element, and where there are none, that of the first of `out`.
            **named: Arguments by their names.

        Returns:
            The result; where outputs were named, the results.

        Raises:
            TypeError: A wrong argument, or a function has no such dtypes; the message shows where.
            ValueError: Shapes that do not broadcast, a number that a dtype cannot hold, `out` that shares
                memory with an argument and is not the same array, an index along an axis that the result has
                not, or an array without elements to load.
            NotSupportedError: float8.
        """
        if out is not None or shape is not None:
            named = {**named, "out": out, "shape": shape}  # type: ignore[dict-item]  # they are named, too
        return Call(self._asked, arguments, named or None)

    def plan(
        self,
        planner: Planner,
        arguments: Sequence[ExpressionArgument],
        out: Sequence[AccelRef | None],
        shape: tuple[int, ...] | None = None,
    ) -> Planned[ReplyT]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        first = out[0]
        taken = take(planner, self._expression, arguments, shape, () if first is None else first.shape)
        known = self.known_of(planner.name, taken, out)
        results = [
            written(planner, name, each, (taken.shape, dtype))[0]
            for name, dtype, each in zip(self._told, known.dtypes, out, strict=True)
        ]
        for number, given in enumerate(out):
            if given is not None:
                self._check_apart(planner, number, results, taken)
        spec = ElementwiseSpec(
            known.expression,
            taken.arrays,
            taken.loaded,
            tuple([result.spec for result in results]),
            taken.scalars,
        )
        reply: Any = results[0] if self._is_single else tuple(results)
        return Planned(spec, cast("ReplyT", reply))

    def take(
        self,
        planner: Planner,
        arguments: Sequence[ExpressionArgument | ArraySpec],
        shape: tuple[int, ...] | None = None,
        otherwise: tuple[int, ...] = (),
    ) -> Taken:
        """Take the arguments of a call; see `take`."""
        return take(planner, self._expression, arguments, shape, otherwise)

    def known_of(
        self, operation: str, taken: Taken, out: Sequence[AccelRef | ArraySpec | None]
    ) -> KnownExpression:
        """Find the types for arguments, and for results that are given.

        Raises:
            TypeError, ValueError, NotSupportedError: See `Elementwise.__call__`.
        """
        dtypes = [None if each is None else each.dtype.value for each in out]
        known = self._known(taken.signature, *dtypes)
        taken.check_held(operation, known.typed)
        if known.has_places:
            taken.check_places(operation, known.typed.axes)
        return known

    def _find_types(self, signature: Strs, *out: str | None) -> KnownExpression:
        operation, arguments = self.operation, tuple(map(Argument.decode, signature))
        given = dict(zip(self.inputs, arguments, strict=True))
        kinds = {name: each.kind for name, each in given.items()}
        check_promotion(operation, {name: kinds[name] for name in self._promoted}, _OTHERWISE)
        check_truths(operation, {name: kinds[name] for name in self._truths})
        expression, casts = self._widened(kinds)
        # Whole numbers are floating where they are widened: differences of unsigned ones would wrap around.
        plain = [
            attrs.evolve(each, kind=casts[name]) if name in casts and not each.dtype.is_inexact else each
            for name, each in given.items()
        ]

        def of(arguments: tuple[Argument, ...]) -> TypedExpression:
            return SpecializedExpression(self._expression, arguments, self.dtypes, self._is_checked).typed

        found = find_types(operation, of, given, plain).dtypes
        dtypes = tuple(
            result_dtype(operation, name, dtype, declared, None if each is None else DType(each))
            for name, dtype, declared, each in zip(self._told, found, self.dtypes, out, strict=True)
        )
        if casts:
            dtypes = tuple(dtype or plain for dtype, plain in zip(dtypes, found, strict=True))
        specialized = SpecializedExpression(expression, arguments, dtypes, self._is_checked)
        typed = specialized.typed
        has_places = bool(typed.axes or typed.loads)
        return KnownExpression(specialized.encode(), typed.dtypes, typed, has_places)

    def _widened(self, kinds: Mapping[str, ArgumentType]) -> tuple[Expression, dict[str, DType]]:
        """Return the expression with arrays converted first, and what they are converted to."""
        elements = self._expression.elements - self._expression.loads.keys()
        casts = {
            name: self._wide[kind.value]
            for name, kind in kinds.items()
            if name in elements and isinstance(kind, DType) and kind.value in self._wide
        }
        if not casts:
            return self._expression, {}
        # A loop begins a line.
        text = "\n".join([*[f"{name} = {dtype}({name})" for name, dtype in casts.items()], self.text])
        return parse(text, self.inputs, self.outputs), casts

    def _check_apart(self, planner: Planner, number: int, results: Sequence[AccelRef], taken: Taken) -> None:
        """Refuse a result over elements of an argument that are read for other elements of the result."""
        name, written = self._told[number], results[number].spec
        if not (number or taken.loaded or written.block in [array.block for array in taken.lying]):
            return
        others = {
            argument: array
            for argument, array in zip(taken.array_names, taken.lying, strict=True)
            if array != written
        }
        # Elements are loaded in any order.
        others |= zip(taken.loaded_names, taken.loaded, strict=True)
        others |= {
            output: result.spec
            for output, result in zip(self.outputs[:number], results, strict=False)
            if output not in others
        }
        planner.distinct(name, written, **others)


@attrs.frozen(eq=False)
class ComputeElementwise(Operation[Any, ReplyT]):
    """One computation of an expression; see `Elementwise.compute`, which makes one.

    Attributes:
        expression: The expression.
        arguments: One for each of its inputs.
        out: Arrays to write to, one for each result; None for a new one.
        shape: Shape of the results; None for that of the arguments.
    """

    expression: Elementwise[ReplyT]
    arguments: tuple[ExpressionArgument, ...]
    out: tuple[AccelRef | None, ...]
    shape: tuple[int, ...] | None = None

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.expression.operation

    def plan(self, planner: Planner) -> Planned[ReplyT]:
        """Find the types, and name the results."""
        return self.expression.plan(planner, self.arguments, self.out, self.shape)


def _dtypes(expression: Expression, dtypes: DTypeLike | Mapping[str, DTypeLike] | None) -> dict[str, DType]:
    """Find the types that the results are converted to."""
    if dtypes is None:
        return {}
    if not isinstance(dtypes, Mapping):
        return dict.fromkeys(expression.outputs, DType.of(dtypes))
    unknown = [name for name in dtypes if name not in expression.outputs]
    if unknown:
        raise ValueError(
            f"dtypes: {', '.join(unknown)} is no result; there are {', '.join(expression.outputs)}"
        )
    return {name: DType.of(dtype) for name, dtype in dtypes.items()}


def _checked_slopes(expression: Expression, slopes: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the texts of gradients.

    Raises:
        TypeError: `slopes` is not a dict of texts.
        ValueError: A name of no input, an input with a name that slopes have, several results, or a text
            that is not allowed.
    """
    if slopes is None:
        return _NO_SLOPES
    if not isinstance(cast("object", slopes), Mapping):
        raise TypeError(f"slopes must be a dict of texts by the names of inputs, got {slopes!r}")
    if len(expression.outputs) > 1:
        raise ValueError(f"slopes need an expression with one result, got {', '.join(expression.outputs)}")
    if _GRADIENT in expression.inputs:
        raise ValueError(f"slopes: rename the input {_GRADIENT}, because slopes call the gradient so")
    known = (_GRADIENT, *expression.inputs, *expression.outputs)
    for name, text in slopes.items():
        if name not in expression.inputs or name in expression.loads:
            read = ", ".join(one for one in expression.inputs if one not in expression.loads)
            raise ValueError(f"slopes: {name!r} is not an input that is read element by element: {read}")
        try:
            found = parse(text)
        except (TypeError, ValueError) as error:
            raise type(error)(f"slopes[{name!r}]: {error}") from None
        unknown = [one for one in found.inputs if one not in known]
        if unknown or len(found.outputs) > 1:
            told = f"reads {', '.join(unknown)}" if unknown else "has several results"
            raise ValueError(f"slopes[{name!r}] {told}; it may read {', '.join(known)}, and has one result")
    return dict(slopes)


_RANKS = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


class Scatter:
    """Elements of an array, changed in place: ``Scatter("x[i(0), indices]", "add", ...)``.

    Args:
        place: The element that a value is combined with: a load from the first input. An index outside of
            the array fails the operation with an `OutOfRangeError`.
        reduce: How the value is combined with it.
        inputs: Names of the array and of the indices, in order. The values come last.
        body: Statements before these, which assign names that `place` and `value` read.
        value: The value, an expression of the inputs and these names; None for values that are the last
            argument.
        operation: Name of the operation, such as ``"arrays.put"``.
        library: Import path of the library actor that serves it.

    Attributes:
        operation: Name of the operation.
    """

    __slots__ = ("_asked", "_expression", "_has_values", "_known", "_message", "_reduce", "operation")

    def __init__(
        self,
        place: str,
        reduce: Reduce,
        *,
        inputs: Sequence[str],
        operation: str,
        library: str = ARRAYS,
        body: str = "",
        value: str | None = None,
    ) -> None:
        if reduce not in get_args(Reduce):
            refuse_value(operation, "reduce", get_args(Reduce), reduce)
        outputs = "place", "value"
        text = f"{body}\nplace = {place}\nvalue = {value or 'values'}"
        names = tuple(inputs) if value is not None else (*inputs, "values")
        self._expression = parse(text, names, outputs)
        self._has_values = value is None
        self._reduce: Reduce = reduce
        self._message = served_by(ComputeScatter, library)
        self.operation: str = operation
        self._asked = Function(operation, self._compute)
        # The key is the types of the arguments.
        self._known = functools.cache(self._find_types)

    def __call__(self, x: AccelRef, *arguments: ExpressionArgument, shape: Ints) -> Call[AccelRef]:
        """Combine values with elements of an array, on its device, once it is awaited.

        Args:
            x: The array.
            *arguments: Arrays of indices, and then the values, which broadcast to a shape.
            shape: That shape.

        Returns:
            The array.

        Raises:
            TypeError: The values do not become elements of the array, or are not to be combined so.
            ValueError: Shapes that do not broadcast, or memory that the array shares with another argument.
            OutOfRangeError: An index is outside. The array is damaged then.
        """
        return Call(self._asked, (x, *arguments), {"shape": shape})

    def _compute(self, *arguments: ExpressionArgument, shape: Ints) -> ComputeScatter:
        return self._message(self, arguments, shape)

    def plan(self, planner: Planner, message: ComputeScatter) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        x: Any = message.arguments[0]
        planner.update(self._expression.inputs[0], x)
        # Run again, it puts the same to the same places, if nothing that it reads lies beside these.
        others = [one.block for one in message.arguments[1:] if isinstance(one, AccelRef)]
        planner.is_overwriting = self._reduce in ("set", "min", "max") and x.block not in others
        taken = take(planner, self._expression, message.arguments, message.shape)
        text, typed = self._known(taken.signature)
        taken.check_held(planner.name, typed)
        taken.check_places(planner.name, typed.axes)
        out = taken.loaded[0]
        planner.distinct(taken.loaded_names[0], out, **dict(zip(taken.array_names, taken.lying, strict=True)))
        return Planned(ScatterSpec(text, self._reduce, taken.arrays, out, taken.scalars), x)

    def _find_types(self, signature: Strs) -> tuple[str, TypedExpression]:
        operation, arguments = self.operation, tuple(map(Argument.decode, signature))
        dtype, kind = arguments[0].dtype, arguments[-1].kind
        if self._has_values and not _becomes(kind, dtype):
            told = f"a Python {kind.value}" if isinstance(kind, Weak) else f"of {kind}"
            how = f"np.{dtype}(...)" if isinstance(kind, Weak) else f'await values.cast("{dtype}")'
            raise TypeError(
                f"{operation}: values is {told}, which does not become {dtype} of x; convert it: {how}"
            )
        if self._reduce in ("min", "max") and dtype.kind == "complex":
            raise TypeError(f"{operation}: reduce={self._reduce!r}: {dtype} has no order")
        given = dict(zip(self._expression.inputs, arguments, strict=True))
        specialized = SpecializedExpression(self._expression, arguments, (None, dtype), is_checked=True)
        typed = find_types(operation, lambda each: attrs.evolve(specialized, arguments=each).typed, given)
        if self._has_values and kind is Weak.int and dtype.kind in ("int", "uint"):
            # A result is converted as an array is, which would wrap around.
            last = len(arguments) - 1
            [step] = [
                n for n, one in enumerate(typed.steps) if (one.function, one.value) == ("argument", last)
            ]
            typed = attrs.evolve(typed, bounds=(*typed.bounds, (step, dtype)))
        return specialized.encode(), typed


@attrs.frozen(eq=False)
class ComputeScatter(Operation[Any, AccelRef]):
    """One call of a `Scatter`.

    Attributes:
        scatter: It.
        arguments: The array, the indices, and the values.
        shape: The shape of the values.
    """

    scatter: Scatter
    arguments: tuple[ExpressionArgument, ...]
    shape: Ints

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.scatter.operation

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find types and places."""
        return self.scatter.plan(planner, self)


def _becomes(kind: ArgumentType, dtype: DType) -> bool:
    """Tell whether values become elements without loss of their kind."""
    if isinstance(kind, Weak):
        return _RANKS[kind.value] <= _RANKS[dtype.kind]
    return bool(np.can_cast(kind.dtype, dtype.dtype, "same_kind"))
