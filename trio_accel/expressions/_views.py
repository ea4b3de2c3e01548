"""Views of arrays and of NumPy's, and checks of operands that several capabilities share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import DType
from ..backends.base.ops import ArraySpec
from ..devices import AccelRef, Operand, device_of
from ..devices.base._refusals import refuse_dtypes, what_to_do
from ..devices.base._views import seen

__all__ = ["check_operands", "on_device", "permuted", "viewed"]


def on_device(array: Operand) -> AccelRef:
    """Tell a type checker that an array is on a device."""
    assert isinstance(array, AccelRef)
    return array


def viewed(array: Operand, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Operand:
    """View an array as NumPy views one of its layout."""
    if isinstance(array, AccelRef):
        return AccelRef(array.block, seen(array.spec, change))
    return change(array)


def permuted(array: Operand, axes: Sequence[int]) -> Operand:
    """View an array with its axes in another order; the axes are there, once each."""
    if not isinstance(array, AccelRef):
        return array.transpose(axes)
    spec = array.spec
    shape, strides = (tuple([row[axis] for axis in axes]) for row in (spec.shape, spec.strides))
    # What NumPy would find out takes several times as long.
    return AccelRef(array.block, ArraySpec(spec.block, spec.offset, spec.dtype, shape, strides))


def check_operands(name: str, **given: Any) -> DType:
    """Refuse what is no array, arrays of which none is on a device, and those of several dtypes.

    Returns:
        The dtype.

    Raises:
        TypeError: In these cases.
    """
    device_of(name, *given.values())
    for argument, array in given.items():
        if not isinstance(array, (AccelRef, np.ndarray)):
            told = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"{name}: {argument} must be an array, got {told}")
    dtypes = {argument: DType.of(array.dtype) for argument, array in given.items()}
    if len(set(dtypes.values())) > 1:
        hosts = [argument for argument, array in given.items() if not isinstance(array, AccelRef)]
        refuse_dtypes(name, dtypes, hosts)
    return next(iter(dtypes.values()))
