"""Starts the actors of libraries on first use."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable
from contextlib import asynccontextmanager
from typing import ClassVar

import attrs
import trio

from ...actors import (
    Actor,
    ActorContext,
    ActorFailedError,
    ActorStoppedError,
    Policy,
    Ref,
    Request,
    Restart,
    describe,
    handles,
)
from ...backends.base import ContextLostError, DeviceLostError, Ints, Strs
from ..base._library_paths import argument_of, title_of
from ..base._options import DeviceOptions
from ._engine import Engine
from ._library import LibraryActor, OwnSupervision
from ._recovery import recovery_policy

# Each request waits only for its own library, however many requests wait for others.
_GROUP, _LIMIT = "libraries", sys.maxsize
_logger = logging.getLogger("trio_accel.devices")


@attrs.frozen
class OpenLibrary(Request["LibraryOpener", Ref[LibraryActor]]):
    """Start a library's actor, unless it is running.

    Attributes:
        library: The import path, ``"package.module:Class"`` or ``"package.module:Class?argument"``.
        named_by: The operation or option with this path, for errors.
    """

    library: str
    named_by: str


@attrs.frozen
class PrepareLibrary(Request["LibraryOpener", None]):
    """Open an actor's library in advance, unless the actor is running. The reply follows the opening.

    Attributes:
        library: The import path, ``"package.module:Class"``.
    """

    library: str


@attrs.frozen
class CloseLibrary(Request["LibraryOpener", None]):
    """End a library's actor after its queued messages, and close its library if opened in advance.

    Attributes:
        library: The import path.
    """

    library: str


class LibraryOpener(Actor):
    """Supervises the library actors of one context, as the base of the context's actor.

    Args:
        options: The options of the device.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self._options = options
        # Both are set once the context is open.
        self._engine: Engine
        self._libraries: dict[str, Ref[LibraryActor]]
        # Called with each library before any other task can submit an operation to it.
        self._take_library: Callable[[str, Ref[LibraryActor]], None] = lambda path, library: None
        # The lock of each import path is held while its actor is started, or its library is opened in
        # advance.
        self._turns: dict[str, trio.Lock] = {}
        # The libraries opened in advance, or being opened, by import path. An actor may have taken some.
        self._ahead: dict[str, str] = {}
        # The supervisors of actors with their own supervision, by import path, even after their end.
        self._supervisors: dict[str, Ref[LibrarySupervisor]] = {}
        # The names of the starting actors.
        self._starting: set[str] = set()
        # The error by which the opening of a library has found the context lost.
        self._found_lost: Exception | None = None

    @handles(OpenLibrary, group=_GROUP, limit=_LIMIT, ki_protected=True)
    async def open_library(self, message: OpenLibrary) -> Ref[LibraryActor]:
        """Start a library actor on first use; operations of other libraries continue meanwhile (D99)."""
        async with self._turn(message.library):
            running = self._libraries.get(message.library)
            if running is not None and not running.is_terminated:
                return running
            if message.library in self._supervisors:
                await _raise_end(self._supervisors[message.library])
            try:
                library = await self._start(message)
            except (ContextLostError, DeviceLostError) as error:
                if self._engine.is_lost or self._found_lost is not None:
                    # Something else lost the context. The next context opens this library.
                    text = f"{message.library} was not opened in time"
                    raise ActorStoppedError(text, path=self.context.path) from error
                self._found_lost = error
                raise
            self._libraries[message.library] = library
            self._take_library(message.library, library)
            return library

    @handles(PrepareLibrary, group=_GROUP, limit=_LIMIT, ki_protected=True)
    async def prepare_library(self, message: PrepareLibrary) -> None:
        """Open a library in advance. A failure is reported only when the library is used."""
        await self.prepare([message.library])

    @handles(CloseLibrary, group=_GROUP, limit=_LIMIT, ki_protected=True)
    async def close_library(self, message: CloseLibrary) -> None:
        """End a library actor; the next operation with its path starts another."""
        path = message.library
        async with self._turn(path):
            running, supervisor = self._libraries.pop(path, None), self._supervisors.pop(path, None)
            if running is not None:
                closed_alone = self._engine.closed_alone
                closed_alone.add(running.path)
                try:
                    await running.stop(drain=True)
                finally:
                    closed_alone.discard(running.path)
            if supervisor is not None:
                await supervisor.stop()
            if path in self._ahead:
                await self._engine.libraries.drop(self._ahead.pop(path))
            self._engine.named.pop(path, None)
        self._turns.pop(path, None)

    async def prepare(self, paths: Iterable[str]) -> None:
        """Open libraries in advance, one after the other. A requested library takes precedence.

        Args:
            paths: The import paths of their actors.
        """
        for path in paths:
            turn = self._turn(path)
            if path in self._libraries or path in self._ahead or turn.locked():
                continue
            async with turn:
                try:
                    await self._prepare(path)
                except Exception as error:  # noqa: BLE001  # its users get the error
                    self._ahead.pop(path, None)
                    if isinstance(error, (ContextLostError, DeviceLostError)):
                        # A spare with a lost context must not take over only to find that out.
                        self._engine.lose_context(error)
                    elif not self._engine.is_lost:
                        shown = title_of(path), describe(error)
                        context_path, text = self.context.path, "%s: %s was not opened ahead: %s"
                        _logger.warning(text, context_path, *shown, extra={"path": context_path})

    async def _prepare(self, path: str) -> None:
        actor_class = await find_actor(path, "a device")
        name = self._ahead[path] = actor_class.library_of(argument_of(path))
        try:
            await self._engine.libraries.prepare(name)
        except Exception:
            # A library discarded meanwhile may fail, because its blocks may be freed.
            if path in self._ahead:
                raise

    def discard(self, path: str) -> None:
        """Withdraw a library opened in advance, or still opening."""
        name = self._ahead.pop(path, None)
        if name is not None:
            self._engine.libraries.discard(name)

    def _turn(self, path: str) -> trio.Lock:
        turn = self._turns.get(path)
        if turn is None:
            turn = self._turns[path] = trio.Lock()
        return turn

    async def _start(self, message: OpenLibrary) -> Ref[LibraryActor]:
        path, options = message.library, self._options
        actor_class = await find_actor(path, message.named_by)
        argument = argument_of(path)
        self._engine.named[path] = actor_class.library_of(argument)
        supervision = None if argument is None else actor_class.supervision(argument)
        refs = (*self._libraries.values(), *self._supervisors.values())
        running = {ref.path.rpartition("/")[2] for ref in refs if not ref.is_terminated}
        name = _name_of(actor_class, path, running | self._starting, supervision)
        self._starting.add(name)
        policy = recovery_policy(options, grace=options.close_grace)
        try:
            if supervision is None:
                # A class of the program may accept only the engine.
                arguments = () if argument is None else (argument,)
                spawn: Callable[..., Awaitable[Ref[LibraryActor]]] = self.context.spawn
                return await spawn(actor_class, self._engine, *arguments, name=name, policy=policy)
            return await self._start_alone(path, actor_class, argument, name, supervision)
        finally:
            self._starting.discard(name)

    async def _start_alone(
        self,
        path: str,
        actor_class: type[LibraryActor],
        argument: str | None,
        name: str,
        supervision: OwnSupervision,
    ) -> Ref[LibraryActor]:
        """Start an actor below its own supervisor, so that its failure ends no other actor."""
        options = self._options
        if supervision.intensity is not None:
            options = attrs.evolve(options, intensity=supervision.intensity)
        if supervision.backoff is not None:
            options = attrs.evolve(options, backoff=supervision.backoff)
        policy = recovery_policy(options, grace=options.close_grace)
        started: list[Ref[LibraryActor]] = []
        self._supervisors[path] = await self.context.spawn(
            LibrarySupervisor,
            actor_class,
            self._engine,
            argument,
            policy,
            started.append,
            name=name,
            restart=Restart.TEMPORARY,
            policy=attrs.evolve(policy, grace=options.close_grace + 1.0),
        )
        return started[0]


@attrs.define(eq=False, slots=False)
class LibrarySupervisor(Actor):
    """The supervisor of one library actor. Only that actor ends if its restarts exceed the intensity."""

    inherits_context: ClassVar[bool] = False

    _actor_class: type[LibraryActor]
    _engine: Engine
    _argument: str | None
    _policy: Policy
    _on_start: Callable[[Ref[LibraryActor]], None]

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Start the actor."""
        name = self._actor_class.library
        self._on_start(
            await context.spawn(
                self._actor_class, self._engine, self._argument, name=name, policy=self._policy
            )
        )
        yield


async def _raise_end(supervisor: Ref[LibrarySupervisor]) -> None:
    """Raise the error for a permanently ended library actor.

    Raises:
        ActorFailedError: It has failed too often.
        ActorStoppedError: It has ended with its context.
    """
    ended = (await supervisor.wait_terminated()).error
    if not isinstance(ended, ActorFailedError):
        raise ActorStoppedError(f"{supervisor.path} has ended with its context", path=supervisor.path)
    detail = "" if ended.__cause__ is None else f" with {describe(ended.__cause__)}"
    raise ActorFailedError(
        f"{supervisor.path} has ended for good: it failed too often, last{detail}; "
        "`await program.reset()` makes it again",
        path=supervisor.path,
    ) from ended.__cause__


def blocks_of(path: str) -> Ints:
    """List the blocks that a library uses from its start, if its actor's module is imported here."""
    actor_class, argument = _imported(path), argument_of(path)
    return () if actor_class is None or argument is None else actor_class.blocks_of(argument)


def modules_of(path: str) -> Strs:
    """List a library's required modules except its own, if its actor's module is imported here."""
    actor_class, argument = _imported(path), argument_of(path)
    return () if actor_class is None or argument is None else actor_class.modules_of(argument)


def _imported(path: str) -> type[LibraryActor] | None:
    """Return the class of a library actor, if its module is imported here."""
    module, _, name = path.partition("?")[0].partition(":")
    attribute: object = getattr(sys.modules.get(module), name, None)
    return attribute if isinstance(attribute, type) and issubclass(attribute, LibraryActor) else None


def _name_of(
    actor_class: type[LibraryActor], path: str, names: Container[str], supervision: OwnSupervision | None
) -> str:
    """Return the name of a library's actor in the tree.

    Actors of this package are named after their libraries, whatever was opened before. An actor of the
    program is named by its import path, even if it launches with a library with an actor here.
    """
    package = __name__.partition(".")[0]
    name = actor_class.library if actor_class.__module__.partition(".")[0] == package else path
    name = name if supervision is None else supervision.name
    # Several import paths may name the same actor class.
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in names)


async def find_actor(path: str, named_by: str) -> type[LibraryActor]:
    """Return the class of a library actor, after a thread has imported its module."""
    if path.partition(":")[0] in sys.modules:
        return load_actor(path, named_by)  # noqa: ASYNC910  # what follows checkpoints
    return await trio.to_thread.run_sync(load_actor, path, named_by)


def load_actor(path: str, named_by: str) -> type[LibraryActor]:
    """Return the class of a library actor.

    Args:
        path: Its import path.
        named_by: The operation or option with this path.

    Raises:
        ValueError: `path` is not an import path, or names a class of __main__.
        TypeError: The name is not a library actor.
        ImportError: The module does not exist.
    """
    module, separator, name = path.partition("?")[0].partition(":")
    if not separator or module == "__main__":
        raise ValueError(
            f"{named_by}: library: {path!r} must be an import path 'package.module:Class' that any "
            "process can import, so no class of __main__"
        )
    try:
        attribute = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        text = f"{named_by}: library: {path!r} cannot be imported: {error}"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
    if not (isinstance(attribute, type) and issubclass(attribute, LibraryActor)):
        raise TypeError(f"{named_by}: library: {path!r} names no subclass of LibraryActor")
    return attribute
