"""How operations that span several devices are asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import named_arguments
from ...backends.base import ContextLostError, NotSupportedError
from ..base._errors import WithdrawnError
from ..completion._strategies import SyncCompletion
from ..engine._completer import grace_in, leave_hosts
from ..engine._context import Session
from ..engine._rendezvous import PartFailedError, PartLaunch, Rendezvous
from ..inline._dispatch import InlineDispatch
from ..operations._operation import Launch, Planned, operation_name, refuse_recording
from ._apart import ask_apart
from ._device import OpenDevice, opened
from ._spanning import MultiDeviceOperation, PlannedParts, lent_by, peers_of, plan_parts

__all__ = ["ask_across"]

ReplyT = TypeVar("ReplyT")

# A host array is being copied: seconds between two looks at it.
_COPYING = 0.001
# Errors with which a part ends because of another one, or of the asker.
_DERIVED = (PartFailedError, WithdrawnError)
_FIELDS = tuple(field.name for field in attrs.fields(Launch) if field.init)


@named_arguments
@enable_ki_protection
async def ask_across(operation: MultiDeviceOperation[ReplyT], /) -> ReplyT:
    """Run an operation that spans devices; returns its reply when all parts are complete.

    Each device runs one part, on the stream of the operation's library actor there. Everything is validated
    on all devices before anything is launched. If one part fails, the whole operation has failed: its outputs
    are not to be used, on any of the devices. The others stay healthy.

    Where all devices are inline, no kernel begins before the streams of all parts have come to it, and no
    stream goes on behind its part before all kernels are done. So a kernel may use the arrays that other
    parts lend, and write to them. Operations that touch the same memory keep the order in which they were
    asked for, on every device.

    Where a device has its context in a worker, what parts lend is held for the others as by `Device.borrow`,
    and is only read. Such operations run one at a time on each device. A device that loses its context is
    replaced alone, and with `retry` its part runs again.

    When cancelled, an operation that is not launched is taken back. One that runs is waited for as that of
    one device is, for the longest `cancel_grace` of the devices.

    Args:
        operation: The operation. All its devices are of one backend and of one Trio run.

    Raises:
        TypeError, ValueError: A wrong argument, no device, or one device twice; nothing was launched.
        StaleRefError: An array that must not be used; nothing was launched.
        NotSupportedError: A device has no kernel for its part. All are inline, and one waits with
            `SyncCompletion`; or one is not, and a part lends what is written, or a host array.
        ContextLostError: The context of a device was lost meanwhile; the error names the device.
        DeviceLostError: A device is closed, or was given up.
        InputFailedError: An array was to be written by an operation that failed.
        AccelError: The error of a part.
    """
    if not isinstance(operation, MultiDeviceOperation):
        raise TypeError(f"ask_across: {operation!r} is no operation that spans devices; ask its device")
    name = operation_name(type(operation))
    refuse_recording(name, "it spans devices")
    devices = _devices_of(name, operation)
    await trio.lowlevel.checkpoint_if_cancelled()
    inline = [(one, one.dispatch) for one in devices if isinstance(one.dispatch, InlineDispatch)]
    if len(inline) == len(devices):
        return await _ask_inline(name, operation, inline)
    return await ask_apart(name, operation, devices)


_Device = tuple[OpenDevice, InlineDispatch]


def _devices_of(name: str, operation: MultiDeviceOperation[Any]) -> list[OpenDevice]:
    """Return the devices that take part, in their order.

    Raises:
        TypeError, ValueError: None, no device, one twice, or devices of two backends.
        RuntimeError: One of another Trio run.
    """
    found: list[OpenDevice] = []
    for one in operation.devices:
        device = opened(one)
        device.state.check_run("ask_across")
        if device in found:
            raise ValueError(f"{name}: {device.path} takes part twice; each device has one part")
        if found and found[0].info.backend != device.info.backend:
            raise ValueError(
                f"{name}: {found[0].path} and {device.path} are of two backends; copy the arrays "
                "to devices of one: await array.copy_to(device)"
            )
        found.append(device)
    if not found:
        raise ValueError(f"{name}: no device takes part")
    return found


async def _ask_inline(name: str, operation: MultiDeviceOperation[ReplyT], devices: list[_Device]) -> ReplyT:
    """Run it on devices whose contexts are here: their streams wait for one another."""
    for device, _ in devices:
        if isinstance(device.options.completion, SyncCompletion):
            # It would block the loop, which must release the other parts if a device is lost.
            raise NotSupportedError(
                f"{device.path} waits with SyncCompletion, and takes no part in operations that span inline "
                "devices; open it with another completion strategy",
                device=device.name,
                operation=name,
                backend=device.info.backend,
            )
    losses = 0
    while True:
        sessions = await _ready(devices)
        planned, launches = _plan(name, operation, devices, sessions)
        parts = _Parts(devices, sessions, launches)
        try:
            await parts.run()
        except ContextLostError:
            losses += 1
            # As for operations of one device: with arrays of a context that is gone it cannot run again.
            may_run_again = losses <= min(device.options.retry for device, _ in devices)
            if not may_run_again or any(launch.uses for launch in launches):
                raise
        else:
            return planned.result()
        finally:
            parts.end()


async def _ready(devices: Sequence[_Device]) -> list[Session]:
    """Return the current context of each device; waits while one is being rebuilt."""
    while True:
        sessions = [session for _, dispatch in devices if (session := dispatch.session) is not None]
        if len(sessions) == len(devices):
            return sessions
        for _, dispatch in devices:
            if dispatch.session is None:
                await dispatch.ready()


def _plan(
    name: str,
    operation: MultiDeviceOperation[ReplyT],
    devices: Sequence[_Device],
    sessions: Sequence[Session],
) -> tuple[PlannedParts[ReplyT], list[PartLaunch]]:
    """Validate the operation on all devices; nothing is left where that fails."""
    owners = [session.engine.device for session in sessions]
    with_owners = [(device.state, owner) for (device, _), owner in zip(devices, owners, strict=True)]
    planned, planners = plan_parts(name, operation, with_owners)
    for spec, owner in zip(planned.specs, owners, strict=True):
        for peer in lent_by([spec]):
            owner.check_peer(owners[peer.part])
    rendezvous = Rendezvous(name, len(planners))
    launches: list[PartLaunch] = []
    try:
        for planner, spec in zip(planners, planned.specs, strict=True):
            launch = planner.launch(Planned(spec))
            fields = {field: getattr(launch, field) for field in _FIELDS}
            launches.append(PartLaunch(**fields, rendezvous=rendezvous, part=planner.part))
            peers = peers_of(spec)
            if peers is not None:
                rendezvous.add_peers(peers)
        for (device, _), launch in zip(devices, launches, strict=True):
            device.state.validated(launch)
    except BaseException:
        for launch in launches:
            launch.forget()
        raise
    return planned, launches


class _Parts:
    """The parts of one operation, from their launch until all are over."""

    def __init__(
        self, devices: Sequence[_Device], sessions: Sequence[Session], launches: Sequence[PartLaunch]
    ) -> None:
        self._devices = devices
        self._sessions = sessions
        self._launches = launches
        self._rendezvous = launches[0].rendezvous
        self._left = set(range(len(launches)))
        self._over = trio.Event()
        self._error: BaseException | None = None
        # Whether its asker has gone.
        self._is_left = False

    async def run(self) -> None:
        """Have all parts launched and wait for their ends.

        Raises:
            BaseException: The error of the operation.
        """
        # D105: without a checkpoint in between, so that any two operations come to shared library actors in
        # the same order, and cannot wait for one another.
        for number, (_, dispatch) in enumerate(self._devices):
            self._submit(number, dispatch)
        try:
            await self._over.wait()
        except trio.Cancelled:  # noqa: ASYNC103  # the parts may be over by now: then it has not happened
            if not await self._unwind():  # noqa: ASYNC102  # it shields itself, for the grace
                raise
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback has this frame: the variable would make a cycle.
                del error

    def _submit(self, number: int, dispatch: InlineDispatch) -> None:
        def done(error: BaseException | None) -> None:
            self._end_part(number, error)

        try:
            dispatch.submit_part(self._sessions[number], self._launches[number], done)
        except Exception as error:  # noqa: BLE001  # host memory ran out, say
            self._end_part(number, error)

    def _end_part(self, number: int, error: BaseException | None) -> None:
        if number not in self._left:
            return
        self._left.discard(number)
        if error is not None:
            self._fail(error)
        self._look()

    def _fail(self, error: BaseException) -> None:
        """Take back parts that are not launched, and let those at the rendezvous go on."""
        if self._error is None or (isinstance(self._error, _DERIVED) and not isinstance(error, _DERIVED)):
            self._error = error
        self._rendezvous.fail(error)
        for number in tuple(self._left):
            launch = self._launches[number]
            if self._sessions[number].submissions.withdraw(launch):
                # The callback of a withdrawn operation is not called.
                self._left.discard(number)
        self._look()

    def _look(self) -> None:
        """See whether all parts are over."""
        if not self._left:
            self._over.set()
            if self._is_left:
                self.end()

    async def _unwind(self) -> bool:
        """Cancel for the asker; returns whether the operation is complete all the same."""
        if not self._rendezvous.in_flight:
            self._fail(WithdrawnError())
        context = trio.lowlevel.current_task().context
        grace = max(grace_in(context, device.options.cancel_grace) for device, _ in self._devices)
        with trio.CancelScope(deadline=trio.current_time() + grace, shield=True):
            await self._over.wait()
        if self._left:
            await self._leave()
            return False
        return self._error is None

    async def _leave(self) -> None:
        """Let parts in flight go on without their asker; they keep their memory."""
        for operation, queue in tuple(self._rendezvous.in_flight):
            while leave_hosts(operation.launch) is False:
                with trio.CancelScope(shield=True), suppress(trio.TooSlowError):
                    await trio.sleep(_COPYING)
            operation.is_given_up = True
            queue.notify()
        self._is_left = True

    def end(self) -> None:
        """Give memory of parts that are not in flight back: the asker has gone."""
        if self._left:
            return
        self._rendezvous.end()
        for session, launch in zip(self._sessions, self._launches, strict=True):
            session.engine.over(launch)
