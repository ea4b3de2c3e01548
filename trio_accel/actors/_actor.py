"""The base class of actors."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from ._handlers import ActorBase, HandlerTable, collect_handlers

if TYPE_CHECKING:
    from ._context import ActorContext

__all__ = ["Actor"]

_RESERVED = frozenset({"name", "restart", "policy", "mailbox"})


class Actor(ActorBase):
    """State and handlers of an actor; one instance is one incarnation.

    ``__init__`` is run again at each restart with the same arguments, so it must be cheap and
    must not keep anything that has to be given back: that belongs into `lifespan`.

    Attributes:
        context: The actor's view of its surroundings; set before `lifespan` is entered.
    """

    context: ActorContext
    __handlers__: ClassVar[HandlerTable] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        taken = _RESERVED.intersection(inspect.signature(cls.__init__).parameters)
        if taken:
            what = "the parameter another name" if len(taken) == 1 else "the parameters other names"
            raise TypeError(
                f"{cls.__name__}: __init__ takes {' and '.join(sorted(taken))}, which spawn() keeps for "
                f"itself; give {what}"
            )
        if inspect.isasyncgenfunction(cls.lifespan) or inspect.iscoroutinefunction(cls.lifespan):
            raise TypeError(f"{cls.__name__}: lifespan must be decorated with @asynccontextmanager")
        cls.__handlers__ = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the resources of one incarnation: override as an async context manager.

        What comes before ``yield`` runs before the first message, what follows it after the
        last one, when the actor's children have ended. A failure on either side is a crash.
        """
        yield
