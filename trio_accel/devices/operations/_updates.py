"""Updated copies of arrays: `x.at[key].set(values)`, with the names and the meaning of JAX.

The methods only pass on their arguments. `arrays._updates` composes the calls, because it uses functions of
the layers above.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, Generic, SupportsIndex, TypeAlias, TypeVar

import attrs
import numpy as np

from ...actors import named_arguments
from ...backends.base import HostArray
from ..base._refusals import OnDevice
from ._operators import NAMESPACE

__all__ = ["IndexUpdate"]

CallT = TypeVar("CallT")

Part: TypeAlias = "SupportsIndex | slice | EllipsisType | OnDevice | HostArray | None"
Values: TypeAlias = "OnDevice | HostArray | complex | np.generic"


@attrs.frozen(eq=False)
class At(Generic[CallT]):
    """The parts of an array, to update in a copy; see `IndexUpdate`."""

    _array: OnDevice

    def __getitem__(self, key: Part | tuple[Part, ...]) -> IndexUpdate[CallT]:
        return IndexUpdate(self._array, key)


@attrs.frozen(eq=False)
class IndexUpdate(Generic[CallT]):
    """A part of an array, ``x.at[key]``, and the methods that copy the array with another part.

    Each method returns a call of a new array with the shape and dtype of ``x``, which does not change. The
    call has gradients by ``x`` and by `values`.

    The key is one of these:

    * Integers, slices, ``...`` and ``None``, as in ``x[key]``.
    * Integer arrays on the host or the device, for one axis or several. They broadcast to one shape, and the
      part has its axes in NumPy's order. Other axes may have integers and slices.
    * A mask: an array of bool with the shape of ``x``, or with its first axes.

    Negative indices count from the end. An integer outside of its axis raises `IndexError`, and an array with
    such an index fails the call with `OutOfRangeError`, although JAX ignores these. Arrays are not checked if
    the part is empty.

    If arrays of indices contain an element twice, `set` takes the last value in C order, and all other
    methods apply each value. The order of sums and products is undefined, as in `ta.arrays.scatter_nd`.
    `subtract`, `divide` and `power` combine the values first, as in JAX. Equal candidates in `min` and `max`
    share the gradient.

    Values are converted to the dtype of ``x``, and broadcast to the part. For a mask, an array of values
    broadcasts to ``x``, and each element takes the value at its own place. The array has one element, or only
    axes after the mask, or as many axes as ``x``, because other shapes have another meaning in NumPy.

    Attributes:
        array: The array, or its call.
        key: The key.

    Raises:
        TypeError: An index has another type, or `values` is not an array or number, or has a wider kind than
            ``x``: complex for real, or floating for integers. Or the method does not support the dtype: `min`
            and `max` refuse complex numbers, `divide` integers, and only `set` and `get` take bool.
        ValueError: `values` do not broadcast, or the dtype cannot hold a number.
        IndexError: An index is out of range, there are too many, or a mask has another shape.
        NotSupportedError: A mask for `get`, because its elements decide the length of the result; a mask with
            other indices; or, on CUDA, `multiply` of complex128 by integer arrays.
    """

    array: OnDevice
    key: Any

    @named_arguments
    def set(self, values: Values) -> CallT:
        """Return a copy with this part replaced: ``x[key] = values``."""
        return self._updated("set", values)

    @named_arguments
    def add(self, values: Values) -> CallT:
        """Return a copy with values added: `numpy.add.at`."""
        return self._updated("add", values)

    @named_arguments
    def subtract(self, values: Values) -> CallT:
        """Return a copy with values subtracted: `numpy.subtract.at`."""
        return self._updated("subtract", values)

    @named_arguments
    def multiply(self, values: Values) -> CallT:
        """Return a copy with this part multiplied: `numpy.multiply.at`."""
        return self._updated("multiply", values)

    @named_arguments
    def divide(self, values: Values) -> CallT:
        """Return a copy with this part divided: `numpy.divide.at`."""
        return self._updated("divide", values)

    @named_arguments
    def power(self, values: Values) -> CallT:
        """Return a copy with this part raised to powers: `numpy.power.at`."""
        return self._updated("power", values)

    @named_arguments
    def min(self, values: Values) -> CallT:
        """Return a copy with values in place of larger elements: `numpy.minimum.at`."""
        return self._updated("min", values)

    @named_arguments
    def max(self, values: Values) -> CallT:
        """Return a copy with values in place of smaller elements: `numpy.maximum.at`."""
        return self._updated("max", values)

    def get(self) -> CallT:
        """Return this part: ``x[key]``."""
        return self._updated("get", None)

    def _updated(self, method: str, values: Any) -> CallT:
        call: CallT = NAMESPACE[0].updated(self.array, self.key, method, values)
        return call
