"""Expressions as operations: one class finds the types, the shapes and the messages of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import attrs

from ..backends.base import DType, DTypeLike, Strs, element
from ..backends.base import expressions as base
from ..backends.base.contract.ops import ArraySpec, ExpressionSpec
from ..backends.base.expressions import (
    WIDE,
    Argument,
    ArgumentType,
    EncodedProgram,
    TypedExpression,
    encode_program,
    parse,
    typed,
    unrolled,
)
from ..devices import AccelRef, ArrayFunction, Call, Operation, Planned, Planner
from ..devices.operations._plan_source import written
from ._arguments import (
    ARRAYS,
    CallArguments,
    ExpressionArgument,
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

__all__ = ["Compute", "Elementwise", "Expression", "KnownExpression"]

ReplyT = TypeVar("ReplyT")

_RESERVED = ("out", "shape")
_NO_SLOPES: Mapping[str, str] = MappingProxyType({})
# The gradient of the result, in the text of a slope.
_GRADIENT = "g"
_OTHERWISE = "; or take jit.elementwise, which promotes as NumPy does"
_WIDEST = DType.float64, DType.complex128


@attrs.frozen
class KnownExpression:
    """Facts that are found once for arguments of certain types.

    Attributes:
        program: The steps and the arguments, in the form for `ExpressionSpec`.
        dtypes: Dtypes of the results.
        typed: The steps.
        has_places: Whether there are indices or loads, whose places depend on the shapes.
        is_whole: Whether the results have the shape of the arrays: with reductions, if the text of a result
            also reads elements outside of them.
        is_one_reduction: Whether a reduction makes the result, which reads no other elements.
    """

    program: str
    dtypes: tuple[DType, ...]
    typed: TypedExpression
    has_places: bool
    is_whole: bool
    is_one_reduction: bool = False


class Expression(Generic[ReplyT]):
    """An expression over arrays: of each element, along axes, or one that changes elements in place.

    On CUDA it is compiled at its first call with certain dtypes and layouts; on the CPU, NumPy or a C++
    compiler computes it.

    Args:
        text: The expression, as source or parsed by `parse`.
        operation: Name of the operation, such as ``"jit.saxpy"``.
        library: Import path of the library actor that serves it.
        inputs: Names of the arguments, in order; None for the order in which the source reads them.
        outputs: Names of the results, in order; a call then returns a tuple. None for one result.
        axes: Whether ``sum(...)`` and other `REDUCTIONS` in the source reduce along the axes of a call.
        dtypes: Types that the results are converted to: one for all, or by their names.
        promoted: Names of the inputs that the array API standard promotes to one dtype. They must be of
            one kind: truth values, integers, or floating and complex numbers; and uint64 does not promote
            with signed dtypes. Empty for NumPy's promotion, which takes all.
        truths: Names of the inputs that must be truth values.
        is_checked: Whether an index outside of a loaded array fails the operation, with an
            `OutOfRangeError`. Otherwise the nearest index inside is used. A loop fails by any load of its
            iterations; an `if` computes both sides, and so checks both.
        precision: The least precision of arrays in the computation, ``"float32"`` or ``"float64"``. Each
            result is rounded once, to the dtype that it would have otherwise. Integers become float64.
            Arrays that elements are loaded from are not converted. None for the dtypes of the arguments.
        wide: The source for arrays of float64 or complex128, for which squares may overflow; by default
            the same. As long as `text` does not overflow, both give the same results.
        slopes: By the name of an input, the source of its gradient, which reads `g`, the gradient of the
            result, the inputs, and the result by its name. Other inputs have the derived gradient.
        reserved: Names that no input may have, because they are arguments of each call.

    Raises:
        ValueError: The expression contains something that is not allowed, and the message shows the
            place; or results are not named by `outputs`.
        TypeError: Devices lack this dtype.

    Attributes:
        operation: Name of the operation.
        parsed: The expression, parsed.
        inputs: Names of its arguments, in order.
        outputs: Names of its results, in order.
        precision: The least that arrays are computed in.
        dtypes: Types that the results are converted to; None for no conversion.
        slopes: The texts of gradients, by the names of inputs.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_is_checked",
        "_is_single",
        "_known",
        "_message",
        "_promoted",
        "_told",
        "_truths",
        "_wide",
        "_wide_text",
        "dtypes",
        "inputs",
        "memo",
        "operation",
        "outputs",
        "parsed",
        "precision",
        "slopes",
    )

    def __init__(
        self,
        text: str | base.ParsedExpression,
        *,
        operation: str,
        library: str = ARRAYS,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | str | None = None,
        axes: bool = False,
        dtypes: DTypeLike | Mapping[str, DTypeLike] | None = None,
        promoted: Sequence[str] = (),
        truths: Sequence[str] = (),
        is_checked: bool = False,
        precision: str | None = None,
        wide: str | None = None,
        slopes: Mapping[str, str] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        is_single = outputs is None or isinstance(outputs, str)
        chosen = (outputs,) if isinstance(outputs, str) else None if outputs is None else tuple(outputs)
        if isinstance(text, base.ParsedExpression):
            parsed = text
        else:
            parsed = parse(text, None if inputs is None else tuple(inputs), chosen, is_along=axes)
        self.parsed: base.ParsedExpression = parsed
        self.inputs: Strs = parsed.inputs
        self.outputs: Strs = parsed.outputs
        if chosen is None and len(parsed.outputs) > 1:
            names = ", ".join(map(repr, parsed.outputs))
            raise ValueError(
                f"the expression has several results: name those that you want, outputs=({names})"
            )
        if taken := [name for name in parsed.inputs if name in reserved]:
            raise ValueError(f"an input cannot have the name {taken[0]}: that is an argument of each call")
        declared_dtypes = _dtypes(parsed, dtypes)
        self.dtypes: tuple[DType | None, ...]
        self.dtypes = tuple(declared_dtypes.get(output) for output in parsed.outputs)
        self.slopes: Mapping[str, str] = _checked_slopes(parsed, slopes)
        self._is_single = is_single
        # The names of the results in errors: the text has a name of its own for a single one.
        self._told = ("out",) if is_single else parsed.outputs
        self._is_checked = is_checked
        self._message = served_by(Compute, library)
        self._promoted, self._truths = tuple(promoted), tuple(truths)
        self._wide: Mapping[str, DType] = {} if precision is None else WIDE[precision]
        self._wide_text = wide
        self.operation: str = operation
        self.precision: str | None = precision
        # The key is the types of the arguments, and of the given results.
        self._known = functools.lru_cache(256)(self._find_types)
        # Cached results, which end with this expression.
        self.memo: dict[Any, Any] = {}

    @property
    def text(self) -> str:
        """The expression, as it was written."""
        return self.parsed.text

    def typed(self, kinds: tuple[ArgumentType, ...]) -> TypedExpression:
        """Return its steps for arguments of certain types, widened to `precision`."""
        expression, _ = self._widened(self.parsed, dict(zip(self.inputs, kinds, strict=True)))
        return typed(expression, kinds, self.dtypes, self._is_checked)

    def is_loaded(self, name: str) -> bool:
        """Return whether elements of an input are loaded by indices."""
        return name in self.parsed.loads

    def plan(self, planner: Planner, message: Compute[ReplyT]) -> Planned[ReplyT]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        first = message.out[0]
        shape = () if first is None else first.shape
        taken = take(planner, self.parsed, message.arguments, message.shape, shape)
        resolved = self.known_of(planner.name, taken, message.out)
        results = [
            written(planner, name, out, (taken.shape, dtype))[0]
            for name, dtype, out in zip(self._told, resolved.dtypes, message.out, strict=True)
        ]
        for number, out in enumerate(message.out):
            if out is not None:
                self._check_apart(planner, number, results, taken)
        specs = tuple([result.spec for result in results])
        spec = ExpressionSpec(resolved.program, (), taken.arrays, taken.loaded, specs, (), taken.scalars)
        reply: Any = results[0] if self._is_single else tuple(results)
        return Planned(spec, cast("ReplyT", reply))

    def take(
        self,
        planner: Planner,
        arguments: Sequence[ExpressionArgument | ArraySpec],
        shape: tuple[int, ...] | None = None,
        otherwise: tuple[int, ...] = (),
    ) -> CallArguments:
        """Take the arguments of a call; see `take`."""
        return take(planner, self.parsed, arguments, shape, otherwise)

    def known_of(
        self, operation: str, taken: CallArguments, out: Sequence[AccelRef | ArraySpec | None]
    ) -> KnownExpression:
        """Find the types for arguments, and for the given results.

        Raises:
            TypeError, ValueError, NotSupportedError: See `Elementwise.__call__`.
        """
        dtypes = [None if result is None else result.dtype.value for result in out]
        resolved = self._known(taken.signature, *dtypes)
        taken.check_held(operation, resolved.typed)
        if resolved.has_places:
            taken.check_places(operation, resolved.typed.axes)
        return resolved

    def _find_types(self, signature: Strs, *out: str | None) -> KnownExpression:
        operation, arguments = self.operation, tuple(map(Argument.decode, signature))
        named_arguments = dict(zip(self.inputs, arguments, strict=True))
        kinds = {name: argument.kind for name, argument in named_arguments.items()}
        check_promotion(operation, {name: kinds[name] for name in self._promoted}, _OTHERWISE)
        check_truths(operation, {name: kinds[name] for name in self._truths})
        chosen = self.chosen(arguments)
        expression, casts = self._widened(chosen, kinds)
        # Integers are floating where they are widened: differences of unsigned ones would wrap around.
        plain = [
            attrs.evolve(argument, kind=casts[name])
            if name in casts and not argument.dtype.is_inexact
            else argument
            for name, argument in named_arguments.items()
        ]

        def of(arguments: tuple[Argument, ...]) -> TypedExpression:
            kinds = tuple([argument.kind for argument in arguments])
            return typed(self.parsed, kinds, self.dtypes, self._is_checked)

        computed_dtypes = find_types(operation, of, named_arguments, plain).dtypes
        dtypes = tuple(
            result_dtype(operation, name, dtype, declared, None if out_dtype is None else DType(out_dtype))
            for name, dtype, declared, out_dtype in zip(
                self._told, computed_dtypes, self.dtypes, out, strict=True
            )
        )
        if casts or self.parsed.reductions:
            dtypes = tuple(dtype or plain for dtype, plain in zip(dtypes, computed_dtypes, strict=True))
        program, usual = self._typed(expression, kinds, dtypes), None
        if chosen is not self.parsed:
            usual = self._typed(self._widened(self.parsed, kinds)[0], kinds, dtypes)
        self._check_identities(program)
        read = expression.read_outside if expression.reductions else ()
        return KnownExpression(
            encode_program(program, arguments, usual),
            program.dtypes,
            program,
            has_places=bool(program.axes or program.loads),
            is_whole=any(named_arguments[name].is_array for name in read),
            is_one_reduction=EncodedProgram(program, arguments).is_one_reduction,
        )

    def _typed(
        self,
        expression: base.ParsedExpression,
        kinds: Mapping[str, ArgumentType],
        dtypes: tuple[DType | None, ...],
    ) -> TypedExpression:
        return unrolled(typed(expression, tuple(kinds.values()), dtypes, self._is_checked))

    def _check_identities(self, program: TypedExpression) -> None:
        """Require that the dtypes of accumulators hold the results of no elements."""
        for reduction in self.parsed.reductions:
            if reduction.identity is not None:
                (fold,) = [step for step in program.steps if step.function == "fold"]
                element(self.operation, "identity", reduction.identity, fold.dtype)

    def chosen(self, arguments: Sequence[Argument]) -> base.ParsedExpression:
        """Return the expression for arguments of certain types."""
        is_wide = any(argument.is_array and argument.dtype in _WIDEST for argument in arguments)
        if self._wide_text is None or not is_wide:
            return self.parsed
        # It is parsed at first use, because few programs use it and all import the package.
        outputs = None if self._is_single else self.outputs
        return parse(self._wide_text, self.inputs, outputs, is_along=self.parsed.is_along)

    def _widened(
        self, expression: base.ParsedExpression, kinds: Mapping[str, ArgumentType]
    ) -> tuple[base.ParsedExpression, dict[str, DType]]:
        """Return an expression that first converts its arrays, and the dtypes that it converts them to."""
        if not self._wide:
            return expression, {}
        elements = expression.elements - expression.loads.keys()
        casts = {
            name: self._wide[kind.value]
            for name, kind in kinds.items()
            if name in elements and isinstance(kind, DType) and kind.value in self._wide
        }
        if not casts:
            return expression, {}
        # A loop begins a line.
        text = "\n".join([*[f"{name} = {dtype}({name})" for name, dtype in casts.items()], expression.text])
        outputs = None if expression.is_along and self._is_single else expression.outputs
        return parse(text, expression.inputs, outputs, is_along=expression.is_along), casts

    def _check_apart(
        self, planner: Planner, number: int, results: Sequence[AccelRef], taken: CallArguments
    ) -> None:
        """Refuse a result that overlaps an argument that other elements of the result read."""
        name, written = self._told[number], results[number].spec
        if not (number or taken.loaded or written.block in [array.block for array in taken.lying]):
            return
        other_arrays = {
            argument: array
            for argument, array in zip(taken.array_names, taken.lying, strict=True)
            if array != written
        }
        # Elements are loaded in any order.
        other_arrays |= zip(taken.loaded_names, taken.loaded, strict=True)
        other_arrays |= {
            output: result.spec
            for output, result in zip(self.outputs[:number], results, strict=False)
            if output not in other_arrays
        }
        planner.distinct(name, written, **other_arrays)


@attrs.frozen(eq=False)
class Compute(Operation[Any, ReplyT]):
    """One computation of an expression; the `compute` of an expression makes one.

    Attributes:
        expression: The expression.
        arguments: One for each of its inputs.
        out: Arrays to write to, one for each result; None for a new one.
        shape: Shape of the results; None for the shape of the arguments.
        axis: Axis or axes to reduce; None for all.
        keepdims: Whether reduced axes stay.
    """

    expression: Expression[ReplyT]
    arguments: tuple[ExpressionArgument, ...]
    out: tuple[AccelRef | None, ...]
    shape: tuple[int, ...] | None = None
    axis: int | Sequence[int] | None = None
    keepdims: bool = False

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.expression.operation

    def plan(self, planner: Planner) -> Planned[ReplyT]:
        """Find the types, and name the results."""
        return self.expression.plan(planner, self)


class Elementwise(Expression[ReplyT]):
    """An expression over arrays, computed for each element: ``Elementwise[AccelRef]("a * x", ...)``.

    Args:
        text: Assignments, or one expression.
        operation: Name of the operation, such as ``"jit.saxpy"``.
        **options: See `ParsedExpression`.

    Raises:
        ValueError, TypeError: See `ParsedExpression`.
    """

    __slots__ = ()

    def __init__(self, text: str | base.ParsedExpression, *, operation: str, **options: Any) -> None:
        super().__init__(text, operation=operation, reserved=_RESERVED, **options)
        self._asked = ArrayFunction(operation, self.compute)

    def __repr__(self) -> str:
        return f"<Elementwise {self.operation}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}>"

    def compute(
        self,
        *arguments: ExpressionArgument,
        out: AccelRef | Sequence[AccelRef | None] | None = None,
        shape: int | Sequence[int] | None = None,
        **named: ExpressionArgument,
    ) -> Compute[ReplyT]:
        """Make the message that computes it: ``await device.ask(expression.compute(...))``.

        Raises:
            TypeError: There are too few or too many arguments, or one with an unknown name; or `shape` is not
                a shape.
            ValueError: `shape` has a negative extent.
        """
        values = bind(self.operation, self.inputs, arguments, named, options=_RESERVED)
        if out is None or isinstance(out, AccelRef):
            outs: tuple[AccelRef | None, ...] = (out,) * len(self.outputs) if out is None else (out,)
        else:
            # Anything but a sequence is refused as a single result.
            outs = tuple(out) if isinstance(cast("object", out), (tuple, list)) else (cast("Any", out),)
            for array in outs:
                check_out(self.operation, array)
        if len(outs) != len(self.outputs):
            raise TypeError(
                f"{self.operation}: out must name {len(self.outputs)} arrays, for {', '.join(self.outputs)}; "
                f"got {len(outs)}"
            )
        extents = None if shape is None else extents_of(self.operation, shape)
        return self._message(self, values, outs, extents)

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
            out: Array to write to, of the broadcast shape and any strides; or a sequence of arrays, one for
                each result, with None for a new one. It may be an argument without broadcasting, which is
                then changed in place.
            shape: Shape of the results; by default the shape that the element-wise arrays broadcast to, and
                without these the shape of the first of `out`.
            **named: Arguments by their names.

        Returns:
            The result; the results, if outputs were named.

        Raises:
            TypeError: An argument is wrong, or a function does not support the dtypes; the message shows the
                place.
            ValueError: Shapes do not broadcast, a dtype cannot hold a number, `out` shares memory with an
                argument and is not the same array, the result lacks the axis of an index, or an array has no
                elements to load.
            NotSupportedError: A dtype is float8.
        """
        if out is not None or shape is not None:
            named = {**named, "out": out, "shape": shape}  # type: ignore[dict-item]  # they are named, too
        return Call(self._asked, arguments, named or None)


class Later:
    """Mixin for an expression that is parsed at its first use, because few programs use it and all import it.

    Args:
        make: Makes the text and the options.
        location: File, line and name of the declaration, for the errors.

    Raises:
        TypeError: At the first use: the text or an option is wrong. The message begins with `location`.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], location: str) -> None:
        self._later = make, location

    def __getattr__(self, name: str) -> Any:
        # The slots of an expression are unset before. A copy begins empty, and would look for this for ever.
        if name == "_later":
            raise AttributeError(name)
        make, location = self._later
        try:
            cast("Any", super()).__init__(**make())
        except (TypeError, ValueError) as error:
            raise TypeError(f"{location}: {error}") from error
        return object.__getattribute__(self, name)


class LaterElementwise(Later, Elementwise[ReplyT]):
    """An `Elementwise` that is parsed at its first use."""


def _dtypes(
    expression: base.ParsedExpression, dtypes: DTypeLike | Mapping[str, DTypeLike] | None
) -> dict[str, DType]:
    """Find the types that the results are converted to."""
    if dtypes is None:
        return {}
    if not isinstance(dtypes, Mapping):
        return dict.fromkeys(expression.outputs, DType.of(dtypes))
    unknown = [name for name in dtypes if name not in expression.outputs]
    if unknown:
        raise ValueError(
            f"dtypes: {', '.join(unknown)} is not a result; there are {', '.join(expression.outputs)}"
        )
    return {name: DType.of(dtype) for name, dtype in dtypes.items()}


def _checked_slopes(expression: base.ParsedExpression, slopes: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the sources of gradients.

    Raises:
        TypeError: `slopes` is not a dict of texts.
        ValueError: A name is not an input's, an input has a name that slopes reserve, there are several
            results, or a source is not valid.
    """
    if slopes is None:
        return _NO_SLOPES
    if not isinstance(cast("object", slopes), Mapping):
        raise TypeError(f"slopes must be a dict of texts by the names of inputs, got {slopes!r}")
    if len(expression.outputs) > 1:
        raise ValueError(f"slopes need an expression with one result, got {', '.join(expression.outputs)}")
    if _GRADIENT in expression.inputs:
        raise ValueError(f"slopes: rename the input {_GRADIENT}, because slopes call the gradient so")
    allowed = (_GRADIENT, *expression.inputs, *expression.outputs)
    for name, text in slopes.items():
        if name not in expression.inputs or name in expression.loads:
            read = ", ".join(
                input_name for input_name in expression.inputs if input_name not in expression.loads
            )
            raise ValueError(f"slopes: {name!r} is not an input that is read element by element: {read}")
        try:
            slope = parse(text)
        except (TypeError, ValueError) as error:
            raise type(error)(f"slopes[{name!r}]: {error}") from None
        unknown = [input_name for input_name in slope.inputs if input_name not in allowed]
        if unknown or len(slope.outputs) > 1:
            problem = f"reads {', '.join(unknown)}" if unknown else "has several results"
            raise ValueError(
                f"slopes[{name!r}] {problem}; "
                f"it may read {', '.join(allowed)}, and must have exactly one result"
            )
    return dict(slopes)
