"""Ctrl-C at any line of the runtime: everything ends, nothing hangs, no actor is left."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
import trio.testing
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

import trio_accel.actors
from trio_accel.actors import ActorError, DeferredReply, MailboxOptions, Ref, Request, open_system
from trio_accel.actors._tasks import running_cells

_FOLDER = str(Path(trio_accel.actors.__file__).parent)
_LAST = 150
_STEP = 5
"""Every so many lines: together with the order of tasks, which differs, that meets each in time."""


class Interrupter:
    """Counts the lines of the runtime that are executed, and sends Ctrl-C at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.line if frame.f_code.co_filename.startswith(_FOLDER) else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.line


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
        # It crashed over this request, or over another that runs beside it.
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


def interrupted(at: int) -> tuple[int, BaseException | None]:
    """Run the program with Ctrl-C at a line of the runtime."""
    interrupter, previous = Interrupter(at), sys.gettrace()
    error: BaseException | None = None
    sys.settrace(interrupter)
    try:
        trio.run(program)
    except (KeyboardInterrupt, BaseExceptionGroup) as raised:
        error = raised
    finally:
        sys.settrace(previous)
    return interrupter.lines, error


def only_ctrl_c(error: BaseException) -> bool:
    """Whether it is Ctrl-C, alone or with what the asks of the program ended with because of it."""
    if not isinstance(error, BaseExceptionGroup):
        return isinstance(error, KeyboardInterrupt)
    _, rest = error.split((KeyboardInterrupt, ActorError))
    return rest is None and error.subgroup(KeyboardInterrupt) is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line(caplog: pytest.LogCaptureFixture) -> None:
    lines, error = interrupted(at=0)
    assert error is None
    assert lines > 1000
    for at in range(1, lines, _STEP):
        executed, error = interrupted(at)
        if error is None:
            # The last lines run when the main task waits no more: there the run may be over before it
            # hears of it. How many lines a run has varies with the order of the tasks.
            assert at > executed - _LAST, f"line {at} of {executed}: Ctrl-C was lost"
            continue
        assert only_ctrl_c(error), f"line {at} of {lines}: {error!r}"
        assert running_cells() == [], f"line {at} of {lines}: left behind"
        caplog.clear()


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
    assert only_ctrl_c(caught.value)
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
    assert only_ctrl_c(caught.value)
    assert ended == ["+first0", "-first0"]


async def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
