"""Handing operations over without waiting for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import outcome

from ..actors import ActorError, ActorFailedError, ActorStoppedError, Ref, Request
from ..backends.base import ContextPoisonedError, QueueFullError
from ._engine import Engine
from ._library import LibraryActor
from ._operation import Launch
from ._pending import Pending

if TYPE_CHECKING:
    from ._context import ContextActor

__all__ = ["OpenLibrary", "Submissions"]

ReplyT = TypeVar("ReplyT")


@attrs.frozen
class OpenLibrary(Request["ContextActor", Ref[LibraryActor]]):
    """Start a library's actor, unless it runs already.

    Attributes:
        library: Import path, ``"package.module:Class"``.
    """

    library: str


class Submissions:
    """The operations of one generation that were submitted and are not done.

    A library that is not open yet is opened; what is submitted meanwhile waits here, in order.
    """

    __slots__ = ("_engine", "_libraries", "_opening", "_outstanding")

    def __init__(self, engine: Engine, libraries: dict[str, Ref[LibraryActor]]) -> None:
        self._engine = engine
        self._libraries = libraries
        self._opening: dict[str, list[tuple[Launch, Pending[Any]]]] = {}
        self._outstanding: dict[str, int] = {}

    def check_room(self, path: str, limit: int, device: str) -> None:
        """Refuse more than the window of a library holds.

        Raises:
            QueueFullError: So many are submitted and not done.
        """
        if self._outstanding.get(path, 0) >= limit:
            raise QueueFullError(
                f"{limit} submitted operations of {path.rpartition(':')[2]} are not done, the most that "
                "in_flight allows; wait for one of them",
                device=device,
            )

    def submit(self, context: Ref[ContextActor], path: str, launch: Launch, reply: ReplyT) -> Pending[ReplyT]:
        """Hand an operation over, to the library's actor or to those that wait for it."""
        pending = Pending(launch.name, reply)
        self._outstanding[path] = self._outstanding.get(path, 0) + 1
        self._engine.enter(launch)
        library = self._libraries.get(path)
        if path in self._opening:
            self._opening[path].append((launch, pending))
        elif library is not None and not library.is_terminated:
            self._post(path, library, launch, pending)
        else:
            self._opening[path] = [(launch, pending)]
            try:
                context.post(OpenLibrary(path), lambda result: self._opened(path, result))
            except ActorError as error:
                self._opened(path, outcome.Error(error))
        return pending

    def _opened(self, path: str, result: outcome.Outcome[Ref[LibraryActor]]) -> None:
        waiting = self._opening.pop(path)
        if isinstance(result, outcome.Error):
            for launch, pending in waiting:
                self._done(path, None, launch, pending, result.error)
            return
        library = result.unwrap()
        for launch, pending in waiting:
            self._post(path, library, launch, pending)

    def _post(self, path: str, library: Ref[LibraryActor], launch: Launch, pending: Pending[Any]) -> None:
        def done(result: outcome.Outcome[None]) -> None:
            error = result.error if isinstance(result, outcome.Error) else None
            self._done(path, library, launch, pending, error)

        try:
            library.post(launch, done)
        except ActorError as error:
            done(outcome.Error(error))

    def _done(
        self,
        path: str,
        library: Ref[LibraryActor] | None,
        launch: Launch,
        pending: Pending[Any],
        error: BaseException | None,
    ) -> None:
        self._outstanding[path] -= 1
        if error is not None:
            error = self._what_happened(library, launch, error)
            for output in launch.outputs:
                # Also what it was only to change, and did not: the program goes on as if it had.
                output.spoil(launch.name, error)
        self._engine.over(launch)
        pending.settle(error)

    def _what_happened(
        self, library: Ref[LibraryActor] | None, launch: Launch, error: BaseException
    ) -> BaseException:
        """The error in a device's terms: an actor that ended did so with its context."""
        if isinstance(error, ActorFailedError) and library is not None and library.is_terminated:
            return self._engine.lost(launch, error) if self._engine.has(launch) else error
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
