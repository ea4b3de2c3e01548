"""Arguments of expressions: arrays that broadcast, and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.expressions import Argument, Weak, pack_scalars
from ..backends.base.ops import ArraySpec, common_shape
from ..devices import AccelRef, Operand, Planner

__all__ = ["ExpressionArgument", "Taken", "bound", "result_dtype", "take"]

ExpressionArgument: TypeAlias = "Operand | complex | np.generic"
"""An array; a number of NumPy's, which has a dtype; or one of Python's, which takes that of the arrays."""

_INT64 = np.iinfo(np.int64)


@attrs.frozen
class Taken:
    """The arguments of one call.

    Attributes:
        names: Names of the inputs, in order.
        arguments: How the expression gets them.
        arrays: Those that are arrays, in order, broadcast to `shape`.
        lying: The same as they lie.
        values: Those that are numbers, in order.
        shape: The common shape.
    """

    names: tuple[str, ...]
    arguments: tuple[Argument, ...]
    arrays: tuple[ArraySpec, ...]
    lying: tuple[ArraySpec, ...]
    values: tuple[complex, ...]
    shape: tuple[int, ...]

    @property
    def scalars(self) -> bytes:
        """The numbers, as specifications hold them."""
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


def bound(
    operation: str,
    names: Sequence[str],
    arguments: Sequence[ExpressionArgument],
    named: Mapping[str, ExpressionArgument],
) -> tuple[ExpressionArgument, ...]:
    """The arguments of a call in the order of the inputs.

    Raises:
        TypeError: Too few or too many, or one that there is not.
    """
    values = dict(zip(names, arguments, strict=False))
    unknown = [name for name in named if name not in names or name in values]
    missing = [name for name in names if name not in values and name not in named]
    if len(arguments) > len(names) or unknown or missing:
        raise TypeError(
            f"{operation} takes {len(names)} arguments ({', '.join(names) or 'none'}), got {len(arguments)}"
            + (f" and by name {', '.join(named)}" if named else "")
            + (f"; {', '.join(missing)} is missing" if missing else "")
            + (f"; {', '.join(unknown)} is unknown or given twice" if unknown else "")
        )
    values.update(named)
    return tuple([values[name] for name in names])


def take(planner: Planner, names: tuple[str, ...], arguments: Sequence[ExpressionArgument]) -> Taken:
    """Take the arguments of a call: arrays broadcast against each other.

    Raises:
        TypeError: Something else than an array or a number.
        ValueError: The shapes do not broadcast, or a whole number has more than 64 bits.
    """
    kinds: list[Argument] = []
    arrays: list[ArraySpec] = []
    values: list[complex] = []
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, (bool, int, float, complex, np.generic)):
            kind, value = _number(planner, name, argument)
            kinds.append(kind)
            values.append(value)
            continue
        array = planner.read(name, argument)
        kinds.append(Argument(array.dtype, True))
        arrays.append(array)
    shape = common_shape(*(array.shape for array in arrays))
    if shape is None:
        told = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{planner.name}: the shapes {told} do not broadcast to one")
    broadcast = tuple([_broadcast(array, shape) for array in arrays])
    return Taken(names, tuple(kinds), broadcast, tuple(arrays), tuple(values), shape)


def _number(planner: Planner, name: str, argument: complex | np.generic) -> tuple[Argument, complex]:
    if isinstance(argument, np.generic):
        # Also float64, which is a Python float, too: NumPy's numbers have dtypes.
        value: complex = argument.item()
        return Argument(planner.dtype(name, argument.dtype), False), value
    if isinstance(argument, bool):
        return Argument(DType.bool, False), argument
    if isinstance(argument, int):
        if not _INT64.min <= argument <= _INT64.max:
            raise ValueError(
                f"{planner.name}: {name} must have at most 64 bits; numpy.uint64(...) makes large ones"
            )
        return Argument(Weak.int, False), argument
    return Argument(Weak.float if isinstance(argument, float) else Weak.complex, False), argument


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
