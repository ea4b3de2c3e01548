"""A custom library with a module that takes long to import in a worker."""

from __future__ import annotations

import os
import sys
import time
from typing import ClassVar

import attrs

import trio_accel as ta
from trio_accel import linalg
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

SECONDS = 1.5


def _compute(seconds: float) -> None:
    if not os.environ["TRIO_ACCEL_TEST_HOLDS"]:
        # clock: the time that this work takes decides nothing
        time.sleep(seconds)
        return
    start = time.perf_counter()
    count = 1_000_000
    sum(range(count))
    # One call of a builtin, in which no other thread runs Python.
    sum(range(int(count * seconds / (time.perf_counter() - start))))


if "pytest" not in sys.modules:
    _compute(SECONDS)


class SlowImportActor(LibraryActor):
    library = "blas"


@attrs.frozen(eq=False)
class Negate(Operation[SlowImportActor, ta.AccelRef]):
    """``x = -x``."""

    x: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:SlowImportActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(-1.0, planner.update("x", self.x)), self.x)
