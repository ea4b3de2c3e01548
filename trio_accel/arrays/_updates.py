"""Updated copies of arrays: the calls that `x.at[key]` makes.

Three kinds of keys have their own compositions:

* Integers, slices and None select a view. A copy of the array gets the new part by `assign`.
* A mask selects by `where`. Elements outside of the mask are kept out of the arithmetic, because a division
  by 0 there would make the gradient NaN.
* Arrays of integers: the indexed axes become the first axes of the view, and a copy of it gets the values by
  `scatter_nd`. With "set", `scatter_nd` keeps any of several values for an element. So `set` numbers the
  values, scatters the numbers with "max", and then gathers the values by the numbers.

A write in place does not have a gradient. So each is wrapped by a function that returns the written copy, and
`gradients._update_rules` has a rule for its name.
"""

# Operands are arrays and calls, and the namespace is untyped.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ..actors import silence
from ..backends.base import DType, Ints, NotSupportedError, check_same_kind, element
from ..backends.base.contract.ops import common_shape
from ..devices import AccelRef, ArrayFunction, Call, integer, shown, what_to_do
from ..devices.base._refusals import OnDevice
from ..devices.front._slots import Slot
from ..devices.operations._chain import METHODS
from ..expressions import Scatter

__all__ = ["updated"]

_FUNCTIONS = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "divide": "divide",
    "power": "pow",
    "min": "minimum",
    "max": "maximum",
}
# Methods that combine all values of an element first: by which other method, and from which array.
_COMBINED = {
    "subtract": ("add", "zeros_like"),
    "divide": ("multiply", "ones_like"),
    "power": ("multiply", "ones_like"),
}


def updated(xp: Any, x: Any, key: Any, method: str, values: Any) -> Call[AccelRef]:
    """Return an updated copy of an array, or its part for "get"; see `IndexUpdate`.

    Args:
        xp: The namespace of calls.
        x: The array or call.
        key: The key.
        method: The name of the method.
        values: The values.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    try:
        call: Call[AccelRef] = _Update(xp, f"at.{method}", method, x).by(parts, values)
        return call
    except Exception:
        silence(x, parts, values)
        raise


@attrs.frozen(eq=False)
class _Key:
    """A key without masks.

    Attributes:
        index: The integers, slices and None for a view; a whole slice for each array of indices.
        indices: The arrays of indices.
        axes: The indexed axes in the view.
        common: The shape that the indices broadcast to.
        first: The position of the common axes in the part.
    """

    index: tuple[int | slice | None, ...]
    indices: Sequence[Any]
    axes: Sequence[int]
    common: Ints
    first: int


@attrs.frozen(eq=False)
class _Update:
    """An update of an array.

    Attributes:
        xp: The namespace of calls.
        name: The method's name in errors.
        method: The name of the method.
        x: The array or call.
    """

    xp: Any
    name: str
    method: str
    x: Any

    def by(self, parts: Sequence[Any], values: Any) -> Any:
        """Return the updated copy, or the part, by the parts of a key."""
        is_get = self.method == "get"
        masks = [part for part in parts if _is_array(part) and DType.of(part.dtype) is DType.bool]
        if masks and (is_get or len(parts) > 1):
            raise NotSupportedError(
                f"{self.name}: a mask must be the only index of an update; use ta.arrays.where, or compress "
                "for a part"
            )
        if is_get:
            return self._part(self._read(parts))
        self._check_dtype()
        values = self._converted(values)
        return self._by_mask(masks[0], values) if masks else self._by_key(self._read(parts), values)

    def _check_dtype(self) -> None:
        refused = {"divide": ("bool", "int", "uint"), "min": ("bool", "complex"), "max": ("bool", "complex")}
        if self.x.dtype.kind in refused.get(self.method, () if self.method == "set" else ("bool",)):
            raise TypeError(f"{self.name}: the array is of {self.x.dtype}; cast it first: x.cast(...)")

    def _converted(self, values: Any) -> Any:
        """Return values with the dtype of the array, or as a number that it can hold."""
        dtype: DType = self.x.dtype
        if isinstance(values, Slot):
            values.refuse()
        if not _is_array(values):
            if not isinstance(values, (bool, int, float, complex, np.generic)):
                advice = what_to_do(values)
                raise TypeError(
                    f"{self.name}: values must be an array or a number, got {shown(values)}{advice}"
                )
            number = element(self.name, "values", values, dtype)
            # True becomes 1, because the standard does not promote bool with numbers.
            return bool(number) if dtype is DType.bool else +number
        dtype_of_values = DType.of(values.dtype)
        if dtype_of_values is dtype:
            return values
        check_same_kind(self.name, "values", dtype_of_values, dtype)
        if isinstance(values, np.ndarray):
            return values.astype(dtype.dtype)
        converted = values.cast(dtype)
        # Its shape may be refused.
        silence(converted)
        return converted

    def _read(self, parts: Sequence[Any]) -> _Key:
        """Read the parts of a key without masks.

        Raises:
            TypeError, IndexError: See `IndexUpdate`.
        """
        name, ndim = self.name, self.x.ndim
        ellipses = [number for number, part in enumerate(parts) if part is ...]
        count = sum(part is not None for part in parts) - len(ellipses)
        if len(ellipses) > 1 or count > ndim:
            raise IndexError(
                f"{name}: the key must have at most one ... and {ndim} indices, got {len(ellipses)} and "
                f"{count}"
            )
        position = ellipses[0] if ellipses else len(parts)
        rest = [slice(None)] * (ndim - count)
        index, indices, axes = list[Any](), list[Any](), list[int]()
        for part in (*parts[:position], *rest, *parts[position + 1 :]):
            if part is None or isinstance(part, slice):
                index.append(part)
                continue
            if not _is_array(part):
                index.append(integer(name, "an index", part, "an integer, a slice, ..., None or an array"))
                continue
            if DType.of(part.dtype).kind not in ("int", "uint"):
                raise TypeError(f"{name}: indices must have an integer dtype or bool, got {part.dtype}")
            axes.append(sum(not isinstance(item, int) for item in index))
            index.append(slice(None))
            indices.append(part)
        shapes = [tuple(array.shape) for array in indices]
        common = common_shape(*shapes)
        if common is None:
            raise IndexError(f"{name}: the shapes {', '.join(map(str, shapes))} of indices do not broadcast")
        first = 0
        # NumPy has the common axes at the beginning if anything is between indices, even a ... without axes.
        # Integers count as indices.
        fancy = [
            n for n, part in enumerate(parts) if not (part is None or part is ... or isinstance(part, slice))
        ]
        if indices and fancy[-1] - fancy[0] == len(fancy) - 1:
            first = fancy[0] + (len(rest) - 1) * (position < fancy[0])
        return _Key(tuple(index), indices, axes, common, first)

    def _part(self, key: _Key) -> Any:
        if not key.indices:
            return Call[AccelRef](METHODS["__getitem__"], (self.x, key.index))
        # A range could not be a part of a plan's key.
        front, rear = [*range(len(key.axes))], [*range(len(key.common))]
        taken = self.xp.gather_nd(self.xp.moveaxis(self.x[key.index], key.axes, front), tuple(key.indices))
        return self.xp.moveaxis(taken, rear, [key.first + axis for axis in rear])

    def _by_mask(self, mask: Any, values: Any) -> Any:
        xp, x, shape = self.xp, self.x, _shape(values)
        rest = x.ndim - mask.ndim
        if tuple(mask.shape) != x.shape[: mask.ndim]:
            raise IndexError(
                f"{self.name}: a mask must have the array's shape {x.shape}, or the shape of its first axes, "
                f"got {tuple(mask.shape)}"
            )
        if math.prod(shape) == 1:
            values = values.reshape(()) if shape else values
        elif len(shape) not in (x.ndim, *range(rest + 1)) or common_shape(shape, x.shape) != x.shape:
            raise ValueError(
                f"{self.name}: values for a mask must be a number, or have {x.ndim} axes and broadcast to "
                f"{x.shape}, got shape {shape}; use ta.arrays.broadcast_to"
            )
        is_selected = mask.reshape((*mask.shape, *(1,) * rest))
        if self.method != "set":
            inner = xp.where(is_selected, values, 1) if _is_array(values) else values
            values = self._combined(xp.where(is_selected, x, 1), inner)
        return xp.where(is_selected, values, x)

    def _combined(self, x: Any, values: Any) -> Any:
        return getattr(self.xp, _FUNCTIONS[self.method])(x, values)

    def _by_key(self, key: _Key, values: Any) -> Any:
        view, axes = self.x[key.index], key.axes
        # Only its layout may be needed.
        silence(view)
        rest = [extent for axis, extent in enumerate(view.shape) if axis not in axes]
        shape = (*rest[: key.first], *key.common, *rest[key.first :])
        if common_shape(_shape(values), shape) != shape:
            raise ValueError(
                f"{self.name}: values of shape {_shape(values)} do not broadcast to the part's shape {shape}"
            )
        if 0 in shape:
            # Nothing changes.
            silence(values, *key.indices)
            return self.x.copy()
        if key.indices:
            front, rear = [*range(len(axes))], [*range(len(key.common))]
            if _is_array(values):
                wide = values.reshape((*(1,) * (len(shape) - values.ndim), *values.shape))
                library = np if isinstance(values, np.ndarray) else self.xp
                values = library.moveaxis(wide, [key.first + axis for axis in rear], rear)
            moved = attrs.evolve(self, x=self.xp.moveaxis(view, axes, front))
            values = self.xp.moveaxis(moved.by_indices(key.indices, key.common, values), front, axes)
            if all(item == slice(None) for item in key.index):
                return values
        elif self.method != "set":
            values = self._combined(view, values)
        copied = self.x.copy()
        return Call[AccelRef](
            _REPLACED, (copied[key.index].assign(values), copied, self.x, values, key.index)
        )

    def by_indices(self, indices: Sequence[Any], common: Ints, values: Any) -> Any:
        """Return a copy with elements updated by indices of the first axes.

        Args:
            indices: Arrays of indices, one for each axis at the beginning.
            common: The shape that they broadcast to.
            values: A number, or values that broadcast to the selected part.
        """
        xp, x = self.xp, self.x
        if self.method in _COMBINED:
            method, start = _COMBINED[self.method]
            first = attrs.evolve(self, method=method, x=getattr(xp, start)(x))
            return self._combined(x, first.by_indices(indices, common, values))
        if self.method != "set":
            written = xp.scatter_nd(x.copy(), tuple(indices), values, reduce=self.method)
            return Call[AccelRef](_SCATTERED[self.method], (written, x, values, list(indices)))
        count = len(indices)
        rest = x.shape[count:]
        steps = [math.prod(common[axis + 1 :]) for axis in range(len(common))]
        # -1 for an element that stays, and otherwise the number of its last value in C order.
        numbers = xp.full_like(x[(..., *(0,) * len(rest))], -1, dtype="int64")
        winners = _numbering(count, len(common))(numbers, *indices, *steps, shape=common)
        if _is_array(values):
            library = np if isinstance(values, np.ndarray) else xp
            wide = library.broadcast_to(values, (*common, *rest))
            rows = library.reshape(wide, (math.prod(common), *rest))
            values = xp.take(rows, xp.maximum(winners, 0), axis=0)
        return xp.where((winners >= 0).reshape((*x.shape[:count], *(1,) * len(rest))), values, x)


def _is_array(part: Any) -> bool:
    return isinstance(part, (OnDevice, np.ndarray))


def _shape(values: Any) -> Ints:
    return tuple(values.shape) if _is_array(values) else ()


@functools.cache
def _numbering(count: int, ndim: int) -> Scatter:
    """Return the scatter that keeps the last number for each index, in C order."""
    names = [f"indices_{number}" for number in range(count)]
    steps = [f"s{axis}" for axis in range(ndim)]
    number = " + ".join(f"i({axis}) * {step}" for axis, step in enumerate(steps)) or "0"
    return Scatter(
        f"numbers[{', '.join(names)}]",
        "max",
        inputs=("numbers", *names, *steps),
        value=number,
        operation="arrays.scatter_nd",
    )


def _written(written: AccelRef, *_: object) -> AccelRef:
    return written


def _copied(_: object, copied: AccelRef, *__: object) -> AccelRef:
    return copied


_REPLACED = ArrayFunction("AccelRef.at.set", _copied, "value", takes_hosts=True)
_SCATTERED = {
    method: ArrayFunction(f"AccelRef.at.{method}", _written, "value", takes_hosts=True)
    for method in ("add", "multiply", "min", "max")
}
