"""A library of one's own that reaches for the socket of its worker and sends what it likes."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import attrs

import trio_accel as ta
from trio_accel.actors import ActorContext
from trio_accel.backends.base import AccelStream, KernelLibrary
from trio_accel.backends.base.contract.ops import OperationSpec
from trio_accel.devices import LibraryActor, Operation, Planned, Planner
from trio_accel.devices.wire._channel import Channel


@attrs.frozen
class SaySpec(OperationSpec):
    array: Any
    payload: bytes
    is_shown: bool


@attrs.frozen(eq=False)
class _Hostile:
    _kernels: KernelLibrary

    @property
    def name(self) -> str:
        return self._kernels.name

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        return frozenset({SaySpec})

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return None

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        assert isinstance(spec, SaySpec)
        # Frozen modules are not listed.
        gc.unfreeze()
        (channel,) = [found for found in gc.get_objects() if isinstance(found, Channel)]
        if not (spec.is_shown and channel._outbox._show(spec.payload)):
            channel._outbox._put(spec.payload)
            channel._outbox._flush(1)

    def close(self) -> None:
        self._kernels.close()


class HostileActor(LibraryActor):
    library = "blas"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Hostile(self._kernels)
            yield


@attrs.frozen(eq=False)
class Say(Operation[HostileActor, ta.AccelRef]):
    """Sends bytes to the application."""

    x: ta.AccelRef
    payload: bytes
    is_shown: bool
    library: ClassVar[str] = f"{__name__}:HostileActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(SaySpec(planner.update("x", self.x), self.payload, self.is_shown), self.x)
