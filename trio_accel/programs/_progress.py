"""Reports of calls, forwarded to the callback of their caller."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import outcome
import trio

from ..backends.base.contract.ops import Asker
from ..backends.base.contract.program_definition import build, tree_of
from ..devices import ProgressReport, track_progress
from ..devices.base._bridge import LoopNotifier
from ..devices.base._progress import chosen_listener

T = TypeVar("T")

_Callback: TypeAlias = Callable[[Any], object]

_CALLBACK: ContextVar[_Callback | None] = ContextVar("trio_accel.on_progress", default=None)
_PROGRESS: ContextVar[Progress | None] = ContextVar("trio_accel.progress", default=None)

chosen_callback: Callable[[], _Callback | None] = _CALLBACK.get
"""Returns the callback of the asks of this task; None if it has none."""
chosen_progress: Callable[[], Progress | None] = _PROGRESS.get
"""Returns what hears the ask of this task; None if nothing does."""


@contextmanager
def on_progress(callback: _Callback) -> Generator[None]:
    """Receive the reports by `report_progress` of all calls made in the body.

    Tasks started in the body inherit it. A `Batcher` calls in tasks of its own. An inner `on_progress`
    replaces an outer one.

    The callback runs in the Trio loop, with the context variables of the caller, in order, and before the
    call returns; never afterwards. It gets at least the last value: earlier ones are left out if the loop is
    slower than the method. A call that runs again after a loss reports from its beginning.

    An error of the callback cancels the call, so that the method may notice that its caller has left. It is
    raised there, once the caller may leave (`cancel_grace`).

    Args:
        callback: Called with each value; it must not be async.

    Raises:
        TypeError: The callback is async, or not a function.
    """
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_progress: callback must be a function that is not async, got {callback!r}")
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


def heard(name: str, ask: Callable[[], Awaitable[T]]) -> Awaitable[T] | None:
    """Forward the reports of a call, to `on_progress` or to `watch_progress`.

    Args:
        name: The method.
        ask: Asks.

    Returns:
        The ask, with its reports; None if nobody listens, or somebody listens already.
    """
    if (callback := _CALLBACK.get()) is not None:
        return Progress(callback).of(ask)
    return _tracked(name, ask) if _PROGRESS.get() is None and chosen_listener() is not None else None


async def _tracked(name: str, ask: Callable[[], Awaitable[T]]) -> T:
    with track_progress(name) as report:
        return await Progress(partial(_forward, report)).of(ask)


def _forward(report: ProgressReport, value: Any) -> None:
    """Forward a number, a pair of a part and the whole, or a note, but no other value."""
    match value:
        case bool():
            pass
        case int() | float():
            report(value)
        case [int() | float() as done, int() | float() as total]:
            report(done, total)
        case str():
            report(0, note=value)
        case _:
            pass


class Progress:
    """The reports of one call, however often it runs.

    Args:
        callback: Gets the values.
    """

    def __init__(self, callback: _Callback) -> None:
        self._callback = callback
        self._context = copy_context()
        self._asker: Asker | None = None
        self._failure: outcome.Error | None = None
        self._notifier = LoopNotifier(self._hear)
        self._scope = trio.CancelScope()

    def follow(self, asker: Asker | None) -> None:
        """Follow this run of the call from now on, and no earlier run."""
        if asker is None:
            return
        self._asker = asker
        asker.notify = self._notifier.notify

    async def of(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Make the call; also raise the error of the callback."""
        # The callback is removed, so that `ask`, which looks for one, does not report twice.
        tokens = _CALLBACK.set(None), _PROGRESS.set(self)
        returned: T | None = None
        try:
            with self._scope:
                returned = await ask()
        finally:
            _CALLBACK.reset(tokens[0])
            _PROGRESS.reset(tokens[1])
            # The loop may have seen the end of the call first.
            self._hear()
            self._notifier.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                failure.unwrap()
            finally:
                # Its error has this frame, which would keep the caller's arrays alive.
                del failure
        return cast("T", returned)

    def _hear(self) -> None:
        text = None if self._asker is None else self._asker.take()
        if text is None or self._failure is not None:
            return
        value = build(tree_of(text), ())
        result = outcome.capture(lambda: self._context.run(self._callback, value))
        if isinstance(result, outcome.Error):
            self._failure = result
            self._scope.cancel(reason="the callback of on_progress has failed")
