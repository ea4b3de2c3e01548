"""Operations that were handed over and may be waited for later."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import trio

from ...actors import NotAwaited
from ._blocks import bare

__all__ = ["Pending"]

ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class _Planned(Protocol[ReplyT_co]):
    """A planned operation, which knows its reply."""

    @property
    def finish(self) -> Callable[[], ReplyT_co] | None: ...

    def result(self) -> ReplyT_co: ...


class Pending(NotAwaited, Generic[ReplyT]):
    """An operation that was handed over. Made by `Device.submit`."""

    __slots__ = ("_callbacks", "_done", "_error", "_operation", "_planned")
    what_to_do = (
        "its reply is pending.value, which can be given to further operations at once; "
        "await pending.wait() waits until the operation is done"
    )

    def __init__(self, operation: str, planned: _Planned[ReplyT]) -> None:
        self._planned = planned
        self._operation = operation
        self._error: BaseException | None = None
        self._done = trio.Event()
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"failed: {self._error!r}"
        else:
            state = "done" if self.is_done else "in flight"
        return f"<Pending {self._operation}, {state}>"

    if not TYPE_CHECKING:  # a type checker reports it where there is none

        def __await__(self) -> Generator[Any, Any, ReplyT]:
            raise TypeError(f"a Pending is not awaited itself; {self.what_to_do}")

    @property
    def value(self) -> ReplyT:
        """Its reply, before the device has completed it.

        Arrays in it can be given to further operations at once, which are ordered after this one. A host
        array in it is filled by the time that `wait` returns.

        Raises:
            RuntimeError: The reply depends on the outcome, and the operation is not done.
        """
        # D28: blocks were named when it was planned, and later operations are ordered by them. So arrays can
        # be given out before anything has run.
        planned = self._planned
        if planned.finish is None:
            return planned.result()
        # A reply that is made of status words does not exist before these are written.
        if not self._done.is_set() or self._error is not None:
            raise RuntimeError(f"{self._operation}: its reply depends on its outcome; await pending.wait()")
        return planned.result()

    @property
    def is_done(self) -> bool:
        """Whether the device has completed it, or it has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Its error; None if it has not failed."""
        return self._error

    async def wait(self) -> ReplyT:
        """Wait until the device has completed the operation.

        Cancelling this wait cancels nothing else: other operations may depend on this one.

        Returns:
            `value`.

        Raises:
            InputFailedError: It did not run, because one that makes its input failed.
            Exception: See `Device.ask`.
        """
        await self._done.wait()
        if self._error is not None:
            # Two tasks that raise one object would write to one traceback: the next one that waits gets a
            # copy.
            # The copy has no frames either: they would keep the arrays in the first waiter's variables.
            error, self._error = self._error, bare(self._error)
            raise error
        return self._planned.result()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call something short when it is done, or now if it is.

        Args:
            callback: One of several. It must not raise.
        """
        if self.is_done:
            callback()
        else:
            self._callbacks += (callback,)

    def settle(self, error: BaseException | None) -> None:
        """Take the outcome; called by the device, once."""
        self._error = error
        self._done.set()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()
