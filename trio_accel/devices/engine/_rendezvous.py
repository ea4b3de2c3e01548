"""The parts of one operation that spans devices: they are launched in one go, and wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import attrs
import trio

from ...actors import ActorContext, DeferredReply
from ...backends.base import (
    AccelEvent,
    AccelStream,
    Hold,
    InputFailedError,
    InThread,
    KernelLibrary,
    NotSupportedError,
    Waker,
)
from ...backends.base.ops import Peers
from ..arrays._blocks import bare
from ..base._bridge import LoopNotifier
from ..base._errors import WithdrawnError
from ..operations._operation import Launch
from ._engine import Engine
from ._in_flight import InFlight
from ._stream_queues import StreamQueue

__all__ = ["Part", "PartFailedError", "PartInFlight", "PartLaunch", "Rendezvous", "check_part"]


class PartFailedError(InputFailedError):
    """A part of an operation that spans devices is over because another one has failed."""


@attrs.define(eq=False, on_setattr=None, kw_only=True)
class PartLaunch(Launch):
    """One part of an operation that spans devices, on its way to a library actor of its device.

    Attributes:
        rendezvous: Where it meets the other parts.
        part: Its number among them.
    """

    rendezvous: Rendezvous
    part: int


class _Gate:
    """A barrier on the device: streams are held until all have come, or until it is opened.

    Args:
        count: How many streams there are.
        waker: Rung whenever one has come.
    """

    __slots__ = ("_come", "_count", "_holds", "_waker", "is_open")

    def __init__(self, count: int, waker: Waker | None = None) -> None:
        self._count = count
        self._waker = waker
        # An item for each stream that has come: threads of the backend append to it.
        self._come: list[None] = []
        self._holds: list[Hold] = []
        self.is_open: bool = False

    def hold(self, stream: AccelStream) -> None:
        """Hold back later work on a stream."""
        hold = stream.hold(self)
        self._holds.append(hold)
        if self.is_open:
            # `open` may have run in another thread before this hold was in the list.
            hold.release()

    def ring(self) -> None:
        """Count a stream that has come. Any thread."""
        self._come.append(None)
        if len(self._come) >= self._count:
            self.open()
        if self._waker is not None:
            self._waker.ring()

    def open(self) -> None:
        """Let all go on. Any thread."""
        self.is_open = True
        for hold in tuple(self._holds):
            hold.release()


class Rendezvous:
    """The point at which the parts of one operation wait for each other (D105).

    In the loop: no part is launched before all may be, then all are, without a wait in between. So any two
    operations come to all streams that they share in the same order. On the devices: no kernel begins before
    the streams of all parts have come to it, and no stream goes on before all kernels are done.

    Args:
        name: Name of the operation.
        count: How many parts.

    Attributes:
        failure: The operation's error, if it has failed.
        failed: The part in flight whose kernel has failed with that, if one has.
        in_flight: Parts that were launched, with their queues.
    """

    def __init__(self, name: str, count: int) -> None:
        self.failure: BaseException | None = None
        self.failed: PartInFlight | None = None
        self.in_flight: list[tuple[PartInFlight, StreamQueue]] = []
        self._name = name
        self._peers: list[Peers] = []
        self._here: list[Part | None] = [None] * count
        self._come = 0
        self._is_decided = False
        self._decided = trio.Event()
        self._errors: list[Exception | None] = [None] * count
        self._entrance = _Gate(count)
        # Looks at each kernel's end, so that a kernel that waits for its peers hears of one that has failed.
        self._notifier = LoopNotifier(self.look)
        self._exit = _Gate(count, self._notifier)

    def holds_back(self, part: PartInFlight) -> bool:
        """Tell whether the stream of a part has nothing to do until others have come."""
        return (part.came.is_done and not self._entrance.is_open) or (
            part.ran.is_done and not self._exit.is_open
        )

    def add_peers(self, peers: Peers) -> None:
        """Tell a kernel of the failure of others by this."""
        self._peers.append(peers)

    def enter(self, stream: AccelStream) -> None:
        """Hold a stream back until all have come to their kernels."""
        self._entrance.hold(stream)

    def leave(self, stream: AccelStream) -> None:
        """Hold a stream back until all kernels are done."""
        self._exit.hold(stream)

    def failed_part(self, cause: BaseException | None) -> PartFailedError:
        """Make the error of a part that is over because another one has failed."""
        error = PartFailedError(f"another part of {self._name} has failed; its results were not made")
        error.__cause__ = cause
        return error

    def fail(self, error: BaseException) -> None:
        """Fail the operation, or give it up: parts that wait go on, and do not run."""
        if self.failure is None:
            # Without its frames, which would keep arrays alive.
            self.failure = bare(error)
            for peers in self._peers:
                peers.fail(error)
            self._entrance.open()
            self._exit.open()
            self._decide()

    def end(self) -> None:
        """End with all parts: drop the references to their memory."""
        self._notifier.close()
        self.failed = None
        self.in_flight.clear()
        self._here.clear()
        self._errors.clear()
        for peers in self._peers:
            peers.end()

    async def come(self, number: int, part: Part) -> None:
        """Wait for the other parts; all are launched when this returns.

        Args:
            number: Number of the part.
            part: Launches it. From now on nothing else keeps it from being launched.

        Raises:
            WithdrawnError: Another part will not come; nothing was launched.
            Exception: The error of this part's launch.
        """
        self._here[number] = part
        self._come += 1
        if self._come == len(self._here) and not self._is_decided:
            self._launch([one for one in self._here if one is not None])
            self._decide()
        try:
            await self._decided.wait()
        except trio.Cancelled:  # noqa: ASYNC103  # its actor ends: the next wait of that says so again
            if not part.is_launched:
                # D105: from now on no part is launched, as the others would wait for this one.
                self._decide()
                raise
        error = self._errors[number] if self._errors else None
        if error is not None:
            raise error
        if not part.is_launched:
            raise WithdrawnError

    def look(self) -> None:
        """Look for a kernel that is done and has failed; the first one is to blame."""
        for operation, _ in self.in_flight:
            error = operation.own_failure() if operation.ran.is_done else None
            if error is not None and self.failure is None:
                self.failed = operation
                self.fail(error)

    def _decide(self) -> None:
        """Decide: from now on nothing is launched."""
        self._is_decided = True
        self._decided.set()

    def _launch(self, parts: Sequence[Part]) -> None:
        """Launch all parts, step by step.

        A driver that loads a kernel may wait for all streams of the device. So all are held before the first
        kernel is enqueued, as that hold ends by itself; and behind their kernels only after the last one.
        """
        at = launched = 0
        try:
            for at, part in enumerate(parts):  # noqa: B007  # the part that a step fails of
                part.begin()
            for at, part in enumerate(parts):  # noqa: B007
                part.enter()
            for at, part in enumerate(parts):  # noqa: B007
                part.enqueue()
                launched += 1
        except Exception as error:  # noqa: BLE001  # raised where the part is waited for
            # Kernels that are enqueued by now are skipped, where the backend can.
            self._refuse(at, error)
            for other, part in enumerate(parts[launched:], launched):
                if other != at:
                    derived = self._errors[other] = self.failed_part(error)
                    part.abandon(derived)
        for number, part in enumerate(parts[:launched]):
            try:
                self.in_flight.append(part.leave())
            except Exception as error:  # noqa: BLE001  # raised where the part is waited for
                self._refuse(number, error)
        for part in parts[:launched]:
            part.watch()

    def _refuse(self, number: int, error: Exception) -> None:
        """Fail the operation with the launch of a part."""
        self._errors[number] = error
        self.fail(error)


class PartInFlight(InFlight):
    """A part that the backend has. It is done when all parts are, and has failed if one of them has.

    Attributes:
        came: Done when its stream has come to the rendezvous.
        ran: Done when its kernel is.
    """

    _rendezvous: Rendezvous
    came: AccelEvent
    ran: AccelEvent
    after: list[InFlight] | None

    def join(self, rendezvous: Rendezvous, came: AccelEvent, ran: AccelEvent) -> None:
        """Wait for the others; called once, when it is enqueued."""
        self._rendezvous, self.came, self.ran = rendezvous, came, ran
        # Not None, so that the completer asks `failure` and not the event alone.
        self.after = self.after or []

    @property
    def waits_for_others(self) -> bool:
        """Whether its stream waits for those of the other devices, which may be held up for long."""
        return self._rendezvous.holds_back(self)

    def failure(self) -> Exception | None:
        """Return its error: its own, that of an input or of another part."""
        if self._failure is None:
            rendezvous = self._rendezvous
            rendezvous.look()
            if rendezvous.failure is not None and rendezvous.failed is not self:
                # An error of a kernel after the failure of another part is mostly due to that.
                self._failure = rendezvous.failed_part(rendezvous.failure)
            else:
                self._failure = self.own_failure()
        return self._failure

    def own_failure(self) -> Exception | None:
        """Return its own error or that of an input; may be asked once its kernel is done."""
        return self.came.error or self.ran.error or super().failure()


@attrs.define(eq=False)
class Part:
    """The launch of a part, in the steps in which all parts of an operation are launched.

    Attributes:
        failure: Error of its preparation.
        reply: The reply to its asker, set before it comes to the rendezvous.
    """

    _launch: PartLaunch
    _kernels: KernelLibrary
    _queue: StreamQueue
    _context: ActorContext
    _engine: Engine
    _is_begun: bool = attrs.field(default=False, init=False)
    _came: AccelEvent = attrs.field(init=False)
    _in_flight: PartInFlight | None = attrs.field(default=None, init=False)
    failure: Exception | None = attrs.field(default=None, init=False)
    reply: DeferredReply[None] | None = attrs.field(default=None, init=False)

    @property
    def is_launched(self) -> bool:
        """Whether the backend has it, or had it."""
        return self._in_flight is not None

    def begin(self) -> None:
        """Allocate, have operands copied, and have the stream wait for what goes before."""
        self._engine.enqueuer.begin(self._launch, self._queue, self.failure)
        self._is_begun = True

    def enter(self) -> None:
        """Hold the stream back until all have come."""
        with self._abandoned_if_failed():
            self._came = self._queue.stream.record()
            self._launch.rendezvous.enter(self._queue.stream)

    def enqueue(self) -> None:
        """Enqueue the kernel."""
        launch, stream = self._launch, self._queue.stream
        with self._abandoned_if_failed():
            self._engine.enqueuer.call_of(launch, self._kernels)(launch.spec, stream)
            self._engine.enqueuer.end_call(launch, stream)

    def leave(self) -> tuple[PartInFlight, StreamQueue]:
        """Hold the stream back until all kernels are done; returns what was enqueued, and where."""
        launch, queue = self._launch, self._queue
        with self._abandoned_if_failed():
            ran = queue.stream.record()
            launch.rendezvous.leave(queue.stream)
        operation = self._engine.enqueuer.add(launch, queue, queue.stream.record(), PartInFlight)
        operation.join(launch.rendezvous, self._came, ran)
        self._engine.gate.leave(launch)
        operation.crash, operation.reply = self._context.crash, self.reply
        self._in_flight = operation
        return operation, queue

    def abandon(self, error: Exception) -> None:
        """Clean up: it is not launched, for this reason. Does nothing before `begin`."""
        if self._is_begun:
            self._is_begun = False
            self._engine.enqueuer.abandon(self._launch, self._queue, error)

    def watch(self) -> None:
        """Have the end of its work seen."""
        if self._in_flight is not None:
            self._engine.completer.port.watch(self._queue.stream, self._in_flight.event)

    @contextmanager
    def _abandoned_if_failed(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self.abandon(error)
            raise


def check_part(launch: PartLaunch, kernels: KernelLibrary) -> Callable[[], None] | None:
    """Refuse a part that its library does not have.

    Returns:
        Its preparation; see `KernelLibrary.prepare`.

    Raises:
        NotSupportedError: It has no kernel for it, or one that blocks: the others would wait for that.
    """
    if launch.spec.operation not in kernels.operations:
        raise NotSupportedError(f"library {kernels.name!r} has no {launch.spec.operation}")
    prepare = kernels.prepare(launch.spec)
    if isinstance(prepare, InThread):
        raise NotSupportedError(
            f"library {kernels.name!r} has a kernel for {type(launch.spec).__name__} that blocks, and so "
            "runs no part of an operation that spans devices"
        )
    return prepare
