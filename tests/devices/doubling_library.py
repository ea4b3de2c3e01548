"""A library from outside with one operation, which doubles an array in place, and two actors for it."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import KernelCall, kernel, ops
from trio_accel.devices import LibraryActor, Operation, Planned, Planner


class DoublingActor(LibraryActor):
    library = __name__


class OtherActor(DoublingActor):
    """The same kernels, on streams of their own."""


@ops.specification
class DoubleSpec(ops.OperationSpec):
    """``array *= 2``."""

    array: ops.ArraySpec = ops.updates()


@attrs.frozen(eq=False)
class Double(Operation[DoublingActor, None]):
    array: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:DoublingActor"

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(DoubleSpec(planner.update("array", self.array)))


@attrs.frozen(eq=False)
class OtherDouble(Double):
    library: ClassVar[str] = f"{__name__}:OtherActor"


@kernel(DoubleSpec, backend="cuda")
def double_cuda(spec: DoubleSpec, call: Any) -> None:
    array = call.array(spec.array)
    call.convert(array, array, scale=2.0)


@kernel(DoubleSpec, backend="cpu")
def double_cpu(spec: DoubleSpec, call: KernelCall) -> None:
    array = call.array(spec.array)
    np.multiply(array, 2, out=array)
