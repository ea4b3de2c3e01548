"""The state that the parts of one open device share."""

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
    """One open device, for its dispatch, its actors and its contexts.

    Args:
        backend: Its backend.
        info: The description of the device.
        options: The options with which it was opened.
        path: The path of its actor in the tree.
        system: Its actor system.
        blocks: The blocks of its arrays, from another device after an adoption.

    Attributes:
        name: The name of the hardware.
        availability: Its present context, if any.
        faults: The faults to inject into its operations.
        losses: Counts its lost contexts.
        recoveries: The measured durations of recoveries.
        hooks: Observers of every step of its operations.
        validators: Called with each validated operation; they observe no other step.
        on_hooks: Called when `hooks` change.
        on_rest: Called when the device pauses after too many losses.
        window: Limits the submitted operations.
        host_pool: The host memory for its own transfers; None without its own memory.
        memory_failure: The hardware's report on defective memory, if any.
        leases: The number of the program's leased arrays that outlive the context.
        token: The token of its Trio run.
        actor: Its actor, once started.
        is_given_up: Whether it has ended on its own.
        leaves_memory: Whether it has ended, and its arrays can be adopted or were adopted.
        tell_arrays: Returns the fate of its arrays, as a supplement to the reason for its end.
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
        # The time when a pausing device opens again, and the reason for its pause.
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
            RuntimeError: The device belongs to another run.
        """
        if not self.is_own_run():
            advice = "use get or wait of its ta.blocking, or trio.from_thread.run in a thread of the run"
            if self.availability.is_ended:
                advice = "and it is closed: make its arrays again on an open device"
            raise RuntimeError(f"{verb}: device {self.path} belongs to another thread or Trio run; {advice}")

    def is_own_run(self) -> bool:
        """Return whether this is the Trio run in which the device was opened."""
        try:
            return trio.lowlevel.current_trio_token() is self.token
        except RuntimeError:
            return False

    async def drain(self) -> None:
        """Free all dropped blocks, and let other tasks run between some and the next; a checkpoint."""
        has_rest = True
        while has_rest:
            has_rest = self.blocks.drain_some()
            await trio.lowlevel.checkpoint()

    def check_pending(self, pending: int) -> None:
        """Refuse a request if too many wait for a context.

        Raises:
            QueueFullError: The limit is reached.
        """
        if pending >= _MAX_PENDING:
            raise QueueFullError(
                f"{_MAX_PENDING} requests wait already for the context to be rebuilt", device=self.name
            )

    def validated(self, launch: Launch) -> None:
        """Call hooks and validators with a validated operation."""
        for hook in tuple(self.hooks):
            hook(Phase.VALIDATE, launch)
        for validator in tuple(self.validators):
            validator(launch)

    def restarted(self, event: ActorRestarted) -> None:
        """Record that a context was lost, or could not be made, and that another follows."""
        self.losses.restarted(event)
        if event.is_paused:
            self._opened_again = trio.current_time() + event.delay
            self._rests_over = event.error
            # From here on requests are refused, and their error contains the time set above.
            self.availability.shut()
            self.on_rest()

    def note(self) -> str:
        """Return the note on the device in the tree."""
        return self.outage().message if self.availability.is_shut else str(self.recoveries.cost())

    async def lost(self) -> DeviceLostError:
        """Return the reason for refusals. If the device is ending, wait for its end first."""
        if self.actor is not None and self.availability.is_ended:
            await self.actor.wait_terminated()
        else:
            await trio.lowlevel.checkpoint()
        return self.outage()

    def locate(self, error: Exception, operation: str) -> None:
        """Add the place of an operation's error, unless the error already contains it."""
        locate(error, device=self.name, operation=operation, generation=self.generation)

    def outage(self) -> DeviceLostError:
        """Return the reason for refusals, as a new instance for each caller."""
        if self.actor is None:
            return DeviceLostError("the device was never opened", device=self.name)
        if not self.availability.is_ended:
            return self._given_up_for_now()
        ended = self.actor.terminated
        if ended is None:
            message = f"the device is closed, or was given up{self.tell_arrays()}"
            return DeviceLostError(message, device=self.name)
        error = ended.error
        if error is None:
            return DeviceLostError("the device is closed", device=self.name)
        # The first cause is more informative than the actor that failed because of it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DeviceLostError):
            cause = cause.__cause__
        reason = describe(error) if cause is None else cause.message
        lost = DeviceLostError(
            f"{self.path}: the device was given up: {reason}{self.tell_arrays()}",
            device=self.name,
            generation=self.generation,
        )
        lost.__cause__ = error
        return lost

    def _given_up_for_now(self) -> DeviceLostError:
        remaining = max(self._opened_again - trio.current_time(), 0.0)
        cause = self._rests_over
        reason = "its context ended by itself" if cause is None else describe(cause)
        when = f"in {remaining:.2f} s" if remaining else "now"
        lost = DeviceLostError(
            f"{self.path}: the device was given up: {reason}; it is opened again {when}: ask again then",
            device=self.name,
            generation=self.generation,
            retry_after=remaining,
        )
        lost.__cause__ = cause
        return lost

    def begin_end(self, context: ActorContext) -> None:
        """Prevent further contexts, and determine whether the device has ended on its own.

        Do both at once, because ending the workers takes time, and meanwhile the device must not be found.
        """
        self.availability.end()
        # After a failed opening, the device has never existed.
        self.is_given_up = self.actor is not None and not context.is_stopping

    def end(self, context: ActorContext) -> None:
        """End the device, whether it was closed or has failed."""
        self.begin_end(context)
        if self.is_given_up:
            self.losses.given_up(self.tell_arrays())
        if not self.leaves_memory:
            self.blocks.close()
        if self.host_pool is not None:
            self.host_pool.close()


class SubmitWindow:
    """Limits each library's unfinished operations."""

    __slots__ = ("_device", "_limit", "_outstanding")

    def __init__(self, device: str, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._outstanding: dict[str, int] = {}

    def check_room(self, library: str) -> None:
        """Refuse an operation if the window of its library is full.

        Raises:
            QueueFullError: The window is full.
        """
        if self._outstanding.get(library, 0) >= self._limit:
            raise QueueFullError(
                f"{self._limit} submitted operations of {library.rpartition(':')[2]} are not done, the most "
                "that in_flight allows; wait for one of them",
                device=self._device,
            )

    def enter(self, library: str, pending: Pending[Any]) -> OnDone:
        """Count an operation; return the callback for its end."""
        self._outstanding[library] = self._outstanding.get(library, 0) + 1

        def done(error: BaseException | None) -> None:
            self._outstanding[library] -= 1
            pending.settle(error)

        return done
