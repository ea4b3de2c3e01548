"""State that many tasks read and one at a time changes, in versions that never change."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

import attrs
import trio

from ..actors import ParkingLot, TaskEvent, TaskLock, must_be_count, must_be_positive, opens

__all__ = ["Draft", "LeaseExpiredError", "Shared", "Version", "VersionConflictError"]

T = TypeVar("T")

# Seconds. The block of `replace` never waits, so any lease is long enough.
_REPLACE_LEASE = 60.0


class LeaseExpiredError(Exception):
    """The lease of a writer was over before its block; its value was dropped."""


class VersionConflictError(Exception):
    """`Shared.replace` was asked to replace another version than the current one; nothing was changed.

    Attributes:
        current: The number of the current version.
    """

    def __init__(self, message: str, *, current: int) -> None:
        super().__init__(message)
        self.current: int = current


@attrs.frozen
class Version(Generic[T]):
    """One version of a `Shared` value.

    Attributes:
        number: Its number, from 1; a later version has a higher one.
        value: The value.
    """

    number: int
    value: T


class Draft(Generic[T]):
    """The next version, for a writer.

    Attributes:
        version: The number of the version that it is made of.
    """

    def __init__(self, version: Version[T]) -> None:
        self.version: int = version.number
        self._value = version.value
        self._is_set = False

    @property
    def value(self) -> T:
        """The value: until it is set, the value of the current version.

        Do not change it in place, because readers use it. Set a new one.
        """
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._value = value
        self._is_set = True

    @property
    def is_set(self) -> bool:
        """Whether a new value was set, the same object included."""
        return self._is_set


@attrs.define(eq=False)
class _WriterTurn:
    """The turn of a writer.

    Attributes:
        ends: The time at which it is over in any case.
        over: Set when the writer gives it back.
    """

    ends: float
    over: TaskEvent = attrs.field(factory=TaskEvent)


class Shared(Generic[T]):
    """A value that many tasks read and one at a time changes.

    Each change makes a new `Version`. A version stays as it is, so readers need no lock, never wait, and see
    all of a change or nothing of it. Values are yours not to change in place: plain data, or arrays of a
    device that nothing writes to.

    Writers get their turns in the order in which they asked. A turn is a lease of some seconds. At its end
    the writer is cancelled, its value is dropped, and the next writer begins, even if the expired one shields
    itself or hangs in a thread. So a writer that dies, hangs or is cancelled delays the others by its lease
    at most.

    The object is used in one Trio run.

    Args:
        value: The value of version 1.
    """

    def __init__(self, value: T) -> None:
        self._version = Version(1, value)
        self._newer = ParkingLot()
        self._queue = TaskLock()
        self._turn: _WriterTurn | None = None

    def __repr__(self) -> str:
        return f"<Shared: version {self._version.number}>"

    def read(self) -> Version[T]:
        """Return the current version."""
        return self._version

    async def wait_newer(self, version: int) -> Version[T]:
        """Wait for a version with a higher number, and return the current one; some may be left out.

        Raises:
            ValueError, TypeError: The number is negative, or not an integer.
        """
        version = must_be_count("wait_newer: version", version, minimum=0)
        await trio.lowlevel.checkpoint()
        while self._version.number <= version:
            await self._newer.park()
        return self._version

    @opens("the value is not yours to change yet: async with shared.write(lease=seconds) as draft")
    async def write(self, *, lease: float) -> AsyncGenerator[Draft[T]]:
        """Wait for the turn of this task, and change the value.

        ``async with shared.write(lease=5) as draft: draft.value = changed(draft.value)``. If the value was
        set, it becomes the next version at the end of the block. After an error or a cancellation of the
        block, nothing has changed.

        Args:
            lease: Seconds that the block may take. Then it is cancelled. Waiting for the turn does not count.

        Raises:
            LeaseExpiredError: The block took longer.
            ValueError, TypeError: `lease` is zero, negative, NaN or infinite, or not a number.
        """
        seconds = must_be_positive("write: lease", lease)
        async with self._queue:
            while self._turn is not None and trio.current_time() < self._turn.ends:
                with trio.move_on_at(self._turn.ends):
                    await self._turn.over.wait()
            turn = self._turn = _WriterTurn(trio.current_time() + seconds)
        draft = Draft(self._version)
        try:
            with trio.move_on_at(turn.ends):
                yield draft
            # The block may have caught the cancellation, or held the loop.
            if self._turn is not turn or trio.current_time() >= turn.ends:
                raise LeaseExpiredError(f"write: the block took longer than its lease of {seconds:g} s")
            if draft.is_set:
                self._version = Version(draft.version + 1, draft.value)
                self._newer.unpark_all()
        finally:
            turn.over.set()
            if self._turn is turn:
                self._turn = None

    async def replace(self, value: T, *, version: int) -> Version[T]:
        """Make a value the next version, if a version is still the current one: compare and set.

        It waits for its turn like a writer, because earlier writers may change the version.

        Returns:
            The new version.

        Raises:
            VersionConflictError: The version is not the current one.
        """
        async with self.write(lease=_REPLACE_LEASE) as draft:
            if draft.version != version:
                raise VersionConflictError(
                    f"replace: version {version} is not the current one, {draft.version}; read again",
                    current=draft.version,
                )
            draft.value = value
        return self._version
