"""A custom library that enqueues slowly: with the interpreter free for others, or not."""

from __future__ import annotations

import ctypes
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


@attrs.frozen(eq=False)
class _Slow:
    """Kernels that take as many seconds to be enqueued as their factor."""

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
        if spec.alpha.real > 0:
            # clock: the time that this work takes decides nothing
            time.sleep(spec.alpha.real)
        else:
            # Through this loader functions are called with the interpreter's lock held.
            ctypes.PyDLL(None).sleep(int(-spec.alpha.real))
        self._kernels.enqueue(attrs.evolve(spec, alpha=-1.0), stream)

    def close(self) -> None:
        self._kernels.close()


class SlowActor(LibraryActor):
    library = "blas"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Slow(self._kernels)
            yield


@attrs.frozen(eq=False)
class Sleep(Operation[SlowActor, ta.AccelRef]):
    """``x = -x``, enqueued in this many seconds."""

    x: ta.AccelRef
    seconds: float
    library: ClassVar[str] = f"{__name__}:SlowActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(self.seconds, planner.update("x", self.x)), self.x)


@attrs.frozen(eq=False)
class Hold(Operation[SlowActor, ta.AccelRef]):
    """The same, and meanwhile no other thread of the process runs Python."""

    x: ta.AccelRef
    seconds: int
    library: ClassVar[str] = f"{__name__}:SlowActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(-float(self.seconds), planner.update("x", self.x)), self.x)
