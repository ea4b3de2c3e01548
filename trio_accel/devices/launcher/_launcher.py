"""The launcher, which starts the worker processes of a system and outlives all of them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import (
    Actor,
    ActorContext,
    ActorError,
    ActorSystem,
    Backoff,
    DeferredReply,
    Intensity,
    Policy,
    Ref,
    Request,
    handles,
    open_system,
)
from ...backends import resolve
from ...backends.base import AccelError, Ints, NotSupportedError, Strs
from ..base._errors import lost_descriptors
from ..base._options import Preload
from ..base._statistics import processor_time
from ._launcher_process import describe_exit, is_dead
from ._link import EndOfLink, ImportsAhead, LauncherError, LauncherLink, LauncherReport

__all__ = [
    "Launcher",
    "LauncherActor",
    "LauncherError",
    "StartWorker",
    "WorkerProcess",
    "describe_workers",
    "open_launcher",
]

_END = 2.0
_WITH_LAUNCHER = "ended with its launcher"
# D79: one second after its start, a process counts as working, which resets the back-off.
_POLICY = Policy(backoff=Backoff(base=0.1, maximum=2.0, reset_after=1.0))
# The devices that order workers count its failures, so these must not end the system.
_ALWAYS = Policy(intensity=Intensity(sys.maxsize, 1.0), grace=2 * _POLICY.grace)
_logger = logging.getLogger("trio_accel.devices")

# The indexes of two fields after the name in a process's stat file; see proc_pid_stat(5).
_FLAGS, _STATUS = 6, -1
_IS_EXITING = 0x4


@attrs.frozen
class StartWorker(Request["LauncherActor", "WorkerProcess"]):
    """Start a worker process; the reply follows when its program has begun.

    If the caller is cancelled, its cancellation is delivered after the worker's end. With
    ``abandon_on_cancel`` the worker would lack an owner, and live until the launcher ends.

    Attributes:
        arguments: Its command line after `sys.executable` and `interpreter_options`.
        descriptors: Descriptors that it gets as 3, 4, 5 and so on. They stay the caller's.
        preload: Modules to import in advance, found by the `sys.path` of this program. The launcher imports
            them once; the worker is a fork of it, and runs the text after ``-c``. Without them, or if a fork
            is not possible, the worker is a fresh interpreter, isolated like the launcher.

    If the launcher dies before that, the next one starts the worker. If it died of imports, no other tries
    them.

    Raises:
        LauncherError: The worker could not be started, or a second launcher died because of it.
        ActorFailedError: The launcher's actor ended meanwhile.
    """

    arguments: Strs = attrs.field(converter=tuple[str, ...])
    descriptors: Ints = attrs.field(default=(), converter=tuple[int, ...])
    preload: Strs = attrs.field(default=(), converter=tuple[str, ...])


@attrs.frozen
class Order:
    """A worker to start, and its caller.

    Attributes:
        message: The request.
        reply: Receives the worker.
        is_again: Whether a launcher has died because of it.
    """

    message: StartWorker
    reply: DeferredReply[WorkerProcess]
    is_again: bool = False


class LauncherActor(Actor):
    """Holds a launcher process. When it dies, all workers die with it, and another one is started."""

    inherits_context = False
    expected_crashes = (LauncherError,)
    prints_crashes = True

    def __init__(self, front: Launcher) -> None:
        self._front = front
        self._link: LauncherLink
        self._numbers = itertools.count(1)
        self._orders: dict[int, Order] = {}
        self._workers: dict[int, WorkerProcess] = {}
        # The modules that the process has imported for workers.
        self._imported: set[str] = set()

    @asynccontextmanager
    @enable_ki_protection
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the process. Its workers end with it, and it has ended when this returns."""
        try:
            self._link = link = await LauncherLink.open()
        except AccelError as error:
            self._front.refuse(error)
            raise
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.write)
                nursery.start_soon(link.watch, self._is_asked)
                nursery.start_soon(self._read)
                context.show_process(link.pid)
                for order in self._front.attach(link):
                    self._accept(order)
                # The preloaded imports follow the waiting orders: their workers import the modules
                # themselves, which is faster than a trial.
                self._front.ahead.begin(link)
                yield
                nursery.cancel_scope.cancel(reason="the launcher ends")
        finally:
            # The front detaches before the workers are notified, so that later orders wait for the next
            # process.
            self._front.detach()
            how = await link.close()  # noqa: ASYNC102  # it shields itself, and is bounded
            await self._end_all(how)  # noqa: ASYNC102  # the same

    @handles(StartWorker, ki_protected=True)
    async def start(self, message: StartWorker) -> DeferredReply[WorkerProcess]:
        """Order a worker."""
        reply: DeferredReply[WorkerProcess] = self.context.defer(on_cancel=self._front.withdraw)
        self._accept(Order(message, reply))
        return reply

    def _accept(self, order: Order) -> None:
        number, message = next(self._numbers), order.message
        preload = message.preload if self._front.preloads else ()
        try:
            self._link.order("start", number, message.arguments, message.descriptors, preload=preload)
        except (OSError, TypeError, NotSupportedError) as error:
            failed = LauncherError(f"a worker process could not be ordered: {error}")
            failed.__cause__ = error
            order.reply.fail(failed)
        else:
            self._orders[number] = order
            self._link.ask()

    def _is_asked(self) -> bool:
        return (
            bool(self._orders)
            or self._front.ahead.is_pending
            or any(worker.is_asked_for for worker in self._workers.values())
        )

    @enable_ki_protection
    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._link.receive())
        except EndOfLink:
            how = await self._link.wait_end()
            if not all(self._imported.issuperset(order.message.preload) for order in self._orders.values()):
                # The imports may have killed the process, and would kill the next one as well.
                self._front.preloads = False
                self._front.warn(f"their launcher {how} while it imported modules")
            self.context.crash(LauncherError(f"the launcher of worker processes {how}"))

    def _take(self, report: LauncherReport) -> None:
        number, detail = report.number, report.detail
        if report.kind == "failed":
            self._refuse(number, f"a worker process could not be started: {detail}")
            return
        if report.kind == "fresh":
            self._begin_fresh(number, str(detail))
            return
        if report.kind in ("pong", "importing"):
            return
        if report.kind == "tried":
            self._front.ahead.take(report)
            return
        assert isinstance(detail, int)
        if report.kind == "started":
            self._begun(number, detail, report.descriptors)
            return
        if number in self._workers:
            self._workers.pop(number).report(describe_exit(os.waitstatus_to_exitcode(detail)))
        if number in self._orders:
            # The cancelled caller has waited for the end of its worker.
            self._orders.pop(number).reply.cancelled()

    def _begun(self, number: int, pid: int, descriptors: Sequence[int]) -> None:
        if not descriptors:
            # D74: without its descriptor the worker could not be watched or killed safely.
            self._link.send("kill", number)
            self._refuse(
                number,
                "a worker process has been ended again: there are too many open files here",
                lost_descriptors(),
            )
            return
        worker = self._workers[number] = WorkerProcess(pid, descriptors[0], self._link.ask)
        self._imported.update(self._orders[number].message.preload)
        if self._orders[number].reply.is_cancelled:
            worker.close()
        elif not self._orders.pop(number).reply.set(worker):
            # The caller has left meanwhile.
            worker.close()

    def _begin_fresh(self, number: int, reason: str) -> None:
        order = self._orders[number]
        # Nothing was imported for it.
        self._orders[number] = attrs.evolve(order, message=attrs.evolve(order.message, preload=()))
        self._front.warn(reason)

    def _refuse(self, number: int, reason: str, cause: OSError | None = None) -> None:
        reply = self._orders.pop(number).reply
        if reply.is_cancelled:
            reply.cancelled()
        else:
            error = LauncherError(reason)
            error.__cause__ = cause
            reply.fail(error)

    async def _end_all(self, how: str) -> None:
        self._front.ahead.end(how)
        for number in tuple(self._orders):
            order = self._orders[number]
            if order.is_again or order.reply.is_cancelled:
                self._refuse(number, f"a worker process was not started: the launcher {how}")
            else:
                # D79: the next launcher tries an order once more. If there is none, the reply fails with this
                # actor's end.
                self._front.postponed.append(attrs.evolve(order, is_again=True))
        workers = tuple(self._workers.values())
        self._workers.clear()
        for worker in workers:
            # The launcher's end has killed them, or is about to.
            worker.kill()
            worker.report(_WITH_LAUNCHER)
        with trio.move_on_after(_END, shield=True):
            for worker in workers:
                await worker.wait()


class Launcher:
    """The launcher of a system, shared by its devices. Made by `open_launcher`.

    Attributes:
        preloads: Whether it preloads modules; False after a launcher process has died while preloading.
        ahead: The modules that it imports in advance for programs.
        reasons: The reasons why workers were not forks, each once.
        ref: The reference of its actor, once open.
        postponed: Orders that a process has left to the next one.
    """

    def __init__(self) -> None:
        self.preloads: bool = True
        self.reasons: list[str] = []
        self.ahead: ImportsAhead = ImportsAhead()
        self._supervisor: Ref[LauncherSupervisor] | None = None
        self.ref: Ref[LauncherActor]
        self._link: LauncherLink | None = None
        self._opening = trio.Lock()
        # The descriptors of the retained chunks.
        self._chunks: set[int] = set()
        self.postponed: list[Order] = []
        # The cancel scopes of tasks with an order, and the error that refuses them.
        self._asking: set[trio.CancelScope] = set()
        self._refusal: Exception | None = None

    def __repr__(self) -> str:
        return f"<Launcher {self._supervisor!r}, {len(self._chunks)} chunks>"

    async def start_worker(
        self, arguments: Iterable[str], descriptors: Iterable[int] = (), preload: Iterable[str] = ()
    ) -> WorkerProcess:
        """Start a worker process; see `StartWorker`.

        Raises:
            LauncherError: The same as there; or the launcher itself does not start.
        """
        message = StartWorker(tuple(arguments), tuple(descriptors), tuple(preload))
        with self._unless_refused():
            return await self.ref.ask(message)
        raise LauncherError(f"a worker process was not started: {self._refusal}") from self._refusal

    async def import_ahead(self, modules: Iterable[str | Preload], preload: Iterable[str]) -> None:
        """Import modules for all later workers, after a child has tried all of them.

        If one cannot be imported, or a fork could not use it, none is imported in advance, and a warning in
        the logs explains why. Each new launcher process imports them again. Cancelling the call does not
        affect that.

        Args:
            modules: Their names, or `Preload` for trusted modules; they are found by the `sys.path` of this
                program.
            preload: Modules to import before them, as in `StartWorker`.
        """
        preloads = tuple(Preload(module) if isinstance(module, str) else module for module in modules)
        is_over = self.ahead.request(preloads, tuple(preload))
        with self._unless_refused():
            await is_over.wait()

    def warn(self, reason: str) -> None:
        """Log, once, why workers are not forks; called by the actor."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            _logger.warning(
                "worker processes start as fresh interpreters, which takes half a second and more "
                "instead of some 30 ms: %s",
                reason,
            )

    @contextmanager
    def _unless_refused(self) -> Generator[None]:
        """Leave the block once no launcher starts."""
        with trio.CancelScope() as scope:
            self._asking.add(scope)
            try:
                yield
            finally:
                self._asking.discard(scope)

    def refuse(self, error: Exception) -> None:
        """Refuse present orders, because no launcher starts; called by the actor."""
        self._refusal = error
        for scope in self._asking:
            scope.cancel(reason="the launcher does not start")

    @enable_ki_protection
    def keep_chunk(self, descriptor: int) -> None:
        """Empty shared memory when this process dies, even if other processes have a descriptor.

        Each new launcher process is informed again.

        Args:
            descriptor: It stays the caller's, and must be open until the chunk is forgotten.

        Raises:
            OSError: The descriptor is not open.
        """
        if self._link is not None:
            self._link.send("keep", descriptor, None, (descriptor,))
        self._chunks.add(descriptor)

    @enable_ki_protection
    def forget_chunk(self, descriptor: int) -> None:
        """Release a chunk. Its memory is freed when all its other descriptors and mappings are closed.

        Harmless for an unknown chunk.
        """
        self._chunks.discard(descriptor)
        if self._link is not None:
            self._link.send("forget", descriptor)

    def attach(self, link: LauncherLink) -> list[Order]:
        """Continue with a new process; return the orders left by the previous one. For the actor."""
        self._link = link
        for descriptor in self._chunks:
            link.send("keep", descriptor, None, (descriptor,))
        remaining = [order for order in self.postponed if not order.reply.is_done]
        self.postponed.clear()
        return remaining

    def detach(self) -> None:
        """End with the process; called by the actor."""
        self._link = None

    def withdraw(self) -> None:
        """Release cancelled callers without a process; called by the actor. The others wait for theirs."""
        for order in tuple(self.postponed):
            if order.reply.is_cancelled:
                self.postponed.remove(order)
                order.reply.cancelled()

    async def open_in(self, system: ActorSystem) -> None:
        """Start the actor, unless it is alive; for `open_launcher`."""
        async with self._opening:
            if self._supervisor is not None and not self._supervisor.is_terminated:
                if not self.ref.is_terminated:
                    return
                await self._supervisor.stop()
            taken = {child.name for child in system.tree().children}
            names = itertools.chain(["launcher"], (f"launcher#{number}" for number in itertools.count(2)))
            name = next(name for name in names if name not in taken)
            self._supervisor = await system.spawn(LauncherSupervisor, self, name=name, policy=_ALWAYS)


class LauncherSupervisor(Actor):
    """Restarts the actor of the launcher process however often it fails."""

    inherits_context = False

    def __init__(self, front: Launcher) -> None:
        self._front = front

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Start that actor."""
        self._front.ref = await context.spawn(LauncherActor, self._front, name="process", policy=_POLICY)
        yield


# Weak on both sides, because a launcher refers to its system. The actor itself keeps the launcher alive.
_launchers: weakref.WeakKeyDictionary[ActorSystem, weakref.ref[Launcher]] = weakref.WeakKeyDictionary()


# Processes list their open descriptors there, and near it their threads and children.
_DESCRIPTORS = "/proc/self/fd"


async def open_launcher(system: ActorSystem) -> Launcher:
    """Return the launcher of a system, or start it. Concurrent first calls start only one.

    Actors are stopped in reverse start order, and the workers end with the launcher. So call this before the
    actors that use them are spawned.

    Raises:
        NotSupportedError: The platform cannot run worker processes.
        LauncherError: The launcher process did not start.
        RuntimeError: The system is stopping.
    """
    if not os.access(_DESCRIPTORS, os.R_OK):
        raise NotSupportedError(
            "worker processes need /proc, which is not mounted here: mount it (in a container: do not hide "
            "it), or open the device with isolation='inline'"
        )
    reference = _launchers.get(system)
    launcher = None if reference is None else reference()
    if launcher is None:
        launcher = Launcher()
        _launchers[system] = weakref.ref(launcher)
    await launcher.open_in(system)
    return launcher


async def describe_workers() -> str:
    """Return how worker processes start on this machine, and why, by starting a short-lived one."""
    async with open_system("trial") as system:
        try:
            backend, _ = resolve("cpu")
            launcher = await open_launcher(system)
            worker = await launcher.start_worker(("-c", ""), preload=backend.preload)
        except (AccelError, ActorError, LauncherError) as error:
            return f"none: {error}"
        await worker.wait()
        return f"fresh interpreters: {launcher.reasons[0]}" if launcher.reasons else "forks"


class WorkerProcess:
    """A running worker. Made by the launcher; for use on the Trio thread.

    Args:
        pid: Its pid.
        descriptor: A descriptor of the process, which now belongs to this object.
        ask: Called when a task waits for the launcher's report of its end.

    Attributes:
        pid: Its pid; after its death another process may get it.
        is_asked_for: Whether a task waits for that report.
    """

    def __init__(self, pid: int, descriptor: int, ask: Callable[[], None]) -> None:
        self.pid: int = pid
        self.is_asked_for: bool = False
        self._ask = ask
        self._descriptor: int | None = descriptor
        self._how: str | None = None
        self._reported = trio.Event()
        self._watching = trio.Lock()

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.pid}, {self._how or 'running'}>"

    @property
    def is_dead(self) -> bool:
        """Whether all its threads have ended and its memory is unmapped."""
        if self._descriptor is None:
            return self._how is not None
        return is_dead(self._descriptor)

    def ending(self) -> str | None:
        """Return how it ends or has ended, before the launcher reports it.

        The kernel takes long to dismantle a GPU's context, and on a busy machine the launcher is late.

        Returns:
            See `wait`; None if it is not known yet, or no longer.
        """
        fields = self._fields()
        # The pid cannot be reused before the process is reaped, so check that after reading the record.
        if fields is None or self._is_reaped():
            return None
        flags, status = int(fields[_FLAGS]), int(fields[_STATUS])
        # Older kernels report 0 for an unknown status.
        if not flags & _IS_EXITING or not status:
            return None
        return describe_exit(os.waitstatus_to_exitcode(status))

    @property
    def has_ended_with_launcher(self) -> bool:
        """Whether its launcher has ended, and not only the process; known after `wait`."""
        return self._how == _WITH_LAUNCHER

    def processor_time(self) -> int:
        """Return the nanoseconds for which its threads have run; 0 without data from the system."""
        return processor_time(self.pid)

    def is_in_disk_wait(self) -> bool:
        """Return whether its main thread waits for a disk, as while loading a large library."""
        fields = self._fields()
        return fields is not None and fields[0] == "D"

    def _is_reaped(self) -> bool:
        """Return whether its pid may belong to another process."""
        if self._descriptor is None:
            return True
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except ProcessLookupError:
            return True
        return False

    def _fields(self) -> list[str] | None:
        """Return the kernel's record of it, from its state on."""
        try:
            # Read as bytes, because text may need the import of a codec.
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # The name of the process is in brackets, and may contain any characters, including brackets.
                return file.read().rpartition(b")")[2].decode().split()
        except OSError:
            return None

    def kill(self) -> None:
        """Kill the worker, whatever it is doing; harmless after its death."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal; harmless after its death."""
        if self._descriptor is None:
            return
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            # It is dead and reaped; the report follows.
            return

    async def wait_dead(self) -> None:
        """Wait until it is dead. This needs neither the launcher nor the ends of its sockets."""
        async with self._watching:
            if self._descriptor is not None and not self.is_dead:
                # If the descriptor is closed meanwhile, the process was killed.
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._descriptor)

    async def wait(self) -> str:
        """Wait until it is dead, and reaped with all its descendants unless its launcher has ended.

        Returns:
            A description of its end: ``was killed by SIGKILL``, ``exited with code 3``, ``ended with its
            launcher``.
        """
        await self.wait_dead()
        if not self._reported.is_set():
            self.is_asked_for = True
            self._ask()
        await self._reported.wait()
        self._close_descriptor()
        assert self._how is not None
        return self._how

    def close(self) -> None:
        """Give up the handle; kills the worker if it is alive."""
        self.kill()
        self._close_descriptor()

    def report(self, how: str) -> None:
        """Record its end, or the end of its launcher; called by the launcher."""
        self._how = how
        self._reported.set()
        if self.is_dead:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            trio.lowlevel.notify_closing(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
