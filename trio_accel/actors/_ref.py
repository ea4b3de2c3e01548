"""References to actors: their address, and the ways to send to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import Any, Generic, Never, TypeVar, cast, overload

import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._cell import Cell, Terminated
from ._errors import AskCycleError, MailboxFullError
from ._messages import (
    EXPIRED,
    AnyMessage,
    AwaitedStart,
    Envelope,
    EnvelopeState,
    ItemRequest,
    Message,
    Party,
    Request,
    Serves,
    cell_of_task,
    cells,
    no_poll,
)
from ._options import Overflow, unknown_option

__all__ = ["Posted", "Ref"]

ActorT_co = TypeVar("ActorT_co", covariant=True)
ReplyT = TypeVar("ReplyT")
ItemT = TypeVar("ItemT")


class Ref(Generic[ActorT_co]):
    """The address of an actor; it stays the same over restarts."""

    __slots__ = ("__weakref__", "_cell")

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<Ref {self._cell.path} ({self._cell.actor_class.__name__}, {self._cell.state})>"

    @property
    def path(self) -> str:
        """Path of the actor in the tree of its system."""
        return self._cell.path

    @property
    def is_terminated(self) -> bool:
        """Whether the actor has ended for good."""
        return self._cell.terminated is not None

    @property
    def terminated(self) -> Terminated | None:
        """The actor's end, once it has ended for good; None before."""
        return self._cell.terminated

    @property
    def is_running(self) -> bool:
        """Whether the actor takes messages: it has started, and neither restarts nor is to end."""
        return self._cell.is_running

    # Type checkers take the first that fits: the reply to an item follows from the types of its actor.
    @overload
    async def ask(
        self: Ref[Serves[ItemT, ReplyT]],
        request: ItemRequest[ItemT],
        /,
        *,
        abandon_on_cancel: bool = False,
        **_unknown: Never,
    ) -> ReplyT: ...
    @overload
    async def ask(
        self, request: Request[ActorT_co, ReplyT], /, *, abandon_on_cancel: bool = False, **_unknown: Never
    ) -> ReplyT: ...
    @enable_ki_protection
    async def ask(self, request: Any, /, *, abandon_on_cancel: bool = False, **_unknown: Never) -> Any:
        """Send a request and wait for its reply.

        When cancelled, a request that is still queued is withdrawn and never runs. For one that
        runs, its handler is cancelled and the asker waits until it has unwound.

        The deadline of the asker's cancel scopes travels with the request. The handler runs within it, and so
        do the asks of the handler.

        Args:
            request: The request.
            abandon_on_cancel: When cancelled, return at once and leave a running request to itself. Its
                handler has no deadline.

        Raises:
            ActorFailedError: The actor crashed or was ended while serving it; it may have been executed.
            ActorStoppedError: The actor has ended or stops; it was never executed.
            ActorRestartingError: The actor restarts, and its mailbox is to reject meanwhile; it was
                never executed.
            AskCycleError: The actor waits, directly or not, for the asker.
            MailboxFullError: Refused by the overflow policy; it was never executed.
            TypeError: The actor does not handle it.
            trio.TooSlowError: The deadline with which it was asked has passed, and the asker's was moved
                meanwhile, so that it is not cancelled.
            Exception: The error of the handler, where the actor's policy says that it is a reply.
        """
        if _unknown:
            raise unknown_option("ask", next(iter(_unknown)), ("abandon_on_cancel",))
        cell = self._cell
        attempt = cell.check(request, Request, "ask").attempt
        task = trio.lowlevel.current_task()
        sender = cells.get(task)
        caller = None
        if sender is not None:
            _check_cycle(sender, cell)
            caller = sender.awaited
        reply: Any = EXPIRED
        while reply is EXPIRED:
            envelope = Envelope(
                cell, request, copy_context(), sender, caller, is_abandonable=abandon_on_cancel
            )
            is_served = False
            if attempt is not None and cell.mailbox.is_idle:
                # It has nothing else to do, so its task need not be woken.
                await trio.lowlevel.checkpoint_if_cancelled()
                results: list[outcome.Outcome[object]] = []
                envelope.on_done, envelope.last_poll = results.append, no_poll
                is_served = cell.serve_at_once(envelope, attempt)
                if results or envelope.last_poll is not no_poll:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    envelope.last_poll()
                envelope.on_done = envelope.last_poll = None
                if results:
                    # Held by nothing here: an error would hold this frame, and this frame the error.
                    return results.pop().unwrap()
            if not is_served:
                envelope.deadline = trio.current_effective_deadline()
                cell.mailbox.put(envelope)
            reply = await envelope.park()
            if reply is EXPIRED:
                # The deadline has passed, so this raises Cancelled; if it was moved meanwhile, ask again.
                await trio.lowlevel.checkpoint()
        return reply

    def post(
        self,
        request: Request[ActorT_co, ReplyT],
        on_done: Callable[[outcome.Outcome[ReplyT]], None],
        /,
        *,
        context: Context | None = None,
        at_once: bool = False,
    ) -> Posted:
        """Send a request without waiting; its outcome comes to a callback.

        It waits its turn in the mailbox like that of an asker, whatever the capacity: the poster limits the
        number.

        Args:
            request: The request.
            on_done: Called once, on the Trio thread, from the middle of the runtime: it must be quick
                and must not raise. With `at_once` it may be called before this returns.
            at_once: Serve it here and now, if the actor has nothing else to do and the handler need not
                wait. An error that comes of it refers to the caller's frames.
            context: Context variables that it is served with; by default a copy of the caller's. Many
                requests with the same one are served faster.

        Returns:
            The request, which can be withdrawn while it is queued.

        Raises:
            ActorStoppedError, ActorRestartingError, MailboxFullError, TypeError: As for `ask`.
        """
        cell = self._cell
        attempt = cell.check(request, Request, "post").attempt
        if context is not None and cell.outcomes.observers.of_messages:
            # Observers may set variables of it for this request.
            context = context.copy()
        envelope = Envelope(cell, request, context or copy_context())
        envelope.on_done = cast("Callable[[outcome.Outcome[object]], None]", on_done)
        is_served = (
            at_once
            and attempt is not None
            and cell.mailbox.is_idle
            and cell_of_task() is not cell
            and cell.serve_at_once(envelope, attempt)
        )
        if not is_served:
            cell.mailbox.put(envelope)
        return Posted(envelope)

    @enable_ki_protection
    async def tell(self, message: Message[ActorT_co], /) -> None:
        """Send a message without a reply; waits for room in the mailbox.

        Only the actor's supervisor hears of an error of it. Cancelled while it
        waits, the message is not sent.

        Raises:
            ActorStoppedError: The actor has ended.
            MailboxFullError: Refused by the overflow policy ``reject``; or there is no room, and the actor
                cannot make any while it waits for the sender: it tells itself, or has asked the sender.
            TypeError: The actor does not handle it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        envelope = self._told(message)
        if self._put_told(envelope):
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            if _waits_for_this_task(self._cell):
                raise self._cell.mailbox.refuse_waiting(envelope)
            await envelope.park()

    @enable_ki_protection
    def tell_nowait(self, message: Message[ActorT_co], /) -> None:
        """Send a message without a reply, if there is room.

        Raises:
            trio.WouldBlock: The mailbox is full and its policy is to wait.
            ActorStoppedError, MailboxFullError, TypeError: As for `tell`.
        """
        envelope = self._told(message)
        if self._cell.mailbox.would_wait:
            raise trio.WouldBlock
        self._put_told(envelope)

    @enable_ki_protection
    async def stop(self, *, drain: bool = False) -> None:
        """Stop the actor and wait until it has ended. It takes no new messages from now on.

        The message being served is finished. After the `grace` of its policy the actor is
        cancelled; if it does not end within that time again, it is given up: logged, counted and
        shown as quarantined, and only the end of the system waits for it.

        Args:
            drain: Serve the messages that are queued first, and wait for deferred replies; otherwise
                the former are refused, and the latter fail.

        Raises:
            RuntimeError: Called by the actor itself: use ``self.context.stop()``. Or from another thread or
                Trio run.
        """
        cell = self._cell
        cell.check_run("stop")
        if cell_of_task() is cell:
            raise RuntimeError(
                f"stop: actor {self.path} would wait for itself; call self.context.stop() instead"
            )
        await cell.stop("stop was asked for", drain=drain)

    @enable_ki_protection
    def cancel(self, reason: str) -> None:
        """End the actor now: the message being served is cancelled, queued ones are refused, no restart.

        Raises:
            RuntimeError: Called from another thread or Trio run.
        """
        self._cell.check_run("cancel")
        self._cell.cancel(reason)

    @enable_ki_protection
    async def wait_terminated(self) -> Terminated:
        """Wait until the actor has ended for good; at once if it has already.

        Raises:
            RuntimeError: Called from another thread or Trio run.
        """
        self._cell.check_run("wait_terminated")
        return await self._cell.wait_terminated()

    def _told(self, message: AnyMessage) -> Envelope:
        self._cell.check(message, Message, "tell")
        return Envelope(self._cell, message, copy_context(), is_told=True)

    def _put_told(self, envelope: Envelope) -> bool:
        try:
            return self._cell.mailbox.put(envelope)
        except MailboxFullError:
            if self._cell.mailbox_options.overflow is Overflow.DROP_NEWEST:
                return True
            raise


class Posted:
    """A request that was sent without waiting. Made by `Ref.post`."""

    __slots__ = ("_envelope",)

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    @enable_ki_protection
    def withdraw(self) -> bool:
        """Take the request back, if it is still queued: its callback is not called then.

        Returns:
            Whether it was; otherwise it runs, or is over.

        Raises:
            RuntimeError: Called from another thread or Trio run.
        """
        self._envelope.cell.check_run("withdraw")
        if self._envelope.state != EnvelopeState.QUEUED:
            return False
        self._envelope.on_done = None
        self._envelope.cell.mailbox.withdraw(self._envelope)
        return True


def cell_behind(ref: Ref[Any]) -> Cell:
    """Return the cell behind a reference, for the runtime's own use."""
    return ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _waiting_for(sender: Party) -> Iterator[tuple[Party, Envelope | AwaitedStart | None]]:
    """Yield the sender and those that wait for it, each with its work meanwhile; the sender first."""
    cell: Party | None = sender
    busy_with = sender.awaited
    while cell is not None:
        yield cell, busy_with
        cell, busy_with = (None, None) if busy_with is None else (busy_with.sender, busy_with.caller)


def _waits_for_this_task(target: Cell) -> bool:
    """Tell whether an actor takes no message before the running task goes on."""
    sender = cell_of_task()
    if sender is None:
        return False
    for cell, busy_with in _waiting_for(sender):
        if cell is target:
            incarnation = target.incarnation
            # A handler of a group runs beside the actor's own task, which goes on meanwhile.
            return incarnation is None or busy_with not in incarnation.grouped.values()
    return False


def _check_cycle(sender: Party, target: Cell) -> None:
    """Refuse an ask whose target is among those that wait for the sender."""
    chain = [cell for cell, _ in _waiting_for(sender)]
    if target in chain:
        callers = chain[: chain.index(target) + 1]
        names = " -> ".join(cell.path for cell in [*reversed(callers), target])
        raise AskCycleError(f"the ask would wait for itself: {names}", path=target.path)
