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

from ...backends.base import ContextLostError, Strs
from ..launcher._launcher import WorkerProcess
from ..wire import _answers, _orders
from ..wire._channel import Channel, EndOfChannel, SpinWait
from ..wire._frames import Received
from ..wire._protocol import FIRST_WORD, WORDS, NonsenseError, SharedPage
from ._launch_encoding import TemplateTable

MessageHandler: TypeAlias = Callable[["WorkerLink", list[Received]], None]

_logger = logging.getLogger("trio_accel.devices")

# The launcher reports a death within milliseconds; tasks that wait for an outcome wait no longer.
_REPORT = 0.05
# Messages that a worker answers, and its answers to them.
_ASKS = frozenset(kind.name for kind in (_orders.request, _orders.replay, _orders.lease, _orders.call))
_ANSWERS = frozenset(kind.name for kind in (_answers.done, _answers.granted, _answers.result))
# Looks without a beat, and no seconds of a clock: a program that was stopped itself, by a debugger or a
# suspended laptop, would find at its first look that a healthy worker was silent for an hour.
_BEATS = 10
_LONGEST_TICK = 0.1
# The worker's own engine sees a stuck operation first, if its loop runs.
_MARGIN = 0.5
# Long enough for several heartbeats, so that a busy machine does not hide all of them.
_LEAST_SILENCE = 1.0
# It imports its libraries first, on a machine that may be busy. Waits of a second, as looks are counted.
_START = 60


@attrs.define(eq=False, slots=False)
class WorkerLink:
    """A worker from its start to its death: its process, its messages and the words it shares.

    Attributes:
        channel: Its messages.
        libraries: Names of the libraries that its device has.
        is_ready: Whether its device is open.
        how: In words how it ended, or why it is not to be used any more; None while it serves.
        is_started: Whether it serves a generation.
        is_prepared: Whether all is open that was to be opened ahead.
        is_serving: Whether requests go to it: it has started, and its context is not lost.
        is_distrusted: Whether it has sent what makes no sense: nothing that it sent after that counts.
        has_faulted: Whether a fault of the device has ended its context, which a request may have caused.
        is_silent: Whether nothing of its context writes to memory any more, dead or not.
        is_stuck: Whether it was killed because its loop stood still over an operation that does not end.
        is_asked: Tells whether it has requests that it has not answered.
        send: Sends a message; one to a worker that has ended is dropped. See `Channel.send`.
        templates: The launch templates that it has.
        words: The shared words of the libraries that were used, by their import paths.
        used: Libraries that have completed an operation in it.
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
    # The words at its death.
    _last: dict[str, int] | None = None
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _is_over: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        channel = self.channel
        if self._window:
            channel.spin_with(SpinWait(self._window, _ASKS, _ANSWERS))
            channel.share(*self.page.frames)
        # A bound method without a call in between, as each operation sends a message.
        self.send = channel.send
        # At once, so that the launch behind a template can go at once, too.
        self.templates = TemplateTable(partial(channel.send, now=True))

    def __repr__(self) -> str:
        return f"<WorkerLink {self.process!r}, {self.how or 'open'}>"

    def word(self, library: str) -> int:
        """Return the shared word of a library.

        Raises:
            RuntimeError: There are too many.
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
        """Free the shared word of a library that was closed."""
        # A dead worker's words stay: its requests are sorted by them (D58).
        if self._last is None and library in self.words:
            self._free_words.append(self.words.pop(library))

    def started(self, library: str) -> int:
        """Return the number of a library's last request that it began to launch; also when it is gone."""
        if self._last is not None:
            return self._last.get(library, 0)
        word = self.words.get(library)
        return 0 if word is None else self.page.words[word]

    @enable_ki_protection
    async def run(
        self,
        handle: MessageHandler,
        on_end: Callable[[WorkerLink], None],
        on_gone: Callable[[WorkerLink], None],
    ) -> None:
        """Serve the connection until the worker has ended; the worker is dead and gone when this returns.

        Args:
            handle: Takes what the worker sends.
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
                # All its threads have ended, or it has closed its end by itself.
                # Asked before the kill, which would be told as the reason.
                how = self.process.ending()
                self.process.kill()
                if how is None:
                    # The launcher reports a death when the kernel has taken the process apart, which takes
                    # long with the context of a GPU.
                    with trio.move_on_after(_REPORT):
                        how = await self.process.wait()
                self._end(how or self.process.ending() or "ended")
                on_end(self)
                nursery.cancel_scope.cancel(reason="the worker has ended")
        finally:
            try:
                with trio.CancelScope(shield=True):
                    # Each way out ends the process: the next worker takes its memory over (D4).
                    self.process.kill()
                    self._end(await self.process.wait())
                    # The end is told again, in case it was not reached above. It comes before `_bury`: the
                    # owner of the requests reads the shared words.
                    on_end(self)
                    self._bury()
            finally:
                on_gone(self)

    @enable_ki_protection
    async def _wait_for_death(self) -> None:
        """Wait for the death by the process: a child may hold the socket, which then tells of none."""
        await self.process.wait_dead()
        self.channel.expect_no_more()

    async def _receive(self, handle: MessageHandler) -> None:
        """Have messages handled until there are no more, or one makes no sense."""
        try:
            while not self.is_distrusted:
                handle(self, await self.channel.receive())
        except EndOfChannel as end:
            if isinstance(end.__cause__, NonsenseError):
                self.kill_for_nonsense(end.__cause__)

    def kill_for_nonsense(self, error: NonsenseError) -> None:
        """Kill it over a message that makes no sense."""
        self.is_distrusted = True
        self.kill_worker(f"sent a message that makes no sense: {error}")

    def _end(self, how: str) -> None:
        if self.how is None:
            # The first reason is the true one: later ones follow from the kill.
            self.how = how
            pid, extra = self.process.pid, {"device": self._path, "pid": self.process.pid}
            _logger.info("device %s: worker process %d %s", self._path, pid, how, extra=extra)
        self.notify()

    def kill_worker(self, why: str, error: Exception | None = None) -> None:
        """Kill it; messages that it has sent are still taken."""
        # The error belongs to the first reason, so it is kept before `_end` sets that.
        if self.how is None:
            self._error = error
        self._end(why)
        self.process.kill()

    async def wait(self, condition: Callable[[], Any]) -> None:
        """Wait for an event that a message tells.

        Raises:
            ContextLostError: The worker ended before.
            Exception: The error that the worker gave up over.
        """
        while not condition():
            if self.how is not None:
                raise self._error or died(self.how, self._device)
            await self._changed.park()

    async def wait_gone(self) -> None:
        """Wait until it is dead and nothing of it is left."""
        await self._is_over.wait()

    def notify(self) -> None:
        """Wake the tasks that wait for a condition."""
        self._changed.unpark_all()

    @enable_ki_protection
    async def _listen_to_heart(self) -> None:
        for _ in range(_START):
            if not self.is_ready and self.how is None:
                with trio.move_on_after(1.0), suppress(Exception):
                    # If it ends before, there is nothing to listen to.
                    await self.wait(lambda: self.is_ready)
        if not self.is_ready:
            self.kill_worker(f"was not ready after {_START} s and was killed")
        if await self._stands_still(self._timeout / _BEATS, _BEATS, lambda: self.page.heartbeat):
            self.kill_worker(f"gave no sign of life for {self._timeout:g} s and was killed")

    @enable_ki_protection
    async def _watch_the_watch(self, stuck_after: float) -> None:
        """Watch that its engine looks for operations that do not end (D49).

        Behind such an operation a call of the driver may not return either, and with it the worker's loop.
        """
        tick = min(stuck_after, _LONGEST_TICK)
        # D49: `looks` is 0 while nothing is in flight, and then no stillness counts.
        if await self._stands_still(tick, (stuck_after + _MARGIN) / tick, lambda: self.page.looks or None):
            self.is_stuck = True
            self.kill_worker(f"stood still for stuck_after = {stuck_after:g} s and was killed")

    @enable_ki_protection
    async def _watch_the_process(self, stuck_after: float) -> None:
        """Watch that it runs while it has requests, begun or not (D73).

        One that imports, plans or waits for its device runs: at least its heart beats, and where a library
        holds the interpreter's lock meanwhile, that computes or reads from a disk. One that is stopped, or
        frozen, has not even begun with its requests, so that its engine looks for nothing.
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

    async def _stands_still(self, tick: float, ticks: float, look: Callable[[], object]) -> bool:
        """Wait until something has been the same at so many looks in a row, and is not None.

        Looks are counted, and not seconds: if this process was stopped, time has passed for both.

        Returns:
            Whether it is so; False once the worker has ended.
        """
        last, still = None, 0
        while self.how is None:
            await trio.sleep(tick)
            seen = look()
            still = still + 1 if seen is not None and seen == last else 0
            last = seen
            if still >= ticks:
                return True
        return False

    def _bury(self) -> None:
        self.process.close()
        self.channel.close()
        # D58: the words are read after the process is dead, so they are its last state.
        self._last = {library: self.page.words[word] for library, word in self.words.items()}
        self.page.close()
        # The tasks that wait go on last: nothing of the worker is left by now.
        self._is_over.set()


def died(how: str, device: str) -> ContextLostError:
    """Make the error of a context whose worker has ended."""
    return ContextLostError(f"the worker process {how}", device=device)
