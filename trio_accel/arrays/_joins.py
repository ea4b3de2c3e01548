"""Joins of arrays: copies to places in one array, by the actor of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from ..backends.base.contract.ops import JoinSpec
from ..devices import AccelRef, MemoryActor, Operand, Operation, Planned, Planner, device_of
from ..devices.base._views import indexed
from ..devices.operations._calls import composed
from ..devices.operations._plan_source import written
from ..expressions import Out, axis_of, promoted_dtype
from ._checks import flat, whole

__all__ = ["concat", "stack"]


@composed
async def concat(arrays: Sequence[Operand], *, axis: int | None = 0, out: Out = None) -> AccelRef:
    """Join arrays along an axis that they have.

    Args:
        arrays: Arrays of the same shape but for this axis; at least one, and one on the device. Their dtypes
            are promoted to one by the array API standard.
        axis: The axis, or None to join the elements of each in C order.
        out: Array to write to, of any strides.

    Returns:
        The joined array.

    Raises:
        TypeError: The dtypes are not promoted to one, or that is not the dtype of `out`.
        ValueError: No arrays, shapes that differ, an axis that there is not, or `out` has another shape or
            shares memory with an array.
    """
    given = tuple(arrays)
    return await device_of("arrays.concat", *given, out).ask(_Join("concat", given, axis, out))


@composed
async def stack(arrays: Sequence[Operand], *, axis: int = 0, out: Out = None) -> AccelRef:
    """Join arrays along a new axis of the result; arguments and errors are those of `concat`.

    Args:
        arrays: Arrays of one shape.
        axis: The place of the new axis in the result.
        out: Array to write to, of any strides.
    """
    given = tuple(arrays)
    whole("arrays.stack", "axis", axis)
    return await device_of("arrays.stack", *given, out).ask(_Join("stack", given, axis, out))


@attrs.frozen(eq=False)
class _Join(Operation[MemoryActor, AccelRef]):
    library: ClassVar[str] = "trio_accel.devices:MemoryActor"
    function: str
    arrays: tuple[Operand, ...]
    axis: int | None
    out: AccelRef | None

    @property
    def operation(self) -> str:
        """Name of the function."""
        return f"arrays.{self.function}"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find dtype and shape; a stack joins arrays that have one more axis."""
        name, is_new = planner.name, self.function == "stack"
        sources = [planner.read(f"arrays[{index}]", array) for index, array in enumerate(self.arrays)]
        dtype = promoted_dtype(name, {f"arrays[{index}]": one.dtype for index, one in enumerate(sources)})
        if self.axis is None:
            sources = [flat(planner, source) for source in sources]
        ndim = sources[0].ndim + is_new
        first = indexed(sources[0], (None,)) if is_new else sources[0]
        axis = 0 if self.axis is None else axis_of(name, first, self.axis)
        before, behind = (slice(None),) * axis, axis if is_new else axis + 1
        for index, source in enumerate(sources):
            others = [(*one.shape[:axis], *one.shape[behind:]) for one in (sources[0], source)]
            if source.ndim + is_new != ndim or others[0] != others[1]:
                rule = "of one shape" if is_new else f"of the same shape but for axis {axis}"
                raise ValueError(
                    f"{name}: arrays must be {rule}, got {sources[0].shape} and, as number {index}, "
                    f"{source.shape}"
                )
        if is_new:
            sources = [indexed(source, (*before, None)) for source in sources]
        length = sum(source.shape[axis] for source in sources)
        shape = (*sources[0].shape[:axis], length, *sources[0].shape[axis + 1 :])
        given = {f"arrays[{index}]": source for index, source in enumerate(sources)}
        ref, out = written(planner, "out", self.out, (shape, dtype), None, **given)
        return Planned(JoinSpec(axis, tuple(sources), 0, out), ref)
