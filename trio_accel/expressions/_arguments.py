"""Arguments of expressions: arrays that broadcast, and numbers."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.expressions import Argument, Weak, pack_scalars
from ..backends.base.ops import ArraySpec, common_shape
from ..devices import AccelRef, Operand, Operation, Planner

__all__ = ["ExpressionArgument", "Taken", "bind", "result_dtype", "served_by", "take"]

ExpressionArgument: TypeAlias = "Operand | complex | np.generic"
"""An array; a number of NumPy's, which has a dtype; or one of Python's, which takes that of the arrays."""

MessageT = TypeVar("MessageT", bound=Operation[Any, Any])

_INT64 = np.iinfo(np.int64)


# As `Argument.encode` writes them: texts are compared in less time than dtypes.
_ARRAYS = {dtype.value: Argument(dtype, True).encode() for dtype in DType}
_WEAK = {kind: Argument(kind, False).encode() for kind in Weak}
_BOOL = Argument(DType.bool, False).encode()


@attrs.define(eq=False, on_setattr=None)
class Taken:
    """The arguments of one call; not to be changed.

    Attributes:
        names: Names of the inputs, in order.
        signature: How the expression gets them, as `Argument.encode` writes it.
        arrays: Those that are arrays, in order, broadcast to `shape`.
        lying: The same as they lie.
        values: Those that are numbers, in order.
        shape: The common shape.
    """

    names: tuple[str, ...]
    signature: tuple[str, ...]
    arrays: tuple[ArraySpec, ...]
    lying: tuple[ArraySpec, ...]
    values: list[complex]
    shape: tuple[int, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """How the expression gets them."""
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
        """Names of those that are arrays."""
        pairs = zip(self.names, self.arguments, strict=True)
        return [name for name, argument in pairs if argument.is_array]

    def check_bounds(self, operation: str, bounds: Sequence[tuple[int, DType]]) -> None:
        """Require that whole Python numbers are what the dtypes hold that they become.

        Raises:
            ValueError: One is not.
        """
        for number, dtype in bounds:
            place = sum(not argument.is_array for argument in self.arguments[:number])
            value, limits = self.values[place], np.iinfo(dtype.dtype)
            if not limits.min <= value.real <= limits.max:
                raise ValueError(
                    f"{operation}: {self.names[number]} {value} is outside {limits.min} to {limits.max}, "
                    f"which {dtype} holds"
                )


def served_by(message: type[MessageT], library: str) -> type[MessageT]:
    """Find the messages of a class that one library actor serves: that is said by their class.

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
) -> tuple[Any, ...]:
    """Bring the arguments of a call into the order of their names; None for an optional one left out.

    Raises:
        TypeError: Too few or too many, or one that there is not.
    """
    if not named and len(arguments) == len(names):
        return arguments
    values = dict(zip(names, arguments, strict=False))
    unknown = [name for name in named if name not in names or name in values]
    values.update(named)
    missing = [name for name in names if name not in values and name not in optional]
    if len(arguments) > len(names) or unknown or missing:
        raise TypeError(
            f"{operation} takes {len(names)} arguments ({', '.join(names) or 'none'}), got {len(arguments)}"
            + (f" and by name {', '.join(named)}" if named else "")
            + (f"; {', '.join(missing)} is missing" if missing else "")
            + (f"; {', '.join(unknown)} is unknown or given twice" if unknown else "")
        )
    return tuple([values.get(name) for name in names])


def take(planner: Planner, names: tuple[str, ...], arguments: Sequence[ExpressionArgument]) -> Taken:
    """Take the arguments of a call: arrays broadcast against each other.

    Raises:
        TypeError: Something else than an array or a number.
        ValueError: The shapes do not broadcast, or a whole number has more than 64 bits.
    """
    signature: list[str] = []
    arrays: list[ArraySpec] = []
    values: list[complex] = []
    for name, argument in zip(names, arguments, strict=True):
        if type(argument) is not AccelRef and isinstance(argument, (bool, int, float, complex, np.generic)):
            signature.append(_kind_of(planner, name, argument))
            values.append(argument.item() if isinstance(argument, np.generic) else argument)
        else:
            array = planner.read(name, argument)
            signature.append(_ARRAYS[array.dtype.value])
            arrays.append(array)
    shape = arrays[0].shape if arrays else ()
    lying = broadcast = tuple(arrays)
    for array in lying:
        if array.shape != shape:
            shape = _common(planner.name, arrays)
            broadcast = tuple([_broadcast(array, shape) for array in arrays])
            break
    return Taken(names, tuple(signature), broadcast, lying, values, shape)


def _common(operation: str, arrays: Sequence[ArraySpec]) -> tuple[int, ...]:
    shape = common_shape(*(array.shape for array in arrays))
    if shape is None:
        told = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{operation}: the shapes {told} do not broadcast to one")
    return shape


def _kind_of(planner: Planner, name: str, argument: complex | np.generic) -> str:
    """The type of a number, as `Argument.encode` writes it."""
    if isinstance(argument, np.generic):
        # Also float64, which is a Python float, too: NumPy's numbers have dtypes.
        return Argument(planner.dtype(name, argument.dtype), False).encode()
    if isinstance(argument, bool):
        return _BOOL
    if isinstance(argument, int):
        if not _INT64.min <= argument <= _INT64.max:
            raise ValueError(
                f"{planner.name}: {name} must have at most 64 bits; numpy.uint64(...) makes large ones"
            )
        return _WEAK[Weak.int]
    return _WEAK[Weak.float if isinstance(argument, float) else Weak.complex]


def _broadcast(array: ArraySpec, shape: tuple[int, ...]) -> ArraySpec:
    if array.shape == shape:
        return array
    missing = len(shape) - array.ndim
    strides = (
        *(0,) * missing,
        *(0 if extent == 1 else step for extent, step in zip(array.shape, array.strides, strict=True)),
    )
    return ArraySpec(array.block, array.offset, array.dtype, shape, strides)


def result_dtype(
    operation: str, name: str, dtype: DType, declared: DType | None, out: AccelRef | None
) -> DType | None:
    """What a result is converted to: as declared, or as the caller's array has it.

    Raises:
        TypeError: The result does not become that without loss of its kind.
    """
    if declared is not None or out is None or out.dtype is dtype:
        return declared
    if not np.can_cast(dtype.dtype, out.dtype.dtype, "same_kind"):
        raise TypeError(
            f"{operation}: {name} is of {dtype}, which does not become {out.dtype} of out; "
            f"convert it in the expression: {out.dtype}(...)"
        )
    return out.dtype
