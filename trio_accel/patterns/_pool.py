"""Actors of one class, started and supervised together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from ..actors import Actor, ActorContext, MailboxOptions, Policy, Ref
from ._call import Servant, as_callable
from ._numbers import must_be_count
from ._replicas import Member
from ._router import Router
from ._routing import Routing

__all__ = ["Pool"]


class Pool(Router[Any, Any]):
    """Starts actors of one class as its children, and sends each request to one of them.

    It is a `Router` whose models are its own. Of a `Servant` class they are asked ``Call(item)``. Actors of
    any other class are asked the item itself: it is one of their requests. Start it with
    ``await system.spawn(Pool, Embedder, 4, "model.bin")``, for 4 of ``Embedder("model.bin")``.

    The members are named ``"0"``, ``"1"``, and so on. One that crashes is restarted by the policy of the
    pool; its requests wait in its mailbox, or go to others, as `by` says. If that happens too often, the pool
    itself crashes, as any supervisor does; its supervisor restarts it, with new members. Until then requests
    get `NoReplicaError`. The members stop with the pool, by ``stop(drain=True)`` when all is answered.

    Args:
        actor_class: Class of the members.
        size: How many there are.
        args: What each is made with; so is what `kwargs` has.
        by: How requests are spread, as for `Router`: by load unless it is given.
        member_policy: Policy of each member.
        member_mailbox: Mailbox of each member.
        kwargs: Arguments of the members by name.

    Raises:
        ValueError: `size` is below 1.
        TypeError: `actor_class` is no class of actors, or cannot be made with the arguments.
    """

    def __init__(
        self,
        actor_class: Callable[..., Actor],
        size: int,
        /,
        *args: object,
        by: Routing | None = None,
        member_policy: Policy | None = None,
        member_mailbox: MailboxOptions | None = None,
        **kwargs: object,
    ) -> None:
        must_be_count("size", size)
        super().__init__([_not_started] * size, by=by)
        self._actor_class = actor_class
        self._args = args
        self._kwargs = kwargs
        self._policy = member_policy
        self._mailbox = member_mailbox

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Start the members."""
        async with super().lifespan(context):
            self._members = [await self._start_member(context, member.name) for member in self._members]
            yield

    async def _start_member(self, context: ActorContext, name: str) -> Member[Any, Any]:
        # Type checkers look for the arguments of the actor among those of `spawn`.
        spawn = cast("Callable[..., Awaitable[Ref[Any]]]", context.spawn)
        ref = await spawn(
            self._actor_class,
            *self._args,
            name=name,
            policy=self._policy,
            mailbox=self._mailbox,
            **self._kwargs,
        )
        is_servant = isinstance(self._actor_class, type) and issubclass(self._actor_class, Servant)
        model: Callable[[Any], Awaitable[Any]] = as_callable(ref) if is_servant else ref.ask
        return Member(name, model, ref)


async def _not_started(item: object) -> object:
    raise NotImplementedError(f"the members of the pool are not started: {item!r}")
