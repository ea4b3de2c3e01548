"""Ctrl-C at any line of the runtime: everything ends, nothing hangs, no actor is left."""

from __future__ import annotations

import signal
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from interrupter import interrupt_everywhere, is_only_ctrl_c
from sample_actors import (
    AT_ONCE,
    Crash,
    Do,
    DoGrouped,
    Echo,
    Note,
    Puppet,
    deferring,
)

from trio_accel.actors import (
    Actor,
    ActorError,
    DeferredReply,
    MailboxOptions,
    Ref,
    Request,
    handles,
    open_system,
)


@attrs.frozen
class Take(Request["Careful", None]):
    """Work that must not be left half done."""


async def program() -> None:
    """Asks, tells, crashes, waits for room, defers and stops."""
    async with open_system("s") as system:
        a = await system.spawn(Puppet, name="a", policy=AT_ONCE)
        b = await system.spawn(Puppet, name="b", policy=AT_ONCE, mailbox=MailboxOptions(capacity=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.ask, Echo("x"))
            nursery.start_soon(_ask, a, DoGrouped(_checkpoint))
            nursery.start_soon(_ask, a, Do(lambda _: b.ask(Echo("y"))))
            nursery.start_soon(_ask, a, Crash())
            nursery.start_soon(_tell, b)
            nursery.start_soon(_defer, a)
        await b.stop()


async def _checkpoint(actor: Puppet) -> None:
    await trio.lowlevel.checkpoint()


async def _ask(ref: Ref[Puppet], request: Request[Puppet, Any]) -> None:
    try:
        await ref.ask(request)
    except ActorError:
        # It crashed over this request, or over a concurrent one.
        return


async def _tell(ref: Ref[Puppet]) -> None:
    for _ in range(3):
        await ref.tell(Note("z"))


async def _defer(ref: Ref[Puppet]) -> None:
    replies: list[DeferredReply[Any]] = []

    async def reply() -> None:
        while not replies:  # noqa: ASYNC110  # it is bounded, and polls no clock
            await trio.lowlevel.checkpoint()
        replies[0].set(None)

    def on_cancel() -> None:
        replies[0].cancelled()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask, ref, deferring(replies, on_cancel))
        nursery.start_soon(reply)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line(caplog: pytest.LogCaptureFixture) -> None:
    interrupt_everywhere(program, ("actors",), caplog, step=5, least=1000)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_of_an_opening(caplog: pytest.LogCaptureFixture) -> None:
    """The line before a manager's own exit runs in the frame of the program, which Trio does not protect."""
    interrupt_everywhere(program, ("actors/_openings.py",), caplog, step=1, least=4)


def test_ctrl_c_interrupts_a_handler_that_does_not_wait() -> None:
    """Handlers are user code: it is not held off there."""
    seen: list[str] = []

    async def busy(actor: Puppet) -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append("went on")

    async def main() -> None:
        async with open_system("s") as system:
            await (await system.spawn(Puppet)).ask(Do(busy))

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(main)
    assert is_only_ctrl_c(caught.value)
    assert seen == []


def test_ctrl_c_during_the_stop_hurries_it() -> None:
    ended: list[str] = []

    async def end(actor: Puppet) -> None:
        trio.lowlevel.spawn_system_task(_interrupt)
        await trio.sleep_forever()

    async def main() -> None:
        async with open_system("s") as system:
            await system.spawn(Puppet, ended, name="first")
            await system.spawn(Puppet, None, None, end, name="last")

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(main)
    assert is_only_ctrl_c(caught.value)
    assert ended == ["+first0", "-first0"]


def test_ctrl_c_waits_for_a_handler_that_asks_for_it() -> None:
    seen: list[str] = []

    class Careful(Actor):
        @handles(Take, ki_protected=True)
        async def take(self, message: Take) -> None:
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")

    class Overrides(Careful):
        async def take(self, message: Take) -> None:
            await super().take(message)

    async def main(actor_class: type[Careful]) -> None:
        async with open_system("s") as system:
            await (await system.spawn(actor_class)).ask(Take())
            await trio.lowlevel.checkpoint()

    for actor_class in (Careful, Overrides):
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:  # noqa: ASYNC401  # any group will do
            trio.run(main, actor_class)
        assert is_only_ctrl_c(caught.value)
    assert seen == ["went on"] * 2


async def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
