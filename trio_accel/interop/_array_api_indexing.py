"""Indexing by arrays: a view of what has no array, then `gather_nd` and `scatter_nd` of the others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from .. import arrays
from ..backends.base import DType
from ..devices import AccelRef

__all__ = ["get_part", "set_part"]

# Of the names of functions that are looked up, so that this module stands before they do.
_arrays: Any = arrays
_Key: TypeAlias = Any


async def get_part(x: AccelRef, key: _Key) -> AccelRef:
    """Return the part of an array that a key chooses; see `Array.__getitem__`."""
    if _is_one_truth(key):
        # By the standard, what an array of truth values chooses is a copy with one more axis.
        return await x[None][: int(await _number(key))].copy()
    parts = await _without_masks(x, key)
    if not any(isinstance(part, AccelRef) for part in parts):
        return x[tuple(parts)]
    chosen = _Chosen.of(x, parts)
    found = await arrays.gather_nd(chosen.view, chosen.indices)
    return _moved(found, 0, chosen.ndim, chosen.first)


async def set_part(x: AccelRef, key: _Key, value: Any) -> None:
    """Write to the part of an array that a key chooses; see `Array.__setitem__`."""
    if _is_mask(key) and (not getattr(value, "shape", ()) or not getattr(key, "shape", ())):
        await _set_where(x, key, value)
        return
    parts = await _without_masks(x, key)
    if not any(isinstance(part, AccelRef) for part in parts):
        await x[tuple(parts)].assign(value)
        return
    chosen = _Chosen.of(x, parts)
    if getattr(value, "ndim", 0) > chosen.view.ndim - len(chosen.indices) - chosen.first:
        # It has some of the axes that are moved: then it has all of them.
        value = _moved(arrays.broadcast_to(value, chosen.shape), chosen.first, chosen.ndim, 0)
    await arrays.scatter_nd(chosen.view, chosen.indices, value)


@attrs.frozen(eq=False)
class _Chosen:
    """What arrays of whole numbers choose of an array.

    Attributes:
        view: The array, with the axes first that they are for.
        indices: An array for each of these axes.
        ndim: How many axes they broadcast to.
        first: Before which of the other axes these are in the result.
        shape: The shape of the result.
    """

    view: AccelRef
    indices: tuple[Any, ...]
    ndim: int
    first: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: AccelRef, parts: Sequence[Any]) -> _Chosen:
        is_index = [not (part is None or isinstance(part, slice)) for part in parts]
        view = x[tuple(slice(None) if chosen else part for part, chosen in zip(parts, is_index, strict=True))]
        is_index += [False] * (view.ndim - len(parts))
        axes = [axis for axis, chosen in enumerate(is_index) if chosen]
        others = [axis for axis, chosen in enumerate(is_index) if not chosen]
        indices = tuple(
            part if isinstance(part, AccelRef) else np.asarray(part)
            for part, chosen in zip(parts, is_index, strict=False)
            if chosen
        )
        try:
            shape = np.broadcast_shapes(*(index.shape for index in indices))
        except ValueError:
            told = ", ".join(str(index.shape) for index in indices)
            raise IndexError(f"index: the shapes {told} of the indices do not broadcast to one") from None
        # As in NumPy: in the place of the indices if they stand together, else in front.
        first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
        view = view.transpose((*axes, *others))
        rest = view.shape[len(axes) :]
        return cls(view, indices, len(shape), first, (*rest[:first], *shape, *rest[first:]))


async def _set_where(x: AccelRef, mask: _Key, value: Any) -> None:
    if _is_one_truth(mask):
        if await _number(mask):
            await x[None].assign(value)
        return
    _check_mask(x, mask, 0)
    if mask.size:
        seen = mask.reshape((*mask.shape, *(1,) * (x.ndim - mask.ndim)))
        await x.assign(await _arrays.where(seen, value, x))


async def _without_masks(x: AccelRef, key: _Key) -> list[Any]:
    """Return the items of a key, with whole numbers in place of truth values, and slices in place of dots."""
    given: tuple[_Key, ...] = key if _is_several(key) else (key,)
    used = sum(_axes(part) for part in given)
    if used > x.ndim or sum(part is Ellipsis for part in given) > 1:
        raise IndexError(
            f"index: {used} axes are indexed of an array of shape {x.shape}, with at most one ..."
        )
    parts: list[Any] = []
    axis = 0
    for part in given:
        if part is Ellipsis:
            parts += [slice(None)] * (x.ndim - used)
            axis += x.ndim - used
        elif _is_one_truth(part):
            raise IndexError("index: one truth value is an index by itself only")
        elif _is_mask(part):
            _check_mask(x, part, axis)
            parts += await _arrays.nonzero(part)
        elif isinstance(part, AccelRef) and part.dtype.kind not in ("int", "uint"):
            raise IndexError(f"index: arrays must be of whole numbers or truth values, got {part.dtype}")
        else:
            is_one = isinstance(part, AccelRef) and not part.shape
            parts.append(operator.index(await part.item()) if is_one else part)
        axis += _axes(part)
    return parts


def _is_several(key: object) -> bool:
    return isinstance(key, tuple)


def _axes(part: _Key) -> int:
    if part is None or part is Ellipsis or _is_one_truth(part):
        return 0
    return part.ndim if _is_mask(part) else 1


def _is_mask(part: _Key) -> bool:
    return isinstance(part, (bool, np.bool)) or (isinstance(part, AccelRef) and part.dtype is DType.bool)


def _is_one_truth(part: _Key) -> bool:
    return _is_mask(part) and not getattr(part, "shape", ())


async def _number(part: _Key) -> Any:
    return await part.item() if isinstance(part, AccelRef) else part


def _check_mask(x: AccelRef, mask: AccelRef, axis: int) -> None:
    """Require that an array of truth values has the shape of what it chooses from; none is for no element."""
    of = x.shape[axis : axis + mask.ndim]
    if len(of) < mask.ndim or any(
        given not in (0, there) for given, there in zip(mask.shape, of, strict=True)
    ):
        raise IndexError(f"index: truth values of shape {mask.shape} do not fit the axes {of} of the array")


def _moved(x: AccelRef, source: int, count: int, to: int) -> AccelRef:
    """Move axes that stand together to another place."""
    axes = list(range(x.ndim))
    moved, others = axes[source : source + count], axes[:source] + axes[source + count :]
    return x.transpose((*others[:to], *moved, *others[to:]))
