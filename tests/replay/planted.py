"""An operation with a kernel that changes one element by one unit in the last place, on one device, once."""

from __future__ import annotations

from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel.backends.base import HostCall, kernel
from trio_accel.backends.base.kit.checks import NATIVE
from trio_accel.devices import DeclaredSpec, LibraryActor, Operand, operation


class PlantedActor(LibraryActor):
    """Serves this module's kernel."""

    library = "planted"


@operation("x(...) -> out(...)", actor=PlantedActor, dtypes=NATIVE)
async def turned(x: Operand) -> ta.AccelRef:  # type: ignore[empty-body]  # the decorator makes it
    """The negative of each element."""


class Fault:
    """The fault of the kernel.

    Attributes:
        number: Number of the wrong operation on the second device; 0 for none.
        element: The element.
        count: How many operations there were on the second device.
    """

    def __init__(self) -> None:
        self._devices: list[Any] = []
        self.plant(0)

    def plant(self, number: int, element: int = 0) -> None:
        """Have an operation be wrong."""
        self._devices.clear()
        self.number, self.element, self.count = number, element, 0

    def visit(self, device: Any, out: Any) -> None:
        """Change what was computed, if it is the operation."""
        if device not in self._devices:
            self._devices.append(device)
        self.count += device is not self._devices[0]
        if self.number and self.count == self.number and device is not self._devices[0]:
            out.flat[self.element] = np.nextafter(out.flat[self.element], np.inf)


FAULT = Fault()


@kernel(turned, backend="cpu")
def turned_cpu(spec: DeclaredSpec, call: HostCall) -> None:
    """Compute in the thread of the stream."""
    out = call.array(spec.out)
    np.negative(call.array(spec.x), out=out)
    FAULT.visit(call.device, out)
