"""A custom library that has to plan an operation before it enqueues it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import attrs

import trio_accel as ta
from trio_accel import linalg
from trio_accel.actors import ActorContext
from trio_accel.backends.base import AccelStream, KernelLibrary
from trio_accel.backends.base.contract.ops import OperationSpec
from trio_accel.devices import LibraryActor, Operation, Planned, Planner


@attrs.frozen
class PlannedScal(linalg.scal.spec):
    """A product with a plan read from a pipe."""

    pipe: str = ""


@attrs.frozen(eq=False)
class _Planning:
    """Kernels that cannot enqueue an operation before they have read its plan."""

    _kernels: KernelLibrary
    _plans: set[str] = attrs.field(factory=set)

    @property
    def name(self) -> str:
        return self._kernels.name

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        return self._kernels.operations

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        assert isinstance(spec, PlannedScal)
        return None if spec.pipe in self._plans else partial(self._plan, spec.pipe)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        assert isinstance(spec, PlannedScal)
        assert spec.pipe in self._plans
        self._kernels.enqueue(linalg.scal.spec(spec.alpha, spec.x), stream)

    def close(self) -> None:
        self._kernels.close()

    def _plan(self, pipe: str) -> None:
        plan = Path(pipe).read_text(encoding="utf-8")  # returns when whoever writes has closed it
        if plan == "refused":
            raise ta.LibraryError("no plan", library="blas", code="size")
        if plan == "lost":
            raise ta.ContextPoisonedError("lost while it planned")
        if plan == "broken":
            raise RuntimeError("the plan is broken")
        self._plans.add(pipe)


class PlanningActor(LibraryActor):
    library = "blas"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Planning(self._kernels)
            yield


@attrs.frozen(eq=False)
class Negate(Operation[PlanningActor, ta.AccelRef]):
    """``x = -x``, once there is a plan."""

    x: ta.AccelRef
    pipe: Path
    library: ClassVar[str] = f"{__name__}:PlanningActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(PlannedScal(-1.0, planner.update("x", self.x), str(self.pipe)), self.x)
