"""The front of a device: what programs hold."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ..actors import Actor, ActorContext, ActorFailedError, ActorStoppedError, Directive, Policy, Ref
from ..backends.base import (
    AccelBackend,
    ContextPoisonedError,
    DeviceInfo,
    DeviceLostError,
    DType,
    DTypeLike,
    MemoryStatistics,
    QueueFullError,
)
from ._blocks import BlockTable
from ._context import ContextActor, Session
from ._engine import Engine, EngineHook, Phase
from ._library import LibraryActor
from ._memory import Empty, Put
from ._operation import Launch, Operation, Planner
from ._options import DeviceOptions
from ._pending import Pending
from ._ref import AccelRef
from ._submissions import OpenLibrary

if TYPE_CHECKING:
    from ..actors import System

__all__ = ["Device", "DeviceActor", "DeviceStatistics", "device_of"]

LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")

_MAX_PENDING = 1024

# A library that cannot be opened is the asker's problem, unless the context is lost over it.
_CONTEXT_DIRECTIVES = {
    Exception: Directive.RESUME,
    ContextPoisonedError: Directive.RESTART,
    DeviceLostError: Directive.RESTART,
}


@attrs.frozen(kw_only=True)
class DeviceStatistics:
    """Counts of one generation of a device.

    Attributes:
        generation: Number of the generation.
        launched: Operations enqueued.
        completed: Operations that completed, with or without an error.
        in_flight: Operations that the backend has now.
        memory: Memory of the device's arrays.
    """

    generation: int
    launched: int
    completed: int
    in_flight: int
    memory: MemoryStatistics


class DeviceActor(Actor):
    """The supervised address of a device: restarts its context, within the device's intensity."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the context; when it is given up, so is the device."""
        options = self._device.options
        try:
            context_ref: Ref[ContextActor] = await context.spawn(
                ContextActor,
                self._device,
                name="context",
                policy=Policy(
                    directives=_CONTEXT_DIRECTIVES,
                    backoff=options.backoff,
                    intensity=options.intensity,
                    grace=options.cancel_grace + 5.0,
                ),
            )
            self._device.context_ref = context_ref
            yield
        finally:
            self._device.end()


class Device:
    """An open device. Made by `System.open_device`; also an async context manager that closes it."""

    def __init__(self, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions, path: str) -> None:
        self.backend = backend
        self.options = options
        self.blocks: BlockTable = BlockTable(info.name)
        self.hooks: list[EngineHook] = []
        self.context_ref: Ref[ContextActor] | None = None
        self._info = info
        self._path = path
        self._actor: Ref[DeviceActor] | None = None
        self._session: Session | None = None
        self._changed = trio.Event()
        self._pending = 0
        self._token = trio.lowlevel.current_trio_token()
        self._is_ended = False

    def __repr__(self) -> str:
        state = "ready" if self._session is not None else "closed" if self._is_ended else "rebuilding"
        return f"<Device {self._path}, {state}, generation {self.generation}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()  # noqa: ASYNC102  # it shields itself

    @property
    def name(self) -> str:
        """Name of the hardware, such as ``"cpu:0"``."""
        return self._info.name

    @property
    def path(self) -> str:
        """Path of the device's actor in the tree."""
        return self._path

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        return self._info

    @property
    def generation(self) -> int:
        """Which context this is, counting from 1."""
        return self.blocks.generation

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that the device has.

        Raises:
            DeviceLostError: The device is closed, lost or being rebuilt.
        """
        return tuple(self.engine().device.libraries)

    def engine(self) -> Engine:
        """The engine of the current generation, for the runtime's own use.

        Raises:
            DeviceLostError: The device is closed, lost or being rebuilt.
        """
        if self._session is None:
            raise DeviceLostError("the device has no context now", device=self.name)
        return self._session.engine

    async def ask(self, operation: Operation[LibraryT, ReplyT], /) -> ReplyT:
        """Run an operation and wait for its reply, which comes when the device has completed it.

        The operation is validated in the calling task. While the device's context is being
        rebuilt, the request waits for it. When cancelled, a queued operation is withdrawn; a
        running one is awaited until the device is done with its buffers, for `cancel_grace`
        seconds at most.

        Raises:
            TypeError, ValueError: A wrong argument; nothing was launched.
            StaleRefError: An array that must not be used any more; nothing was launched.
            NotSupportedError: The backend does not have the operation.
            LibraryError, OutOfMemoryError: The library refused it; the device stays usable.
            ActorFailedError: The library's actor crashed over it and was restarted.
            ContextPoisonedError: The context was lost while it was in flight.
            DeviceLostError: The device is closed, or gave up.
            QueueFullError: Too many requests wait for the context.
        """
        _check_operation(operation)
        while True:
            session = await self._ready()
            planner = Planner(self, operation.operation)
            planned = operation.plan(planner)
            launch = planner.launch(planned.spec)
            library = await self._library(session, operation.library)
            if library is None or self._session is not session:
                # Its blocks are those of a context that is gone: it is planned anew.
                continue
            self._validated(launch)
            session.engine.enter(launch)
            try:
                await _ask(library, launch, session.engine)
            except ActorStoppedError:
                # Never executed, because its context ends: it runs on the next one, if there is one.
                await library.wait_terminated()
                continue
            finally:
                session.engine.over(launch)
            return planned.reply

    def submit(self, operation: Operation[LibraryT, ReplyT], /) -> Pending[ReplyT]:
        """Hand an operation over without waiting; its arrays can be used in further operations at once.

        Submitted operations take effect in the order in which they were handed over, also those of
        different libraries: where they touch the same memory, the device keeps the order, and the
        program waits for nothing in between.

        Returns:
            The operation: ``pending.value`` is its reply, ``await pending.wait()`` its completion. One
            whose producer failed does not run; its error is `InputFailedError`. When it fails, the
            arrays that it was to write or change are spoiled, and their use is refused.

        Raises:
            QueueFullError: As many operations of the library as `in_flight` allows are not done, or the
                context is being rebuilt.
            TypeError, ValueError, StaleRefError, NotSupportedError: As for `ask`; nothing was handed over.
            DeviceLostError: The device is closed, or gave up.
        """
        _check_operation(operation, "submit")
        self._check_run("submit")
        session, context = self._session, self.context_ref
        if session is None or context is None:
            if self._is_ended:
                raise DeviceLostError("the device is closed, or was given up", device=self.name)
            raise QueueFullError("the context is being rebuilt: ask() waits for it", device=self.name)
        session.submissions.check_room(operation.library, self.options.in_flight, self.name)
        planner = Planner(self, operation.operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned.spec)
        self._validated(launch)
        return session.submissions.submit(context, operation.library, launch, planned.reply)

    async def put(self, host: npt.ArrayLike) -> AccelRef:
        """Copy a host array to the device; returns when the host array may be changed again.

        Args:
            host: A NumPy array of any strides and a device dtype (native byte order), or what
                `numpy.asarray` makes one of.

        Raises:
            TypeError: Its dtype is no element type of a device.
            OutOfMemoryError: There is not enough device memory.
        """
        # `asarray` would drop the mask of a masked array, which `Put` refuses.
        array: npt.NDArray[Any] = np.asanyarray(host)
        return await self.ask(Put(array))

    async def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array of zeros."""
        return await self.full(shape, 0, dtype)

    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array to be written; like `zeros`, so that no other program's data shows."""
        return await self.full(shape, 0, dtype)

    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """Make an array with every element set to a value.

        Raises:
            ValueError, TypeError: A negative size, or a value that the dtype cannot hold.
            OutOfMemoryError: There is not enough device memory.
        """
        if isinstance(shape, (int, np.integer)):
            extents: tuple[int, ...] = (int(shape),)
        elif isinstance(shape, Iterable):
            extents = tuple(shape)
        else:
            raise TypeError(f"shape must be a size or a sequence of sizes, got {shape!r}")
        return await self.ask(Empty(extents, DType.of(dtype), value))

    @asynccontextmanager
    async def lease(self, ref: AccelRef, *, write: bool = False) -> AsyncGenerator[npt.NDArray[Any], None]:
        """Hold an array for the host without a copy; see `AccelRef.lease`."""
        session = await self._ready()
        if ref.device is not self:
            raise ValueError(f"lease: the array is on {ref.device.path}, not on {self.path}")
        ref.block.check("lease")
        async with session.engine.lease(ref.spec, write=write) as array:
            # While its turn was waited for, it may have been spoiled or released.
            ref.block.check("lease")
            yield array

    async def synchronize(self) -> None:
        """Wait until everything launched is complete and all dropped memory is given back."""
        session = await self._ready()
        await session.engine.synchronize()
        self.blocks.drain()
        await trio.lowlevel.checkpoint()

    async def watch_generation(self) -> AsyncGenerator[int, None]:
        """Iterate over the generations: the current one first, then each new one; ends with the device.

        Who is slow sees the latest and not each one in between. Close it (``aclosing``) if the loop
        is left early.
        """
        seen = 0
        while not self._is_ended:
            if self._session is not None and self.generation != seen:
                seen = self.generation
                yield seen
            else:
                await self._changed.wait()

    async def statistics(self) -> DeviceStatistics:
        """Count operations and memory of the current generation."""
        session = await self._ready()
        await trio.lowlevel.checkpoint()
        self.blocks.drain()
        engine = session.engine
        return DeviceStatistics(
            generation=session.generation,
            launched=engine.launched,
            completed=engine.completed,
            in_flight=engine.in_flight,
            memory=engine.device.memory(),
        )

    async def close(self) -> None:
        """Finish what is in flight, within `cancel_grace`, and give the device back."""
        self._check_run("close")
        if self._actor is not None:
            with trio.CancelScope(shield=True):
                # Bounded by the actor's grace.
                await self._actor.stop()

    async def start(self, system: System, name: str) -> None:
        """Start the device's actors."""
        options = self.options
        self._actor = await system.spawn(
            DeviceActor,
            self,
            name=name,
            policy=Policy(
                directives={Exception: Directive.STOP},
                intensity=options.intensity,
                grace=options.cancel_grace + 10.0,
            ),
        )

    def attach(self, session: Session) -> None:
        """A context is ready: start its generation."""
        self._session = session
        self.blocks.generation = session.generation
        self.blocks.release = session.engine.release
        self._wake()

    def detach(self) -> None:
        """The context is gone; requests wait for the next."""
        self.blocks.drain()
        self.blocks.lose()
        self._session = None
        self._wake()

    def end(self) -> None:
        """The device is closed or given up: no context follows."""
        self._is_ended = True
        self.blocks.close()
        self._wake()

    def _check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run."""
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:
            token = None
        if token is not self._token:
            raise RuntimeError(
                f"{verb}: device {self.path} belongs to another thread or Trio run; from a thread that "
                "the run has started, use trio.from_thread.run"
            )

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _ready(self) -> Session:
        """The current generation; waits while the context is being rebuilt."""
        self._check_run("ask")
        if self._session is None and not self._is_ended:
            if self._pending >= _MAX_PENDING:
                raise QueueFullError(
                    f"{_MAX_PENDING} requests wait already for the context to be rebuilt", device=self.name
                )
            self._pending += 1
            try:
                while self._session is None and not self._is_ended:
                    await self._changed.wait()
            finally:
                self._pending -= 1
        if self._session is None:
            raise await self._lost()
        return self._session

    async def _lost(self) -> DeviceLostError:
        """Why there is no device any more; a fresh instance for every asker."""
        if self._actor is None:
            return DeviceLostError("the device was never opened", device=self.name)
        error = (await self._actor.wait_terminated()).error
        if error is None:
            return DeviceLostError("the device is closed", device=self.name)
        lost = DeviceLostError(
            f"the device was given up: {error}", device=self.name, generation=self.generation
        )
        lost.__cause__ = error
        return lost

    async def _library(self, session: Session, path: str) -> Ref[LibraryActor] | None:
        """The actor of a library, started on first use; None if the session ended meanwhile.

        A library that is started may belong to the next session already.
        """
        library = session.libraries.get(path)
        if library is not None and not library.is_terminated:
            return library
        assert self.context_ref is not None  # a session is a context's
        try:
            return await self.context_ref.ask(OpenLibrary(path))
        except ActorStoppedError:
            await self._end_of(session)
        except ActorFailedError as error:
            if not isinstance(error.__cause__, ActorStoppedError):
                raise
            # The context was ended while it served this, and not over it.
            await self._end_of(session)
        return None

    def _validated(self, launch: Launch) -> None:
        for hook in tuple(self.hooks):
            hook(Phase.VALIDATE, launch)

    async def _end_of(self, session: Session) -> None:
        while self._session is session:
            await self._changed.wait()


def _check_operation(operation: object, verb: str = "ask") -> None:
    cls: type[object] = type(operation)
    if not isinstance(operation, Operation):
        raise TypeError(f"{verb}: {operation!r} is no operation of a device")
    if not isinstance(getattr(cls, "library", None), str):
        raise TypeError(
            f"{verb}: {cls.__name__} does not say which library actor serves it; "
            "give the class an attribute library = 'package.module:Class'"
        )


async def _ask(library: Ref[LibraryActor], launch: Launch, engine: Engine) -> None:
    try:
        await library.ask(launch)
    except ActorFailedError as error:
        if library.is_terminated and engine.has(launch):
            # The library did not crash over this operation: it ended with its context, for good.
            raise engine.lost(launch, error) from error
        raise


def device_of(operation: str, *operands: Any) -> Device:
    """Find the device that an operation runs on: that of its first operand that is on one.

    Raises:
        TypeError: None of the operands is on a device.
    """
    for operand in operands:
        device = getattr(operand, "device", None)
        if isinstance(device, Device):
            return device
    raise TypeError(
        f"{operation}: no operand is on a device; copy one there first (await device.put(array)), "
        "or ask the device itself (await device.ask(message))"
    )
