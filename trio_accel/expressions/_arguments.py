"""Arguments of expressions: arrays that broadcast, and numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from ..actors import unknown_option
from ..backends.base import DType, Ints, NotSupportedError, Strs, is_same_kind
from ..backends.base.contract.ops import ArraySpec, common_shape
from ..backends.base.expressions import (
    Argument,
    ArgumentType,
    ParsedExpression,
    TypedExpression,
    Weak,
    pack_scalars,
)
from ..devices import (
    AccelRef,
    Operand,
    Operation,
    Planner,
    bounded_integer,
    bounded_integers,
    shown,
    what_to_do,
)
from ._views import check_ref

__all__ = [
    "ARRAYS",
    "Axis",
    "ExpressionArgument",
    "Out",
    "argument_of",
    "axes_of",
    "axis_of",
    "bind",
    "check_out",
    "promoted_dtype",
    "reduced",
]

ARRAYS: Final = "trio_accel.arrays:ArraysActor"
"""Import path of the actor that serves expressions unless another one is named, as only its library has such
kernels on all backends. It is a text, because capabilities do not import one another."""

ExpressionArgument: TypeAlias = Operand | complex | np.generic
"""An array; a number of NumPy's, which has a dtype; or one of Python's, which takes that of the arrays."""

Axis: TypeAlias = int | Sequence[int] | None
"""Axis or axes; None for all."""

Out: TypeAlias = AccelRef | None
"""An array to write to; None for a new one."""

MessageT = TypeVar("MessageT", bound=Operation[Any, Any])
TypedT = TypeVar("TypedT")

_INT64 = np.iinfo(np.int64)

# `Argument.encode` writes the same texts, which are compared in less time than dtypes.
_ARRAYS = {dtype.value: Argument(dtype, True).encode() for dtype in DType}
_WEAK = {kind: Argument(kind, False).encode() for kind in Weak}
_BOOL = Argument(DType.bool, False).encode()


@attrs.define(eq=False, on_setattr=None)
class CallArguments:
    """The arguments of one call; do not change them.

    Attributes:
        expression: The expression.
        signature: The form in which the expression gets them, by `Argument.encode`.
        arrays: Arrays that are read element by element, in order, broadcast to `shape`.
        lying: The same arrays, not broadcast.
        loaded: Arrays that elements are loaded from, in order, not broadcast.
        values: Arguments that are numbers, in order.
        shape: The shape of the result.
    """

    expression: ParsedExpression
    signature: Strs
    arrays: tuple[ArraySpec, ...]
    lying: tuple[ArraySpec, ...]
    loaded: tuple[ArraySpec, ...]
    values: list[complex]
    shape: Ints

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments, as the expression gets them."""
        return tuple([Argument.decode(text) for text in self.signature])

    @property
    def scalars(self) -> bytes:
        """The numbers, as specifications hold them."""
        if not self.values:
            return b""
        dtypes = [argument.dtype for argument in self.arguments if not argument.is_array]
        return pack_scalars(self.values, dtypes)

    @property
    def array_names(self) -> list[str]:
        """Names of `arrays`."""
        pairs = zip(self.expression.inputs, self.arguments, strict=True)
        return [name for name, argument in pairs if argument.is_array and name in self.expression.elements]

    def check_places(self, operation: str, axes: Sequence[int]) -> None:
        """Require that the axes of indices are there, and that there is something to load.

        Raises:
            ValueError: An axis that the result has not, or an array without elements.
        """
        for axis in axes:
            if not -len(self.shape) <= axis < len(self.shape):
                raise ValueError(
                    f"{operation}: i({axis}): the axis is out of range for the result of shape {self.shape}; "
                    "shape= says another"
                )
        for name, array in zip(self.loaded_names, self.loaded, strict=True):
            if not array.size and 0 not in self.shape:
                raise ValueError(
                    f"{operation}: {name} of shape {array.shape} has no elements to load for a result of "
                    f"shape {self.shape}"
                )

    @property
    def loaded_names(self) -> list[str]:
        """Names of `loaded`."""
        return [name for name in self.expression.inputs if name in self.expression.loads]

    def check_held(
        self,
        operation: str,
        typed: TypedExpression,
        count: int = 0,
    ) -> None:
        """Require that the dtypes hold the integers that only depend on Python numbers.

        Args:
            operation: Name of the operation, for the error.
            typed: The expression.
            count: The number of reduced elements.

        Raises:
            ValueError: A dtype does not hold its integer.
        """
        if not typed.bounds:
            return
        numbers = [number for number, argument in enumerate(self.arguments) if not argument.is_array]
        values = dict(zip(numbers, self.values, strict=True))
        try:
            typed.check_held(values, self.expression.inputs, count)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}") from None


def check_promotion(operation: str, kinds: Mapping[str, ArgumentType], advice: str = "") -> None:
    """Require that the array API standard has a promotion for arguments, given their types by name.

    A Python integer promotes with arrays of all numbers, a float or complex number with floating and complex
    arrays. A complex number makes a real array complex: float32 becomes complex64, and float64 complex128.

    Args:
        operation: Name of the operation, for the error.
        kinds: The types.
        advice: Advice to the caller, for the error.

    Raises:
        TypeError: The standard has none, although NumPy might.
    """
    # One of each type, because a call may have thousands of arguments: the first one, which the error names.
    firsts: dict[int, tuple[str, ArgumentType]] = {}
    for name, kind in kinds.items():
        firsts.setdefault(id(kind), (name, kind))
    for name, kind in firsts.values():
        for peer, dtype in firsts.values():
            if isinstance(dtype, DType) and not _is_promoted(kind, dtype):
                raise TypeError(
                    f"{operation}: {name} is {_kind_label(kind)} and {peer} is {dtype}, which the array API "
                    f"standard does not promote to one dtype. Convert one: await {peer}.cast(...){advice}"
                )


def promoted_dtype(operation: str, arrays: Mapping[str, DType]) -> DType:
    """Promote the dtypes of arrays to one by the array API standard.

    Raises:
        TypeError: The standard does not promote these, although NumPy might.
    """
    check_promotion(operation, arrays)
    try:
        return DType.of(np.result_type(*[dtype.dtype for dtype in arrays.values()]))
    except TypeError:
        listing = ", ".join(dict.fromkeys(map(str, arrays.values())))
        raise TypeError(
            f"{operation}: {listing} do not promote to a common dtype: convert with cast()"
        ) from None


def check_truths(operation: str, kinds: Mapping[str, ArgumentType]) -> None:
    """Require that arguments are truth values, given their types by name.

    Raises:
        TypeError: An argument is not a truth value.
    """
    for name, kind in kinds.items():
        if kind is not DType.bool:
            raise TypeError(
                f"{operation}: {name} must be of bool, got {_kind_label(kind)}: compare it first, as by "
                f"await arrays.not_equal({name}, 0)"
            )


def _kind_label(kind: DType | Weak) -> str:
    return f"a Python {kind.value}" if isinstance(kind, Weak) else kind.value


def _is_promoted(first: DType | Weak, second: DType) -> bool:
    if isinstance(first, Weak):
        return second.is_inexact or (first is Weak.int and second.kind in ("int", "uint"))
    kinds = {first.kind, second.kind}
    if kinds == {"int", "uint"}:
        return DType.uint64 not in (first, second)
    return len(kinds) == 1 or kinds == {"float", "complex"}


def find_types(
    operation: str,
    find: Callable[[tuple[Argument, ...]], TypedT],
    arguments: Mapping[str, Argument],
    plain: Iterable[Argument] | None = None,
) -> TypedT:
    """Find the types of an expression; its error becomes an error of a function.

    For the user's own expression, the error shows the place in it. Other expressions belong to the package,
    so the error states the dtypes that the function takes and got, and nothing of the inside.

    Args:
        operation: Name of the function.
        find: Finds its types for arguments; raises if there are none.
        arguments: Its arguments, by their names.
        plain: The arguments of the computation, if they differ.

    Raises:
        TypeError, ValueError, NotSupportedError: The types are not supported.
    """
    try:
        return find(tuple(arguments.values() if plain is None else plain))
    except (TypeError, ValueError, NotSupportedError) as error:
        text = str(error)
        if not operation.startswith("jit.") and "fused" not in operation:
            text = _told_of(text.rsplit(", in line ", 1)[0], find, arguments)
        raise type(error)(f"{operation}: {text}") from None


def _told_of(
    text: str, find: Callable[[tuple[Argument, ...]], object], arguments: Mapping[str, Argument]
) -> str:
    if " does not take " not in text:
        return text.replace("int64(...) makes one", 'convert it, as by await indices.cast("int64")')
    takes = [kind for kind, dtype in _KINDS.items() if _is_typed(find, arguments.values(), dtype)]
    listing = ", ".join(f"{_kind_label(argument.kind)} as {name}" for name, argument in arguments.items())
    advice = f"it takes {' or '.join(takes) or 'others'}; await x.cast(...) converts an array"
    return f"it does not take {listing}; {advice}"


_KINDS = {
    "truth values": DType.bool,
    "integers": DType.int64,
    "floating numbers": DType.float64,
    "complex numbers": DType.complex128,
}


def _is_typed(
    typed: Callable[[tuple[Argument, ...]], object], arguments: Iterable[Argument], dtype: DType
) -> bool:
    weak_kinds = Weak.int, Weak.float
    try:
        typed(
            tuple(
                [argument if argument.kind in weak_kinds else Argument(dtype, True) for argument in arguments]
            )
        )
    except (TypeError, ValueError, NotSupportedError):
        return False
    return True


def served_by(message: type[MessageT], library: str) -> type[MessageT]:
    """Return the subclass of a message that one library actor serves, because the class selects the actor.

    Args:
        message: The class.
        library: Import path of the actor, ``"package.module:Class"``.
    """
    return cast("type[MessageT]", _served_by(message, library))  # type: ignore[arg-type]  # hashable


@functools.cache
def _served_by(message: type[object], library: str) -> type[object]:
    names = {"__slots__": (), "__module__": message.__module__, "library": library}
    return type(message.__name__, (message,), names)


def bind(
    operation: str,
    names: Sequence[str],
    arguments: tuple[Any, ...],
    named: Mapping[str, object],
    optional: Collection[str] = (),
    options: Collection[str] = (),
) -> tuple[Any, ...]:
    """Bring the arguments of a call into the order of their names; None for an omitted one.

    Args:
        operation: Name of the operation, for the error.
        names: The names in their order.
        arguments: Positional arguments.
        named: Arguments by their names.
        optional: Names of arguments that may be omitted.
        options: Other names that the call takes.

    Raises:
        TypeError: There are too few or too many arguments, or one with an unknown name.
    """
    if not named and len(arguments) == len(names):
        return arguments
    for name in named:
        if name not in names:
            raise unknown_option(operation, name, (*names, *options))
    values = dict(zip(names, arguments, strict=False))
    repeated = [name for name in named if name in values]
    values.update(named)
    missing = [name for name in names if name not in values and name not in optional]
    if len(arguments) > len(names) or repeated or missing:
        raise TypeError(
            f"{operation} takes {len(names)} arguments ({', '.join(names) or 'none'}), got {len(arguments)}"
            + (f" and by name {', '.join(named)}" if named else "")
            + (f"; {', '.join(missing)} is missing" if missing else "")
            + (f"; {', '.join(repeated)} is given twice" if repeated else "")
        )
    return tuple([values.get(name) for name in names])


def take(
    planner: Planner,
    expression: ParsedExpression,
    arguments: Sequence[ExpressionArgument | ArraySpec],
    shape: tuple[int, ...] | None = None,
    otherwise: tuple[int, ...] = (),
) -> CallArguments:
    """Take the arguments of a call, and broadcast its element-wise arrays against each other.

    Args:
        planner: The operation's planner.
        expression: The expression.
        arguments: One for each of its inputs; a specification describes an array that is not in memory yet.
        shape: The shape of the result; None for the shape that the arrays broadcast to.
        otherwise: The shape without such arrays.

    Raises:
        TypeError: An argument is neither an array nor a number.
        ValueError: The shapes do not broadcast, an integer has more than 64 bits, or the number of an array's
            axes differs from the number of indices in its loads.
    """
    signature: list[str] = []
    arrays: list[ArraySpec] = []
    loaded: list[ArraySpec] = []
    values: list[complex] = []
    loads = expression.loads
    for name, argument in zip(expression.inputs, arguments, strict=True):
        if type(argument) is not AccelRef and not isinstance(argument, (AccelRef, np.ndarray, ArraySpec)):
            if name in loads:
                raise TypeError(f"{planner.name}: {name} must be an array: elements are loaded from it")
            signature.append(argument_of(planner.name, name, argument))
            number: Any = argument
            values.append(number.item() if isinstance(argument, np.generic) else number)
        else:
            array = argument if type(argument) is ArraySpec else planner.read(name, cast("Operand", argument))
            signature.append(_ARRAYS[array.dtype.value])
            if name in loads:
                if array.ndim != loads[name]:
                    raise ValueError(
                        f"{planner.name}: {name} must have {loads[name]} axes, one for each index of "
                        f"{name}[...], got shape {array.shape}"
                    )
                loaded.append(array)
                if name not in expression.elements:
                    continue
            arrays.append(array)
    fixed = shape
    if shape is None:
        shape = arrays[0].shape if arrays else otherwise
    lying = spread = tuple(arrays)
    for array in lying:
        if array.shape != shape:
            shape = common(planner.name, arrays, fixed)
            spread = tuple([_broadcast(array, shape) for array in arrays])
            break
    return CallArguments(expression, tuple(signature), spread, lying, tuple(loaded), values, shape)


def common(operation: str, arrays: Sequence[Operand | ArraySpec], fixed: Ints | None = None) -> Ints:
    """Find the shape that arrays broadcast to.

    Raises:
        ValueError: There is none, or it differs from `fixed`.
    """
    shape = common_shape(*(array.shape for array in arrays), fixed or ())
    if fixed is not None and shape != fixed:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{operation}: the shapes {shapes} do not broadcast to {fixed}, which shape= says")
    if shape is None:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{operation}: the shapes {shapes} do not broadcast to one")
    return shape


def argument_of(operation: str, name: str, argument: ExpressionArgument) -> str:
    """Return how an expression gets an argument, as `Argument.encode` writes it.

    Raises:
        TypeError: It is neither an array nor a number.
        ValueError: It has more than 64 bits.
    """
    value: object = argument
    if isinstance(value, AccelRef):
        return _ARRAYS[value.dtype.value]
    if not isinstance(value, (int, float, complex, np.generic, np.ndarray)):
        description = f"{type(value).__name__}{what_to_do(value)}"
        raise TypeError(f"{operation}: {name} must be a number or an array, got {description}")
    if isinstance(value, (np.generic, np.ndarray)):
        # NumPy's numbers have dtypes, even float64, which is also a Python float.
        try:
            return Argument(DType.of(value.dtype), isinstance(value, np.ndarray)).encode()
        except TypeError as error:
            raise TypeError(f"{operation}: {name}: {error}") from None
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        if not _INT64.min <= value <= _INT64.max:
            raise ValueError(
                f"{operation}: {name} must have at most 64 bits; numpy.uint64(...) makes large ones"
            )
        return _WEAK[Weak.int]
    return _WEAK[Weak.float if isinstance(value, float) else Weak.complex]


def _broadcast(array: ArraySpec, shape: Ints) -> ArraySpec:
    if array.shape == shape:
        return array
    missing = len(shape) - array.ndim
    strides = (
        *(0,) * missing,
        *(0 if extent == 1 else step for extent, step in zip(array.shape, array.strides, strict=True)),
    )
    return ArraySpec(array.block, array.offset, array.dtype, shape, strides)


def broadcast(argument: ExpressionArgument, shape: Ints) -> ExpressionArgument:
    """Return a view of an array that broadcasts to a shape; a number stays as it is."""
    if isinstance(argument, np.ndarray):
        return np.broadcast_to(argument, shape)
    if isinstance(argument, AccelRef):
        return AccelRef(argument.block, _broadcast(argument.spec, shape))
    return argument


def axis_of(operation: str, x: Operand | ArraySpec, axis: object) -> int:
    """Take an axis of an array, from the end for a negative one.

    Raises:
        TypeError: The axis is not an integer.
        ValueError: The axis is out of range.
    """
    number = axis if type(axis) is int else bounded_integer(operation, "axis", axis)
    if not -x.ndim <= number < x.ndim:
        problem = f"axis {shown(number)} is not there in an array of shape {x.shape}"
        raise np.exceptions.AxisError(f"{operation}: {problem}")
    return number % x.ndim


def axes_of(operation: str, shape: Ints, axis: int | Sequence[int] | None, *, is_one: bool = False) -> Ints:
    """Return the axes of an argument `axis`, in order: all for None.

    Args:
        operation: Name of the operation, for errors.
        shape: Shape of the array.
        axis: Axis or axes.
        is_one: Whether several are refused, because a place along them is not a number.

    Raises:
        TypeError: An axis is not an integer, or there are several although they are refused.
        ValueError: An axis does not exist, or is named twice.
    """
    if axis is None:
        return tuple(range(len(shape)))
    ndim = len(shape)
    numbers = (
        (axis,) if type(axis) is int else bounded_integers(operation, "axis", axis, "an integer, or several")
    )
    for number in numbers:
        if not -ndim <= number < ndim:
            problem = f"axis {shown(number)} is not there in an array of shape {shape}"
            raise np.exceptions.AxisError(f"{operation}: {problem}")
    axes = tuple(sorted([number % ndim for number in numbers]))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{operation}: axis names one twice: {axis}, in an array of shape {shape}")
    if is_one and (isinstance(axis, Sequence) or len(axes) != 1):
        raise TypeError(f"{operation}: axis must be one axis or None, got {shown(axis)}")
    return axes


def reduced(shape: Ints, axes: Sequence[int], *, keepdims: bool = False) -> Ints:
    """Return the shape of a result that is reduced along axes."""
    return tuple(
        [1 if axis in axes else extent for axis, extent in enumerate(shape) if keepdims or axis not in axes]
    )


def check_out(operation: str, out: object) -> None:
    """Require an array to write to, or None.

    Raises:
        TypeError: It is something else.
    """
    if out is not None:
        check_ref(operation, "out", out)


def check_reduced(operation: str, keepdims: object, out: object) -> None:
    """Check the arguments that every reduction takes.

    Raises:
        TypeError: `keepdims` is not a truth value, or `out` is not an array of a device.
    """
    if not isinstance(keepdims, (bool, np.bool)):
        raise TypeError(f"{operation}: keepdims must be True or False, got {shown(keepdims)}")
    check_out(operation, out)


def extents_of(operation: str, shape: int | Sequence[int]) -> Ints:
    """Take the shape of a result.

    Raises:
        TypeError, ValueError: The value is not a shape.
    """
    several = (shape,) if isinstance(shape, int) else shape
    try:
        extents = tuple([operator.index(extent) for extent in several])
    except TypeError:
        raise TypeError(f"{operation}: shape must be integers, got {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise ValueError(f"{operation}: shape must be integers of at least 0, got {shape!r}")
    return extents


def result_dtype(
    operation: str, name: str, dtype: DType, declared: DType | None, out: DType | None
) -> DType | None:
    """Return the dtype to convert a result to: the declared one, or the dtype of the caller's array.

    Raises:
        TypeError: The result cannot be converted without losing its kind.
    """
    if declared is not None or out is None or out is dtype:
        return declared
    if not is_same_kind(dtype, out):
        label = "the result" if name == "out" else name
        raise TypeError(
            f"{operation}: {label} is of {dtype}, which does not become {out} of out; "
            f"give an array of {dtype}, or convert it in an expression: {out}(...)"
        )
    return out
