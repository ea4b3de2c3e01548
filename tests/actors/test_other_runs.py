"""Calls from another thread or Trio run are refused at once, and harm neither."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import BoomError, Do, Echo, Note, Puppet, deferring, started

from trio_accel.actors import ActorContext, ActorSystem, DeferredReply, Ref

Replies = list[DeferredReply[Any]]
REFUSED = r"belongs to another thread or Trio run"


async def in_another_run(call: Callable[[], Awaitable[object]]) -> None:
    """Call it in a Trio run of another thread, which must continue after the error."""
    gone_on: list[bool] = []

    async def run() -> None:
        with pytest.raises(RuntimeError, match=REFUSED):
            await call()
        await trio.lowlevel.checkpoint()
        gone_on.append(True)

    await trio.to_thread.run_sync(trio.run, run)
    assert gone_on == [True]


async def in_no_run(call: Callable[[], Awaitable[object]]) -> None:
    """Step it in a thread without a Trio run."""

    def step() -> None:
        with pytest.raises(RuntimeError, match=REFUSED):
            next(call().__await__())

    await trio.to_thread.run_sync(step)


async def in_a_thread(call: Callable[[], object]) -> None:
    def refused() -> None:
        with pytest.raises(RuntimeError, match=REFUSED):
            call()

    await trio.to_thread.run_sync(refused)


@pytest.mark.parametrize("elsewhere", [in_another_run, in_no_run])
@pytest.mark.parametrize("verb", ["spawn", "open_supervisor", "ask", "stop", "wait_terminated"])
async def test_awaiting_in_another_run_is_refused(
    system: ActorSystem, puppet: Ref[Puppet], elsewhere: Any, verb: str
) -> None:
    call: dict[str, Callable[[], Awaitable[object]]] = {
        "spawn": lambda: system.spawn(Puppet, name="other"),
        "open_supervisor": lambda: system.open_supervisor("other").__aenter__(),
        "ask": lambda: puppet.ask(Echo("hello")),
        "stop": puppet.stop,
        "wait_terminated": puppet.wait_terminated,
    }
    await elsewhere(call[verb])
    assert [child.name for child in system.tree().children] == ["puppet"]
    assert await puppet.ask(Echo("alive")) == "alive"


async def test_a_tell_in_another_run(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    await in_another_run(lambda: puppet.tell(Note("hello")))
    assert await puppet.ask(Echo("alive")) == "alive"


@pytest.mark.parametrize("verb", ["spawn", "stop", "finish", "crash", "watch", "unwatch", "unstash_all"])
async def test_the_context_of_an_actor(system: ActorSystem, puppet: Ref[Puppet], verb: str) -> None:
    contexts: list[ActorContext] = []

    async def hand_out(actor: Puppet) -> None:
        contexts.append(actor.context)

    await puppet.ask(Do(hand_out))
    [context] = contexts
    if verb == "spawn":
        await in_another_run(lambda: context.spawn(Puppet))
    else:
        calls: dict[str, Callable[[], object]] = {
            "stop": context.stop,
            "finish": context.finish,
            "crash": lambda: context.crash(BoomError()),
            "watch": lambda: context.watch(puppet, to=Note("ended")),
            "unwatch": lambda: context.unwatch(puppet),
            "unstash_all": context.unstash_all,
        }
        await in_a_thread(calls[verb])
    assert await puppet.ask(Echo("alive")) == "alive"
    node = system.tree().find("s/puppet")
    assert (node.state, node.restarts, node.children) == ("running", 0, ())


CALLS: dict[str, Callable[[DeferredReply[Any]], object]] = {
    "set": lambda reply: reply.set("from a thread"),
    "fail": lambda reply: reply.fail(BoomError()),
    "fail_as_crash": lambda reply: reply.fail_as_crash(BoomError()),
}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("in_run", [False, True], ids=["thread", "run"])
async def test_a_deferred_reply_stays_open(puppet: Ref[Puppet], verb: str, in_run: bool) -> None:
    replies: Replies = []

    async def call() -> None:
        CALLS[verb](replies[0])

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        if in_run:
            await in_another_run(call)
        else:
            await in_a_thread(lambda: CALLS[verb](replies[0]))
        assert not replies[0].is_done
        assert asker.is_waiting
        assert replies[0].set("on the Trio thread")
    assert asker.outcome == "on the Trio thread"


async def test_the_error_explains_how_a_thread_replies(puppet: Ref[Puppet]) -> None:
    replies: Replies = []

    def reply_wrongly_then_rightly() -> None:
        with pytest.raises(RuntimeError) as caught:
            replies[0].set(1)
        assert str(caught.value) == (
            "set: the reply to Do of actor s/puppet belongs to another thread or Trio run, and is still "
            "open; give it there: trio.from_thread.run_sync(reply.set, ...) from a thread that the run has "
            "started, or token.run_sync_soon(reply.set, ...) from any other"
        )
        assert trio.from_thread.run_sync(replies[0].set, 2)

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        await trio.to_thread.run_sync(reply_wrongly_then_rightly)
    assert asker.outcome == 2


async def test_the_cancellation_of_an_asker_is_not_ended_from_a_thread(puppet: Ref[Puppet]) -> None:
    replies: Replies = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        asker.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await in_a_thread(replies[0].cancelled)
        assert asker.is_waiting
        assert replies[0].cancelled()
    assert isinstance(asker.outcome, trio.Cancelled)


async def test_a_posted_request_is_not_withdrawn_from_a_thread(puppet: Ref[Puppet]) -> None:
    results: list[Any] = []
    posted = puppet.post(Echo("posted"), results.append)
    await in_a_thread(posted.withdraw)
    await trio.testing.wait_all_tasks_blocked()
    assert [result.unwrap() for result in results] == ["posted"]
