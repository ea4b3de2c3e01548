"""State that the parts of one open device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from ...actors import Actor, ActorContext, ActorRestarted, ActorSystem, Ref, describe
from ...backends.base import AccelBackend, DeviceInfo, DeviceLostError, Isolation, QueueFullError
from ..base._errors import locate
from ..base._host_pool import HostPool
from ..base._options import DeviceOptions
from ..base._statistics import Recoveries
from ..base._waits import Availability
from ..operations._blocks import BlockTable
from ..operations._faults import Faults
from ..operations._hooks import EngineHook, Phase
from ..operations._operation import Launch
from ..operations._pending import Pending
from ._context import OnDone
from ._recovery import Losses

_MAX_PENDING = 1024


class DeviceState:
    """One open device, as its dispatch, its actors and its contexts see it.

    Args:
        backend: Its backend.
        info: Description of the device.
        options: How it is opened.
        path: Path of its actor in the tree.
        system: The system that it is opened in.
        blocks: The blocks of its arrays; they come with the generation of another device after an adoption.

    Attributes:
        name: Name of the hardware.
        availability: Whether it has a context, and which.
        faults: Faults that are injected into its operations.
        losses: Counts the contexts that it has lost.
        recoveries: Measured times of recoveries.
        hooks: Observers of its operations, at every step.
        validators: Called with each operation that was validated; they observe no other step.
        on_hooks: Called when there are others.
        on_rest: Called when the device is given up for a while.
        window: How much may be submitted ahead.
        host_pool: Host memory that it transfers from and to by itself; None if it has no memory of its own.
        memory_failure: The hardware's report on its memory, if that is broken.
        leases: Arrays that the program holds by `lease`, where they outlive the context.
        token: Token of the Trio run that it is opened in.
        actor: Its actor, once it is started.
        is_given_up: Whether it has ended by itself.
        leaves_memory: Whether it has ended, and its arrays can be adopted or were.
        tell_arrays: Tells the fate of its arrays, to be put behind the reason for its end.
    """

    def __init__(
        self,
        backend: AccelBackend,
        info: DeviceInfo,
        options: DeviceOptions,
        path: str,
        system: ActorSystem,
        blocks: BlockTable | None,
    ) -> None:
        self.backend = backend
        self.info = info
        self.options = options
        self.name: str = info.name
        self.path = path
        self.system = system
        self.availability: Availability = Availability()
        self.faults: Faults = Faults()
        self.losses: Losses = Losses(path, self.availability, options.intensity)
        self.recoveries: Recoveries = Recoveries()
        self.hooks: list[EngineHook] = []
        self.validators: list[Callable[[Launch], object]] = []
        self.on_hooks: Callable[[], None] = lambda: None
        self.on_rest: Callable[[], None] = lambda: None
        self.window: SubmitWindow = SubmitWindow(info.name, options.in_flight)
        self.memory_failure: BaseException | None = None
        self.leases = 0
        self.actor: Ref[Actor] | None = None
        self.is_given_up: bool = False
        # The time when a device that is given up for a while is opened again, and the reason why it is.
        self._opened_again = 0.0
        self._rests_over: BaseException | None = None
        self.leaves_memory: bool = False
        self.tell_arrays: Callable[[], str] = lambda: ""
        self.host_pool: HostPool | None = None
        if not backend.shares_memory_with_host:
            self.host_pool = HostPool(is_shared=self.isolation == "process")
        if blocks is None:
            blocks = BlockTable(info.name, self.availability, keeps=options.memory_limit is None)
        self.blocks: BlockTable = blocks
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()

    @property
    def generation(self) -> int:
        """See `Device.generation`."""
        return self.availability.generation

    @property
    def isolation(self) -> Isolation:
        """See `Device.isolation`."""
        return self.options.isolation or self.info.isolations[0]

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run.

        Raises:
            RuntimeError: The device is another run's.
        """
        if not self.is_own_run():
            raise RuntimeError(
                f"{verb}: device {self.path} belongs to another thread or Trio run; use get or wait of its "
                "ta.blocking, or trio.from_thread.run in a thread that the run has started"
            )

    def is_own_run(self) -> bool:
        """Tell whether this is the Trio run that the device was opened in."""
        try:
            return trio.lowlevel.current_trio_token() is self.token
        except RuntimeError:
            return False

    def check_pending(self, pending: int) -> None:
        """Refuse a request more than may wait for a context.

        Raises:
            QueueFullError: So many wait already.
        """
        if pending >= _MAX_PENDING:
            raise QueueFullError(
                f"{_MAX_PENDING} requests wait already for the context to be rebuilt", device=self.name
            )

    def validated(self, launch: Launch) -> None:
        """Tell hooks and validators of an operation that was validated."""
        for hook in tuple(self.hooks):
            hook(Phase.VALIDATE, launch)
        for validator in tuple(self.validators):
            validator(launch)

    def restarted(self, event: ActorRestarted) -> None:
        """Note that a context is gone, or could not be made, and that another follows."""
        self.losses.restarted(event)
        if event.is_paused:
            self._opened_again = trio.current_time() + event.delay
            self._rests_over = event.error
            # Requests are refused from here on, and are told the time that was set above.
            self.availability.shut()
            self.on_rest()

    def note(self) -> str:
        """Tell what the tree shows of the device."""
        return self.outage().message if self.availability.is_shut else str(self.recoveries.cost())

    async def lost(self) -> DeviceLostError:
        """Tell why requests are refused; waits for the end of a device that is ending."""
        if self.actor is not None and self.availability.is_ended:
            await self.actor.wait_terminated()
        else:
            await trio.lowlevel.checkpoint()
        return self.outage()

    def locate(self, error: Exception, operation: str) -> None:
        """Fill in where an error of an operation happened, unless it says so itself."""
        locate(error, device=self.name, operation=operation, generation=self.generation)

    def outage(self) -> DeviceLostError:
        """Tell why requests are refused; a fresh instance for every asker."""
        if self.actor is None:
            return DeviceLostError("the device was never opened", device=self.name)
        if not self.availability.is_ended:
            return self._given_up_for_now()
        ended = self.actor.terminated
        if ended is None:
            gone = f"the device is closed, or was given up{self.tell_arrays()}"
            return DeviceLostError(gone, device=self.name)
        error = ended.error
        if error is None:
            return DeviceLostError("the device is closed", device=self.name)
        # The first cause says more than the actor that failed over it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DeviceLostError):
            cause = cause.__cause__
        why = describe(error) if cause is None else cause.message
        lost = DeviceLostError(
            f"{self.path}: the device was given up: {why}{self.tell_arrays()}",
            device=self.name,
            generation=self.generation,
        )
        lost.__cause__ = error
        return lost

    def _given_up_for_now(self) -> DeviceLostError:
        left = max(self._opened_again - trio.current_time(), 0.0)
        cause = self._rests_over
        why = "its context ended by itself" if cause is None else describe(cause)
        when = f"in {left:.2f} s" if left else "now"
        lost = DeviceLostError(
            f"{self.path}: the device was given up: {why}; it is opened again {when}: ask again then",
            device=self.name,
            generation=self.generation,
            retry_after=left,
        )
        lost.__cause__ = cause
        return lost

    def begin_end(self, context: ActorContext) -> None:
        """Have no context follow, and tell whether the device was given up.

        Both at once: workers are still to be ended, and meanwhile others see that there is no device.
        """
        self.availability.end()
        # One whose opening failed was never a device.
        self.is_given_up = self.actor is not None and not context.is_stopping

    def end(self, context: ActorContext) -> None:
        """End the device, closed or given up."""
        self.begin_end(context)
        if self.is_given_up:
            self.losses.given_up(self.tell_arrays())
        if not self.leaves_memory:
            self.blocks.close()
        if self.host_pool is not None:
            self.host_pool.close()


class SubmitWindow:
    """The operations of each library that were submitted and are not done."""

    __slots__ = ("_device", "_limit", "_outstanding")

    def __init__(self, device: str, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._outstanding: dict[str, int] = {}

    def check_room(self, library: str) -> None:
        """Refuse more than the window of a library holds.

        Raises:
            QueueFullError: So many are submitted and not done.
        """
        if self._outstanding.get(library, 0) >= self._limit:
            raise QueueFullError(
                f"{self._limit} submitted operations of {library.rpartition(':')[2]} are not done, the most "
                "that in_flight allows; wait for one of them",
                device=self._device,
            )

    def enter(self, library: str, pending: Pending[Any]) -> OnDone:
        """Count an operation; returns what to call when it is done."""
        self._outstanding[library] = self._outstanding.get(library, 0) + 1

        def done(error: BaseException | None) -> None:
            self._outstanding[library] -= 1
            pending.settle(error)

        return done
