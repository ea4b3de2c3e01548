"""A library with a kernel with a plan that raises."""

from __future__ import annotations

from typing import Any

from trio_accel.backends.base.kit.kernels import kernel
from trio_accel.devices import DECLARED, AccelRef, LibraryActor, Operand, operation


class PlannedActor(LibraryActor):
    library = "broken_plans"


@operation("a(n) -> out(n)", actor=PlannedActor)
async def planned(a: Operand) -> AccelRef: ...


def plan(spec: Any, device: Any) -> Any:
    raise ZeroDivisionError("a plan that is broken")


def compute(spec: Any, call: Any) -> None:
    """Is never called."""


for _backend in ("cpu", "cuda", "third"):
    kernel(planned, backend=_backend, plan=plan)(compute)

# Tests of all declared operations would run it, and ask for its row in the table.
del DECLARED["broken_plans.planned"]
