"""A library of one's own that blocks while it enqueues, as long as the test wants."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import attrs

import trio_accel as ta
from trio_accel import linalg
from trio_accel.actors import ActorContext
from trio_accel.backends.base import AccelStream, InThread, KernelLibrary
from trio_accel.backends.base.contract.ops import MatmulSpec, OperationSpec
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner


@attrs.frozen
class BlockedScal(linalg.scal.spec):
    """A product enqueued after somebody has written to a pipe, or at once without a pipe."""

    pipe: str = ""


@attrs.frozen
class BlockedMatmul(MatmulSpec):
    """The same with a result."""

    pipe: str = ""


@attrs.define(eq=False)
class _Blocking:
    """Kernels with launches that wait for a pipe, and act on its contents.

    Nothing of them is called while they enqueue.
    """

    _kernels: KernelLibrary
    _plans: set[str] = attrs.field(factory=set)
    _is_busy: bool = False

    @property
    def name(self) -> str:
        return self._kernels.name

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        return self._kernels.operations

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        assert isinstance(spec, (BlockedScal, BlockedMatmul))
        assert not self._is_busy
        if not spec.pipe:
            return None
        kind = type(spec).__name__
        return InThread() if kind in self._plans else InThread(lambda: self._plans.add(kind))

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        assert isinstance(spec, (BlockedScal, BlockedMatmul))
        assert not self._is_busy
        self._is_busy = True
        try:
            self._read(spec, stream)
        finally:
            self._is_busy = False

    def _read(self, spec: BlockedScal | BlockedMatmul, stream: AccelStream) -> None:
        if not spec.pipe:
            self._enqueue(spec, stream)
            return
        assert type(spec).__name__ in self._plans
        said = Path(spec.pipe).read_text(encoding="utf-8")  # returns when whoever writes has closed it
        if said.startswith("enqueue, then "):
            self._enqueue(spec, stream)
            said = said.removeprefix("enqueue, then ")
        if said == "refused":
            raise ta.LibraryError("no room", library="blas", code="size")
        if said == "lost":
            raise ta.ContextPoisonedError("lost while it was enqueued")
        if said == "broken":
            raise RuntimeError("the launch is broken")
        if said == "exit":
            raise SystemExit(3)
        self._enqueue(spec, stream)

    def _enqueue(self, spec: BlockedScal | BlockedMatmul, stream: AccelStream) -> None:
        plain: OperationSpec
        if isinstance(spec, BlockedScal):
            plain = linalg.scal.spec(spec.alpha, spec.x)
        else:
            plain = MatmulSpec(spec.a, spec.b, spec.out)
        self._kernels.enqueue(plain, stream)

    def close(self) -> None:
        assert not self._is_busy
        self._kernels.close()


class BlockingActor(LibraryActor):
    library = "blas"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Blocking(self._kernels)
            yield


class _Ahead(_Blocking):
    """The same, but what may be asked while one of them is called."""

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        assert isinstance(spec, (BlockedScal, BlockedMatmul))
        self._plans.add(type(spec).__name__)
        return InThread() if spec.pipe else None


class AheadActor(LibraryActor):
    """A library with a thread that gets calls in advance."""

    library = "blas"
    hands_ahead = True

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        async with super().lifespan(context):
            self._kernels = _Ahead(self._kernels)
            yield


class OtherActor(BlockingActor):
    """The same, with a stream of its own."""


@attrs.frozen(eq=False)
class Scale(Operation[BlockingActor, ta.AccelRef]):
    """``x *= factor``, once somebody has written to the pipe."""

    x: ta.AccelRef
    factor: float
    pipe: Path | None = None
    library: ClassVar[str] = f"{__name__}:BlockingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        pipe = "" if self.pipe is None else os.fspath(self.pipe)
        return Planned(BlockedScal(self.factor, planner.update("x", self.x), pipe), self.x)


@attrs.frozen(eq=False)
class OtherScale(Scale):
    """The same by another library."""

    library: ClassVar[str] = f"{__name__}:OtherActor"


@attrs.frozen(eq=False)
class AheadScale(Scale):
    """The same by a library with a thread that gets calls in advance."""

    library: ClassVar[str] = f"{__name__}:AheadActor"


@attrs.frozen(eq=False)
class Product(Operation[BlockingActor, ta.AccelRef]):
    """``a @ b``, once somebody has written to the pipe."""

    a: Operand
    b: Operand
    pipe: Path
    library: ClassVar[str] = f"{__name__}:BlockingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        a, b = planner.read("a", self.a), planner.read("b", self.b)
        out = planner.output((a.shape[0], b.shape[1]), a.dtype)
        return Planned(BlockedMatmul(a, b, out.spec, os.fspath(self.pipe)), out)
