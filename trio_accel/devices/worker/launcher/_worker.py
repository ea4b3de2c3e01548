"""The application's handle of a worker process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from ._link import describe_exit, is_dead

__all__ = ["WorkerProcess"]

# Of the fields of a process's stat file that come after its name; see proc_pid_stat(5).
_FLAGS, _STATUS = 6, -1
_IS_EXITING = 0x4
# CPUCLOCK_SCHED of the kernel: all that its threads have run.
_SCHEDULED = 2


class WorkerProcess:
    """A running worker. Made by the launcher; to be used on the Trio thread.

    Args:
        pid: Its process number.
        descriptor: Of the process; it belongs to this from here on.
        ask: Called when somebody waits for the launcher's report of its end.

    Attributes:
        pid: Its process number; after its death it may be another's.
        is_asked_for: Whether somebody waits for that report.
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
        """How it ends, where the kernel knows already but still takes it apart: a GPU's context takes long.

        Returns:
            As `wait`; None where it is not known yet, or no more.
        """
        fields = self._fields()
        if fields is None:
            return None
        flags, status = int(fields[_FLAGS]), int(fields[_STATUS])
        # Its number is not another's as long as it is not reaped. Older kernels say 0 where they do not tell.
        if not flags & _IS_EXITING or not status or self.is_dead:
            return None
        return describe_exit(os.waitstatus_to_exitcode(status))

    def processor_time(self) -> int:
        """Nanoseconds for which its threads have run; 0 where the system does not say."""
        try:
            # The clock of a process: see clock_getcpuclockid(3), which Python does not have.
            return time.clock_gettime_ns((~self.pid << 3) | _SCHEDULED)
        except OSError:
            return 0

    def is_in_disk_wait(self) -> bool:
        """Whether its main thread waits for a disk, as one does that loads a large library."""
        fields = self._fields()
        return fields is not None and fields[0] == "D"

    def _fields(self) -> list[str] | None:
        """What the kernel says of it, from its state on."""
        try:
            # Bytes, as a codec may have to be imported.
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # Its name may hold anything, and stands in brackets.
                return file.read().rpartition(b")")[2].decode().split()
        except OSError:
            return None

    def kill(self) -> None:
        """Kill it, whatever it is doing; harmless when it is dead."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal; harmless when it is dead."""
        if self._descriptor is None:
            return
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            # Dead already, and reaped; the report is on its way.
            return

    async def wait_dead(self) -> None:
        """Wait until it is dead; neither the launcher nor the ends of its sockets are needed for that."""
        async with self._watching:
            if self._descriptor is not None and not self.is_dead:
                # Closed meanwhile, it was killed, and nothing is left to look at.
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._descriptor)

    async def wait(self) -> str:
        """Wait until it is dead, and reaped with all that it has started unless its launcher has gone.

        Returns:
            How it has ended: ``was killed by SIGKILL``, ``exited with code 3``, ``ended with its launcher``.
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
        """Give up the handle; the worker is killed if it lives."""
        self.kill()
        self._close_descriptor()

    def report(self, how: str) -> None:
        """Take note of its end, or of the end of its launcher; for the launcher."""
        self._how = how
        self._reported.set()
        if self.is_dead:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            trio.lowlevel.notify_closing(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
