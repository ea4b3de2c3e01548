"""A library of one's own after whose operation the stream's driver takes long to answer a query."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import attrs

import trio_accel as ta
from trio_accel import linalg
from trio_accel.actors import ActorContext
from trio_accel.backends.base import AccelStream, KernelLibrary
from trio_accel.backends.base.contract.ops import OperationSpec
from trio_accel.devices import LibraryActor, Operation, Planned, Planner


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@attrs.frozen(eq=False)
class _Querying:
    _kernels: KernelLibrary

    @property
    def name(self) -> str:
        return self._kernels.name

    @property
    def operations(self) -> frozenset[str]:
        return self._kernels.operations

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return self._kernels.prepare(spec)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        assert isinstance(spec, linalg.scal.spec)
        seconds = spec.alpha.real
        # clock: the time that this work takes decides nothing
        take = time.sleep if seconds > 0 else _compute
        type(stream).failure = property(lambda _: take(abs(seconds)))
        self._kernels.enqueue(attrs.evolve(spec, alpha=-1.0), stream)

    def close(self) -> None:
        self._kernels.close()


class QueryingActor(LibraryActor):
    library = "blas"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Querying(self._kernels)
            yield


@attrs.frozen(eq=False)
class SlowQueries(Operation[QueryingActor, ta.AccelRef]):
    """``x = -x``; from now on each query of this worker sleeps so many seconds, or computes, if negative."""

    x: ta.AccelRef
    seconds: float
    library: ClassVar[str] = f"{__name__}:QueryingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(self.seconds, planner.update("x", self.x)), self.x)
