"""References: the addresses of actors, and the ways to send messages to them."""

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
    """The address of an actor; it stays the same across restarts."""

    __slots__ = ("__weakref__", "_cell")

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<Ref {self._cell.path} ({self._cell.actor_class.__name__}, {self._cell.state})>"

    @property
    def path(self) -> str:
        """Path of the actor in its system's tree."""
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
        """Whether the actor accepts messages: it has started, is not restarting and was not asked to end."""
        return self._cell.is_running

    # Type checkers take the first match, so the actor's own types determine the reply to an item.
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

        If you are cancelled while the request is queued, it is withdrawn and never runs. If it is running,
        its handler is cancelled, and you wait until the handler has unwound.

        The deadline of your cancel scopes travels with the request. The handler runs within this deadline,
        and so do the handler's own requests.

        Args:
            request: The request.
            abandon_on_cancel: When cancelled, return at once and let a running request continue. Its handler
                runs without a deadline.

        Raises:
            ActorFailedError: The actor crashed or ended while serving the request, which may have been
                executed.
            ActorStoppedError: The actor has ended or is stopping; the request was never executed.
            ActorRestartingError: The actor is restarting, and its mailbox rejects messages meanwhile; the
                request was never executed.
            AskCycleError: The actor waits for you, directly or through other actors.
            MailboxFullError: The overflow policy refused the request; it was never executed.
            TypeError: The actor does not handle the request.
            trio.TooSlowError: The request's deadline has passed, but you have moved your own since, so that
                you are not cancelled.
            Exception: The handler's error, if the actor's policy turns it into a reply.
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
                # The actor is idle, so serve the request here and let its task sleep.
                await trio.lowlevel.checkpoint_if_cancelled()
                results: list[outcome.Outcome[object]] = []
                envelope.on_done, envelope.last_poll = results.append, no_poll
                is_served = cell.serve_at_once(envelope, attempt)
                if results or envelope.last_poll is not no_poll:
                    await _last_turn(envelope)
                envelope.on_done = envelope.last_poll = None
                if results:
                    # Keep no reference to an error here: the error would refer to this frame, and the frame
                    # to it.
                    return results.pop().unwrap()
            if not is_served:
                envelope.deadline = trio.current_effective_deadline()
                cell.mailbox.put(envelope)
            reply = await envelope.park()
            if reply is EXPIRED:
                # The deadline has passed, so this raises Cancelled. If the deadline was moved since, ask
                # again.
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
        """Send a request without waiting, and get its outcome in a callback.

        The request waits its turn in the mailbox as with `ask`, even beyond the capacity, so limit the number
        of open requests yourself.

        Args:
            request: The request.
            on_done: Called once, on the Trio thread, from inside the runtime, so it must be quick and must
                not raise. With `at_once` it may run before this method returns.
            at_once: Serve the request here and now if the actor is idle and its handler need not wait. A
                resulting error then refers to the caller's frames.
            context: Context variables for the handler; by default a copy of the caller's. Many requests with
                the same context are faster to serve.

        Returns:
            The request, which you can withdraw while it is queued.

        Raises:
            ActorStoppedError, ActorRestartingError, MailboxFullError, TypeError: As for `ask`.
        """
        cell = self._cell
        attempt = cell.check(request, Request, "post").attempt
        if context is not None and cell.outcomes.observers.of_messages:
            # Copy it, because observers may set variables in it for this request.
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
        """Send a one-way message, and wait for room in the mailbox.

        Only the actor's supervisor learns of an error in its handler. If you are cancelled while you wait,
        the message is not sent.

        Raises:
            ActorStoppedError: The actor has ended.
            MailboxFullError: The overflow policy is ``reject``, or the mailbox is full while the actor waits
                for you, because you are the actor itself or it has sent you a request.
            TypeError: The actor does not handle the message.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        envelope = self._tell_envelope(message)
        if self._put_told(envelope):
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            if _waits_for_this_task(self._cell):
                raise self._cell.mailbox.refuse_waiting(envelope)
            await envelope.park()

    @enable_ki_protection
    def tell_nowait(self, message: Message[ActorT_co], /) -> None:
        """Send a one-way message if the mailbox has room.

        Raises:
            trio.WouldBlock: The mailbox is full, and its policy is to wait.
            ActorStoppedError, MailboxFullError, TypeError: As for `tell`.
        """
        envelope = self._tell_envelope(message)
        if self._cell.mailbox.would_wait:
            raise trio.WouldBlock
        self._put_told(envelope)

    @enable_ki_protection
    async def stop(self, *, drain: bool = False) -> None:
        """Stop the actor and wait until it has ended. From now on, it refuses new messages.

        It finishes the current message. If it takes longer than its policy's `grace`, the actor is cancelled.
        If it does not end within the same time again, it is abandoned: logged, counted and shown as
        quarantined, and only the end of the system waits for it.

        Args:
            drain: Serve the queued messages first, and wait for deferred replies. Otherwise the queued
                messages are refused and the deferred replies fail.

        Raises:
            RuntimeError: You call this from the actor itself (use ``self.context.stop()``), or from another
                thread or Trio run.
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
        """End the actor now: cancel the current message, refuse queued ones, and do not restart.

        Raises:
            RuntimeError: You call this from another thread or Trio run.
        """
        self._cell.check_run("cancel")
        self._cell.cancel(reason)

    @enable_ki_protection
    async def wait_terminated(self) -> Terminated:
        """Wait until the actor has ended for good; return at once if it already has.

        Raises:
            RuntimeError: You call this from another thread or Trio run.
        """
        self._cell.check_run("wait_terminated")
        return await self._cell.wait_terminated()

    def _tell_envelope(self, message: AnyMessage) -> Envelope:
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
    """A request sent without waiting. Made by `Ref.post`."""

    __slots__ = ("_envelope",)

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    @enable_ki_protection
    def withdraw(self) -> bool:
        """Withdraw the request if it is still queued, so that its callback is never called.

        Returns:
            Whether it was withdrawn; otherwise it is running or done.

        Raises:
            RuntimeError: You call this from another thread or Trio run.
        """
        self._envelope.cell.check_run("withdraw")
        if self._envelope.state != EnvelopeState.QUEUED:
            return False
        self._envelope.on_done = None
        self._envelope.cell.mailbox.withdraw(self._envelope)
        return True


def cell_behind(ref: Ref[Any]) -> Cell:
    """Return a reference's cell, for the runtime's own use."""
    return ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _waiting_for(sender: Party) -> Iterator[tuple[Party, Envelope | AwaitedStart | None]]:
    """Yield the sender and then each actor that waits for it, together with its current work."""
    cell: Party | None = sender
    busy_with = sender.awaited
    while cell is not None:
        yield cell, busy_with
        cell, busy_with = (None, None) if busy_with is None else (busy_with.sender, busy_with.caller)


def _waits_for_this_task(target: Cell) -> bool:
    """Return whether an actor cannot take another message until the current task continues."""
    sender = cell_of_task()
    if sender is None:
        return False
    for cell, busy_with in _waiting_for(sender):
        if cell is target:
            incarnation = target.incarnation
            # A group handler runs concurrently with the actor's own task, which continues meanwhile.
            return incarnation is None or busy_with not in incarnation.grouped.values()
    return False


async def _last_turn(envelope: Envelope) -> None:
    """Give other tasks a turn, and let the caller poll for a deferred reply."""
    is_closed = True
    try:
        await trio.lowlevel.cancel_shielded_checkpoint()
        is_closed = False
    finally:
        # Poll in any case, because nothing else watches the work before.
        if envelope.last_poll is not None:
            envelope.last_poll()
        if is_closed:
            envelope.on_done = envelope.last_poll = None
            envelope.desert()


def _check_cycle(sender: Party, target: Cell) -> None:
    """Raise `AskCycleError` if the target of a request waits for its sender."""
    chain = [cell for cell, _ in _waiting_for(sender)]
    if target in chain:
        callers = chain[: chain.index(target) + 1]
        names = " -> ".join(cell.path for cell in [*reversed(callers), target])
        raise AskCycleError(f"the ask would wait for itself: {names}", path=target.path)
