"""Views, checks of operands, and intermediate arrays for functions of several capabilities."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..backends.base import ArraySpec, DType, HostArray
from ..devices import AccelRef, Operand, device_of, refuse_dtypes, what_to_do
from ..devices.base._views import view_layout

__all__ = [
    "check_array",
    "check_operands",
    "check_ref",
    "diagonal_of",
    "intermediates",
    "on_device",
    "permuted",
    "viewed",
]


def on_device(array: Operand) -> AccelRef:
    """Return an array as one on a device, for type checkers."""
    assert isinstance(array, AccelRef)
    return array


def viewed(array: Operand, change: Callable[[HostArray], HostArray]) -> Operand:
    """View an array as NumPy views one of its layout."""
    if isinstance(array, np.ndarray):
        return change(array)
    ref = on_device(array)
    return AccelRef(ref.block, view_layout(ref.spec, change))


def diagonal_of(array: HostArray, offset: int) -> HostArray:
    """View the diagonals of the last two axes; the offset of NumPy's own function has 32 bits."""
    if array.ndim > 1:
        array = array[..., max(-offset, 0) :, max(offset, 0) :]
    return array.diagonal(0, -2, -1)


def permuted(array: Operand, axes: Sequence[int]) -> Operand:
    """View an array with its axes in another order; the axes are there, once each."""
    if not isinstance(array, AccelRef):
        return array.transpose(axes)
    spec = array.spec
    shape, strides = (tuple([row[axis] for axis in axes]) for row in (spec.shape, spec.strides))
    # NumPy would find out the same, in several times as long.
    return AccelRef(array.block, ArraySpec(spec.block, spec.offset, spec.dtype, shape, strides))


def check_ref(name: str, argument: str, value: object) -> None:
    """Require an array of a device.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, AccelRef):
        description = f"{type(value).__name__}{what_to_do(value)}"
        raise TypeError(f"{name}: {argument} must be an AccelRef, got {description}")


def check_array(name: str, **arrays: object) -> None:
    """Require arrays.

    Raises:
        TypeError: One is none.
    """
    for argument, array in arrays.items():
        if not isinstance(array, (AccelRef, np.ndarray)):
            description = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"{name}: {argument} must be an AccelRef or a NumPy array, got {description}")


def check_operands(name: str, **arrays: Any) -> DType:
    """Refuse values that are not arrays, arrays without one on a device, and arrays of several dtypes.

    Returns:
        The dtype.

    Raises:
        TypeError: In these cases.
    """
    device_of(name, *arrays.values())
    check_array(name, **arrays)
    dtypes = {argument: DType.of(array.dtype) for argument, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        hosts = [argument for argument, array in arrays.items() if not isinstance(array, AccelRef)]
        refuse_dtypes(name, dtypes, hosts)
    return next(iter(dtypes.values()))


@contextmanager
def intermediates() -> Generator[Callable[[AccelRef], AccelRef]]:
    """Release the intermediate arrays of a function, however it ends.

    An error keeps the frames that it passed, with all their references, so their arrays would stay as long as
    the error does.

    Yields:
        A function that takes such an array, and returns it.
    """
    arrays: list[AccelRef] = []

    def take(array: AccelRef) -> AccelRef:
        arrays.append(array)
        return array

    try:
        yield take
    finally:
        for array in arrays:
            array.release()
