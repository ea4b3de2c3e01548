"""Libraries that fail in a worker: at their import, at a place chosen by the program, or at their opening."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import attrs

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import MatmulSpec
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

if "TRIO_ACCEL_TEST_BROKEN" in os.environ:
    raise ImportError("this module is broken on purpose")


class BrokenActor(LibraryActor):
    library = "blas"


class ExitingActor(LibraryActor):
    """Ends the process that opens it."""

    library = "blas"

    def __init__(self, engine: object) -> None:
        os._exit(3)


class LosingActor(LibraryActor):
    """Finds the first context lost when it is opened."""

    library = "blas"

    def __init__(self, engine: Any) -> None:
        if engine.generation == 1:
            raise ta.ContextPoisonedError("an illegal address")
        super().__init__(engine)


@attrs.frozen(eq=False)
class Negate(Operation[LosingActor, ta.AccelRef]):
    """``x = -x``."""

    x: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:LosingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(-1.0, planner.update("x", self.x)), self.x)


@attrs.frozen(eq=False)
class Square(Operation[LosingActor, ta.AccelRef]):
    """``x @ x``, in a new array."""

    x: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:LosingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        x = planner.read("x", self.x)
        out = planner.output(x.shape, x.dtype)
        return Planned(MatmulSpec(x, x, out.spec), out)


class AlwaysLosingActor(LibraryActor):
    """Finds each context lost when it is opened."""

    library = "blas"

    def __init__(self, engine: Any) -> None:
        raise ta.ContextPoisonedError("an illegal address")


class SquareInVain(Square):
    """The same, by a library that never opens."""

    library: ClassVar[str] = f"{__name__}:AlwaysLosingActor"
