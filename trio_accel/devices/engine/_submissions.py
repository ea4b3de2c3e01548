"""Handing operations to library actors without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import TypeAlias

import attrs
import outcome

from ...actors import ActorError, ActorFailedError, ActorStoppedError, Posted, Ref
from ...backends.base import ContextPoisonedError, DeviceLostError
from ..operations._operation import Launch
from ._engine import Engine
from ._library import LibraryActor
from ._library_opener import LibraryOpener, OpenLibrary

__all__ = ["OnDone", "Submissions"]

OnDone: TypeAlias = "Callable[[BaseException | None], None]"


@attrs.define(eq=False)
class _Submitted:
    """One operation on its way.

    Attributes:
        launch: What is launched.
        on_done: Called with what it failed with, or None.
        invalidates: Whether its outputs are invalidated also if it was never launched: others count on it.
        opener: Who opens its library.
        library: Who launches it.
        posted: Its place in the mailbox.
    """

    launch: Launch
    on_done: OnDone
    invalidates: bool
    opener: Ref[LibraryOpener]
    library: Ref[LibraryActor] | None = None
    posted: Posted | None = None


class Submissions:
    """The operations of one generation that were submitted and are not done.

    A library that is not open yet is opened; what is submitted meanwhile waits here, in order.
    """

    __slots__ = ("_context", "_engine", "_libraries", "_opening", "_submitted")

    def __init__(
        self, engine: Engine, libraries: dict[str, Ref[LibraryActor]], context: Context | None = None
    ) -> None:
        # In a worker, where requests bring no context variables, all share one; and no program is called from
        # there, whose variables an error would keep, so that operations are launched as they come.
        self._context = context
        self._engine = engine
        self._libraries = libraries
        self._opening: dict[str, list[_Submitted]] = {}
        self._submitted: dict[Launch, _Submitted] = {}

    def submit(
        self, context: Ref[LibraryOpener], launch: Launch, on_done: OnDone, *, invalidates: bool = True
    ) -> None:
        """Hand an operation over, to the library's actor or to those that wait for it."""
        submitted = self._submitted[launch] = _Submitted(launch, on_done, invalidates, context)
        path = launch.library
        self._engine.enter(launch)
        library = self._libraries.get(path)
        if library is not None and not library.is_terminated and path not in self._opening:
            self._post(library, submitted)
        else:
            self._open(submitted)

    def _open(self, submitted: _Submitted) -> None:
        """Have an operation wait until its library is open."""
        path = submitted.launch.library
        if path in self._opening:
            self._opening[path].append(submitted)
            return
        self._opening[path] = [submitted]
        request = OpenLibrary(path, submitted.launch.name)
        try:
            submitted.opener.post(request, lambda result: self._opened(path, result))
        except ActorError as error:
            self._opened(path, outcome.Error(error))

    def withdraw(self, launch: Launch) -> bool:
        """Take an operation back that is not launched; `on_done` is not called then.

        Returns:
            Whether it was; otherwise it is in flight or over, or its library has begun with it: then its
            outcome is `WithdrawnError`, unless it is launched after all.
        """
        submitted = self._submitted.get(launch)
        if submitted is None:
            return False
        waiting = self._opening.get(launch.library, [])
        if submitted in waiting:
            waiting.remove(submitted)
        elif submitted.posted is None or not submitted.posted.withdraw():
            self._engine.gate.withdraw(launch)
            return False
        del self._submitted[launch]
        self._engine.over(launch)
        return True

    def found(self, path: str, library: Ref[LibraryActor]) -> None:
        """A library is open: what waits for it goes before all that is handed to it from now on.

        Others count on that order, and would wait for each other for ever: see `LaunchOrder`.
        """
        for submitted in self._opening.pop(path, ()):
            self._post(library, submitted)

    def _opened(self, path: str, result: outcome.Outcome[Ref[LibraryActor]]) -> None:
        waiting = self._opening.pop(path, [])
        if self._engine.is_lost and isinstance(result, outcome.Value):
            # It was opened by the next context, which knows nothing of these.
            result = outcome.Error(ActorStoppedError(f"{path} was not opened in time", path=path))
        if isinstance(result, outcome.Error):
            for submitted in waiting:
                self._done(submitted, result.error)
            return
        library = result.unwrap()
        for submitted in waiting:
            self._post(library, submitted)

    def _post(self, library: Ref[LibraryActor], submitted: _Submitted) -> None:
        def done(result: outcome.Outcome[None]) -> None:
            error = result.error if isinstance(result, outcome.Error) else None
            engine = self._engine
            if isinstance(error, ActorStoppedError) and not (engine.is_lost or engine.is_closing):
                # The actor has ended, and its context has not: whether there is another, is told there.
                self._open(submitted)
            else:
                self._done(submitted, error)

        submitted.library = library
        try:
            submitted.posted = library.post(
                submitted.launch, done, context=self._context, at_once=self._context is not None
            )
        except ActorError as error:
            done(outcome.Error(error))

    def _done(self, submitted: _Submitted, error: BaseException | None) -> None:
        launch = submitted.launch
        del self._submitted[launch]
        if error is not None:
            error = self._what_happened(submitted.library, launch, error)
            if submitted.invalidates:
                for output in launch.outputs:
                    # Also what it was only to change, and did not: the program goes on as if it had.
                    output.spoil(launch.name, error)
        try:
            submitted.on_done(error)
        finally:
            self._engine.over(launch)

    def _what_happened(
        self, library: Ref[LibraryActor] | None, launch: Launch, error: BaseException
    ) -> BaseException:
        """The error in a device's terms: an actor that ended did so with its context."""
        if isinstance(error, ActorFailedError):
            if library is None:
                # The context's actor, which opens libraries.
                cause = error.__cause__
                if isinstance(cause, (ContextPoisonedError, DeviceLostError)):
                    return self._engine.lost_to_library(launch, cause)
                if isinstance(cause, ActorStoppedError):
                    error = cause
            elif library.is_terminated:
                return self._engine.lost(launch, error) if launch.is_in_flight else error
        if not isinstance(error, ActorStoppedError):
            return error
        lost = ContextPoisonedError(
            "the device's context ended before this operation was started; submit it again",
            device=self._engine.device.info.name,
            operation=launch.name,
            generation=self._engine.generation,
        )
        lost.__cause__ = error
        return lost
