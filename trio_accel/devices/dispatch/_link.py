"""The application's connection to one worker process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ParkingLot, TaskEvent
from ...backends.base import ContextLostError, Strs
from ..launcher._launcher import WorkerProcess
from ..wire import _answers, _orders
from ..wire._channel import Channel, EndOfChannel, SpinWait
from ..wire._frames import Received
from ..wire._protocol import FIRST_WORD, WORDS, NonsenseError, SharedPage
from ._launch_encoding import TemplateTable

MessageHandler: TypeAlias = Callable[["WorkerLink", list[Received]], None]

_logger = logging.getLogger("trio_accel.devices")

# The launcher reports a death within milliseconds, so tasks that wait for an outcome wait no longer than
# this.
_REPORT = 0.05
# The messages that a worker answers, and its answers to them.
_ASKS = frozenset(kind.name for kind in (_orders.request, _orders.replay, _orders.lease, _orders.call))
_ANSWERS = frozenset(kind.name for kind in (_answers.done, _answers.granted, _answers.result))
# A count of checks without a heartbeat, and not of seconds. Otherwise a stopped program, in a debugger or on
# a suspended laptop, would find at its first check that a healthy worker was silent for an hour.
_BEATS = 10
_LONGEST_TICK = 0.1
# The worker's own engine detects a stuck operation first, if its loop runs.
_MARGIN = 0.5
# Long enough for several heartbeats, so that a busy machine does not delay all of them.
_LEAST_SILENCE = 1.0
# Seconds for imports on a busy machine. They are waited for one by one, because checks are counted.
_START = 60


@attrs.define(eq=False, slots=False)
class WorkerLink:
    """A worker from its start to its death: its process, its messages and its shared words.

    Attributes:
        channel: Its messages.
        libraries: The names of its device's libraries.
        is_ready: Whether its device is open.
        how: A description of its end, or of the reason why it must not be used any longer; None before.
        is_spare: Whether it is ready for the next generation.
        is_started: Whether it serves a generation.
        is_prepared: Whether it has opened all libraries in advance.
        is_serving: Whether it gets requests: it has started, and its context is not lost.
        is_distrusted: Whether it has sent a nonsensical message. Everything after that is ignored.
        has_faulted: Whether a fault of the device has ended its context; a request may have caused the fault.
        is_silent: Whether its context no longer writes to memory, even if it is not dead.
        is_stuck: Whether it was killed because its loop was blocked by an operation that does not end.
        is_asked: Returns whether it has unanswered requests.
        send: Sends a message, which is dropped if the worker has ended. See `Channel.send`.
        templates: The launch templates that it has.
        words: The shared words of the used libraries, by import path.
        used: The libraries that have completed an operation in it.
    """

    process: WorkerProcess
    channel: Channel
    page: SharedPage
    _device: str = attrs.field(alias="device", kw_only=True)
    _path: str = attrs.field(alias="path", kw_only=True)
    _timeout: float = attrs.field(alias="heartbeat_timeout", kw_only=True)
    _stuck_after: float | None = attrs.field(alias="stuck_after", kw_only=True)
    _window: float = attrs.field(alias="window", default=0.0, kw_only=True)
    libraries: Strs = ()
    is_ready: bool = False
    how: str | None = None
    is_spare: bool = False
    is_started: bool = False
    is_prepared: bool = False
    is_serving: bool = False
    is_distrusted: bool = False
    has_faulted: bool = False
    is_silent: bool = False
    is_stuck: bool = False
    is_asked: Callable[[], bool] = bool
    send: Callable[..., None] = attrs.field(init=False)
    templates: TemplateTable = attrs.field(init=False)
    words: dict[str, int] = attrs.field(factory=dict[str, int])
    used: set[str] = attrs.field(factory=set[str])
    _error: Exception | None = None
    _free_words: list[int] = attrs.field(factory=list[int])
    # The values of the words at its death.
    _final_words: dict[str, int] | None = None
    _changed: ParkingLot = attrs.field(factory=ParkingLot)
    _is_over: TaskEvent = attrs.field(factory=TaskEvent)

    def __attrs_post_init__(self) -> None:
        channel = self.channel
        if self._window:
            channel.spin_with(SpinWait(self._window, _ASKS, _ANSWERS))
            channel.share(*self.page.frames)
        # A bound method saves a call, because each operation sends a message.
        self.send = channel.send
        # Sent at once, because the launch that follows a template may be sent at once.
        self.templates = TemplateTable(partial(channel.send, now=True))

    def __repr__(self) -> str:
        return f"<WorkerLink {self.process!r}, {self.how or 'open'}>"

    def word(self, library: str) -> int:
        """Return the shared word of a library.

        Raises:
            RuntimeError: There are too many libraries.
        """
        word = self.words.get(library)
        if word is None:
            word = self._free_words.pop() if self._free_words else len(self.words) + FIRST_WORD
            if word >= WORDS:
                raise RuntimeError(
                    f"a worker serves at most {WORDS - FIRST_WORD} libraries and programs; close some"
                )
            self.words[library] = word
        return word

    def forget_library(self, library: str) -> None:
        """Free the shared word of a closed library."""
        # A dead worker's words stay, because its requests are sorted by them (D58).
        if self._final_words is None and library in self.words:
            self._free_words.append(self.words.pop(library))

    def started(self, library: str) -> int:
        """Return the number of a library's last request that it began to launch, even after its end."""
        if self._final_words is not None:
            return self._final_words.get(library, 0)
        word = self.words.get(library)
        return 0 if word is None else self.page.words[word]

    @enable_ki_protection
    async def run(
        self,
        handle: MessageHandler,
        on_end: Callable[[WorkerLink], None],
        on_gone: Callable[[WorkerLink], None],
    ) -> None:
        """Serve the connection until the worker has ended. It is dead and buried when this returns.

        Args:
            handle: Handles the worker's messages.
            on_end: Called when it has ended; perhaps twice.
            on_gone: Called when nothing is left of it.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.channel.run)
                if self.channel.spin_wait is not None:
                    nursery.start_soon(self.channel.listen)
                nursery.start_soon(self._listen_to_heart)
                nursery.start_soon(self._wait_for_death)
                if self._stuck_after is not None:
                    nursery.start_soon(self._watch_the_watch, self._stuck_after)
                    nursery.start_soon(self._watch_the_process, self._stuck_after)
                await self._receive(handle)
                # All its threads have ended, or it has closed its end of the connection.
                # Its ending is read before the kill, which would otherwise be reported as the reason.
                how = self.process.ending()
                self.process.kill()
                if how is None:
                    # The launcher reports a death after the kernel has dismantled the process, which takes
                    # long with the context of a GPU.
                    with trio.move_on_after(_REPORT):
                        how = await self.process.wait()
                self._end(how or self.process.ending() or "ended")
                on_end(self)
                nursery.cancel_scope.cancel(reason="the worker has ended")
        finally:
            try:
                with trio.CancelScope(shield=True):
                    # Each path ends the process, because the next worker takes over its memory (D4).
                    self.process.kill()
                    self._end(await self.process.wait())
                    # The end is reported again, in case the first report was skipped. It precedes `_bury`,
                    # because the owner of the requests reads the shared words.
                    on_end(self)
                    self._bury()
            finally:
                on_gone(self)

    @enable_ki_protection
    async def _wait_for_death(self) -> None:
        """Wait for the death of the process. A child may hold the socket, which then shows no end."""
        await self.process.wait_dead()
        self.channel.expect_no_more()

    async def _receive(self, handle: MessageHandler) -> None:
        """Handle messages until there are no more, or one is nonsensical."""
        try:
            while not self.is_distrusted:
                handle(self, await self.channel.receive())
        except EndOfChannel as end:
            if isinstance(end.__cause__, NonsenseError):
                self.kill_for_nonsense(end.__cause__)

    def kill_for_nonsense(self, error: NonsenseError) -> None:
        """Kill the worker because of a nonsensical message."""
        self.is_distrusted = True
        self.kill_worker(f"sent a message that makes no sense: {error}")

    def _end(self, how: str) -> None:
        if self.how is None:
            # Keep the first reason, because later ones result from the kill.
            self.how = how
            pid, extra = self.process.pid, {"device": self._path, "pid": self.process.pid}
            _logger.info("device %s: worker process %d %s", self._path, pid, how, extra=extra)
        self.notify()

    def kill_worker(self, reason: str, error: Exception | None = None) -> None:
        """Kill the worker. Messages that it has sent are still handled."""
        # The error belongs to the first reason, so it is stored before `_end` sets that.
        if self.how is None:
            self._error = error
        self._end(reason)
        self.process.kill()

    async def wait(self, condition: Callable[[], Any]) -> None:
        """Wait for an event that a message reports.

        Raises:
            ContextLostError: The worker ended before.
            Exception: The error because of which the worker gave up.
        """
        while not condition():
            if self.how is not None:
                raise self._error or died(self.how, self._device)
            await self._changed.park()

    async def wait_gone(self) -> None:
        """Wait until it is dead and nothing is left of it."""
        await self._is_over.wait()

    def notify(self) -> None:
        """Wake the tasks that wait for a condition."""
        self._changed.unpark_all()

    @enable_ki_protection
    async def _listen_to_heart(self) -> None:
        for _ in range(_START):
            if not self.is_ready and self.how is None:
                with trio.move_on_after(1.0), suppress(Exception):
                    # If it ends before, it does not have a heartbeat to watch.
                    await self.wait(lambda: self.is_ready)
        if not self.is_ready:
            self.kill_worker(f"was not ready after {_START} s and was killed")
        if await self._stands_still(self._timeout / _BEATS, _BEATS, lambda: self.page.heartbeat):
            self.kill_worker(f"gave no sign of life for {self._timeout:g} s and was killed")

    @enable_ki_protection
    async def _watch_the_watch(self, stuck_after: float) -> None:
        """Check that its engine looks for operations that do not end (D49).

        After such an operation a driver call may not return either, and block the worker's loop.
        """
        tick = min(stuck_after, _LONGEST_TICK)
        # D49: `looks` is 0 while nothing is in flight. Then it is not expected to change.
        if await self._stands_still(tick, (stuck_after + _MARGIN) / tick, lambda: self.page.looks or None):
            self.is_stuck = True
            self.kill_worker(f"stood still for stuck_after = {stuck_after:g} s and was killed")

    @enable_ki_protection
    async def _watch_the_process(self, stuck_after: float) -> None:
        """Check that it runs while it has requests, begun or not (D73).

        A worker that imports, plans or waits for its device is running: at least its heart beats, or, if a
        library holds the interpreter's lock meanwhile, it computes or reads from a disk. A stopped or frozen
        worker has not even begun with its requests, so its engine looks for nothing.
        """

        def used() -> object:
            return (self.process.processor_time(), self.page.heartbeat) if self.is_asked() else None

        tick = min(stuck_after, _LONGEST_TICK)
        ticks = max(stuck_after + _MARGIN, _LEAST_SILENCE) / tick
        while await self._stands_still(tick, ticks, used):
            if not self.process.is_in_disk_wait():
                self.kill_worker(
                    f"has requests and did not run for stuck_after = {stuck_after:g} s, and was killed"
                )

    async def _stands_still(self, tick: float, ticks: float, probe: Callable[[], object]) -> bool:
        """Wait until `probe` has returned the same value, other than None, `ticks` times in a row.

        Checks are counted instead of seconds: if this process was stopped, time has passed for both.

        Returns:
            True when that happens; False once the worker has ended.
        """
        previous, still = None, 0
        while self.how is None:
            await trio.sleep(tick)
            value = probe()
            still = still + 1 if value is not None and value == previous else 0
            previous = value
            if still >= ticks:
                return True
        return False

    def _bury(self) -> None:
        self.process.close()
        self.channel.close()
        # D58: the words are read after the death of the process, so they are its last state.
        self._final_words = {library: self.page.words[word] for library, word in self.words.items()}
        self.page.close()
        # Waiting tasks continue last, when nothing of the worker is left.
        self._is_over.set()


def died(how: str, device: str) -> ContextLostError:
    """Make the error of a context after the end of its worker."""
    return ContextLostError(f"the worker process {how}", device=device)
