"""Submitted operations, which may be awaited later."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ...actors import NotAwaited, TaskEvent
from ._blocks import bare

__all__ = ["Pending"]

ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class _Planned(Protocol[ReplyT_co]):
    """A planned operation, which determines its reply."""

    @property
    def finish(self) -> Callable[[], ReplyT_co] | None: ...

    def result(self) -> ReplyT_co: ...


class Pending(NotAwaited, Generic[ReplyT]):
    """A submitted operation. Made by `Device.submit`."""

    __slots__ = ("_callbacks", "_done", "_error", "_operation", "_planned")
    what_to_do = (
        "its reply is pending.value, which can be given to further operations at once; "
        "await pending.wait() waits until the operation is done"
    )

    def __init__(self, operation: str, planned: _Planned[ReplyT]) -> None:
        self._planned = planned
        self._operation = operation
        self._error: BaseException | None = None
        self._done = TaskEvent()
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"failed: {self._error!r}"
        else:
            state = "done" if self.is_done else "in flight"
        return f"<Pending {self._operation}, {state}>"

    if not TYPE_CHECKING:  # so that type checkers report an `await`

        def __await__(self) -> Generator[Any, Any, ReplyT]:
            raise TypeError(f"a Pending is not awaited itself; {self.what_to_do}")

    @property
    def value(self) -> ReplyT:
        """The reply, before the device has completed the operation.

        Arrays in it can be passed to further operations at once, which follow this one. A host array in it is
        filled when `wait` returns.

        Raises:
            RuntimeError: The reply depends on the outcome, and the operation is not done.
        """
        # D28: blocks got their ids in the plan, and later operations are ordered by them. So arrays can be
        # used before anything has run.
        planned = self._planned
        if planned.finish is None:
            return planned.result()
        # A reply made of status words does not exist before these are written.
        if not self._done.is_set() or self._error is not None:
            raise RuntimeError(f"{self._operation}: its reply depends on its outcome; await pending.wait()")
        return planned.result()

    @property
    def is_done(self) -> bool:
        """Whether the device has completed the operation, or it has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error of the operation; None if it has not failed."""
        return self._error

    async def wait(self) -> ReplyT:
        """Wait until the device has completed the operation.

        Cancelling this wait cancels nothing else: other operations may depend on this one.

        Returns:
            `value`.

        Raises:
            InputFailedError: It did not run, because the operation that makes its input failed.
            Exception: See `Device.ask`.
        """
        await self._done.wait()
        if self._error is not None:
            # If two tasks raised one object, they would both write to its traceback. So the next waiting task
            # gets a copy without frames, because they would keep the arrays in the first task's variables
            # alive.
            error, self._error = self._error, bare(self._error)
            raise error
        return self._planned.result()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a short function when the operation is done, or now if it already is.

        Args:
            callback: The function, which must not raise. There may be several.
        """
        if self.is_done:
            callback()
        else:
            self._callbacks += (callback,)

    def settle(self, error: BaseException | None) -> None:
        """Take the outcome. The device calls this once."""
        self._error = error
        self._done.set()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()
