"""Recording what a system does, and what is seen of it."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import trio

from ..actors import ActorSnapshot, ActorStarted, ActorTerminated, Event, System
from ._devices import DeviceRows
from ._failures import LONGEST_LINE, Failures
from ._snapshot import ActorRow, OperationRow, SystemSnapshot
from ._tally import MessageTally, Seconds, Tallies

__all__ = ["Recorder", "record"]

_recorders: WeakKeyDictionary[System, Recorder] = WeakKeyDictionary()


class Recorder:
    """Counts what a system does. Made by `record`.

    Attributes:
        system: The system.
    """

    def __init__(self, system: System, *, operations: int, failures: int) -> None:
        self.system: System = system
        self._since = trio.current_time()
        self._failures = Failures(failures)
        self._tallies = Tallies(operations, self._failures.message, self._since)
        self._devices = DeviceRows(system)
        self._users = 0
        self._ends = ExitStack()

    def __repr__(self) -> str:
        return f"<Recorder of {self.system.name}, {len(self._tallies.by_key)} operations>"

    def snapshot(self) -> SystemSnapshot:
        """See the system now. It waits for no answer, so it works while actors and workers hang.

        Counts of devices come from their workers: those that came last are shown, with their `age`, and new
        ones are asked for in the background.

        In a thread that has no Trio run, it waits until the system's loop has a moment. So a thread that the
        loop waits for must not call it.

        Raises:
            RuntimeError: This is another Trio run than the system's.
            trio.RunFinishedError: The call comes from another thread, and the system's run is over.
        """
        try:
            self.system.check_run("snapshot")
        except RuntimeError:
            return trio.from_thread.run_sync(self.snapshot, trio_token=self.system.token)
        self._devices.ask()
        now = trio.current_time()
        actors = list(self.system.tree().walk())
        by_path: dict[str, list[MessageTally]] = {}
        operations: list[OperationRow] = []
        rates: dict[str, float] = {}
        for tally in self._tallies.by_key.values():
            tally.count()
            by_path.setdefault(tally.path, []).append(tally)
            row = _operation(tally, now)
            operations.append(row)
            rates[tally.path] = rates.get(tally.path, 0.0) + row.rate
        self._tallies.saw(now)
        array_bytes = self._devices.array_bytes()
        return SystemSnapshot(
            time=time.time(),
            system=self.system.name,
            pid=os.getpid(),
            uptime=now - self.system.opened_at,
            recorded=now - self._since,
            rate=sum(rates.values()),
            dead_letters=self.system.dead_letters,
            quarantined=self.system.quarantined,
            actors=tuple(
                [
                    _actor(one, by_path.get(one.path, []), rates.get(one.path, 0.0), array_bytes[one.path])
                    for one in actors
                ]
            ),
            operations=tuple(operations),
            devices=self._devices.rows({one.path: one for one in actors}),
            failures=self._failures.rows,
        )

    async def refresh(self) -> None:
        """Wait for the counts of all devices, so that those of the next snapshot are fresh.

        A worker that hangs does not answer: use it in ``trio.move_on_after``. A device that is being rebuilt
        answers when it has a context again.
        """
        await trio.lowlevel.checkpoint()
        for answered in self._devices.ask():
            await answered.wait()

    def _observe(self, event: Event) -> None:
        self._failures.observe(event)
        self._devices.observe(event)
        match event:
            case ActorStarted(path=path):
                self._tallies.began(path)
            case ActorTerminated(path=path):
                self._tallies.ended(path)
            case _:
                pass

    def begin(self) -> None:
        """One more uses it."""
        self._users += 1
        if self._users == 1:
            self._ends.enter_context(self.system.measure(self._tallies))
            self._ends.enter_context(self.system.subscribe(self._observe, messages=False))
            self._ends.callback(self._devices.close)
            _recorders[self.system] = self

    def end(self) -> None:
        """One uses it no more."""
        self._users -= 1
        if not self._users:
            _recorders.pop(self.system, None)
            self._ends.close()


@contextmanager
def record(system: System, *, operations: int = 1000, failures: int = 50) -> Generator[Recorder, None, None]:
    """Record what a system does, for the body of the ``with``.

    Where the system is recorded already, this is the same recorder, with the bounds that it has.

    Args:
        system: The system.
        operations: The most pairs of an actor and a message type that are told apart. Where there are more,
            actors that have ended are counted together, as one actor ``"(other)"``. So are further actors
            if that many are alive.
        failures: The most failures that are kept.

    Raises:
        TypeError: It is no system.
        ValueError: A bound that is no whole number of at least 1, or of at least 0 for failures.
        RuntimeError: This is another thread or Trio run than the system's; or another meter measures it.
    """
    if not isinstance(system, System):
        raise TypeError(f"record: system must be an open system, got {system!r}")
    for name, value, least in (("operations", operations, 1), ("failures", failures, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"record: {name} must be a whole number of at least {least}, got {value!r}")
    system.check_run("record")
    recorder = _recorders.get(system)
    if recorder is None:
        recorder = Recorder(system, operations=operations, failures=failures)
    recorder.begin()
    try:
        yield recorder
    finally:
        recorder.end()


def _actor(actor: ActorSnapshot, tallies: list[MessageTally], rate: float, array_bytes: int) -> ActorRow:
    p50, p99 = _quantiles(tallies)
    return ActorRow(
        path=actor.path,
        actor_class=actor.actor_class,
        state=actor.state,
        restarts=actor.restarts,
        pid=actor.pid,
        mailbox_depth=actor.mailbox_depth,
        mailbox_peak=actor.mailbox_peak,
        mailbox_waiting=actor.mailbox_waiting,
        stashed=actor.stashed,
        running=actor.running,
        deferred=actor.deferred,
        handled=actor.handled,
        failed=actor.failed,
        expired=actor.expired,
        dropped=actor.dropped,
        last_error=None if actor.last_error is None else actor.last_error[:LONGEST_LINE],
        rate=rate,
        p50=p50,
        p99=p99,
        array_bytes=array_bytes,
    )


def _operation(tally: MessageTally, now: float) -> OperationRow:
    p50, p99 = _quantiles([tally])
    return OperationRow(
        path=tally.path,
        message_type=tally.message_type,
        completed=tally.completed_count,
        failed=tally.failed_count,
        cancelled=tally.cancelled_count,
        dropped=tally.dropped_count,
        queue=tally.queue(),
        run=tally.run(),
        rate=tally.rate(now),
        p50=p50,
        p99=p99,
    )


def _quantiles(tallies: list[MessageTally]) -> tuple[float | None, float | None]:
    """What 50 and 99 in 100 of the last messages took at most (nearest rank)."""
    recent: list[Seconds] = [tally.recent() for tally in tallies]
    seconds = recent[0] if len(recent) == 1 else np.concatenate(recent) if recent else np.empty(0)
    count = len(seconds)
    if not count:
        return None, None
    half, most = (count + 1) // 2 - 1, -(-99 * count // 100) - 1
    ordered = np.partition(seconds, (half, most))
    return float(ordered[half]), float(ordered[most])
