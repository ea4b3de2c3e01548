"""Handlers that promise to seldom wait: nothing else about them differs."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeAlias

import attrs
import outcome
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import UNAVAILABLE, fast_path

Act: TypeAlias = "Callable[[Doer], Awaitable[object]]"
VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="none")


@attrs.frozen
class Do(ta.Request["Doer", Any]):
    act: Act


@attrs.frozen
class Tell(ta.Message["Doer"]):
    act: Act


WAITING: set[Act] = set()


def waits(act: Act) -> Act:
    """Mark what cannot be done at once."""
    WAITING.add(act)
    return act


class Doer(ta.Actor):
    def attempt(self, message: Do | Tell) -> Any:
        """Drive what is asked for up to its end, if it does not wait."""
        if message.act in WAITING:
            return UNAVAILABLE
        try:
            message.act(self).__await__().send(None)
        except StopIteration as returned:
            return returned.value
        raise AssertionError("it waits")

    @ta.handles(Do)
    @fast_path(attempt)
    async def do(self, message: Do) -> Any:
        return await message.act(self)

    @ta.handles(Tell)
    @fast_path(attempt)
    async def tell(self, message: Tell) -> None:
        await message.act(self)


@asynccontextmanager
async def doer(policy: ta.Policy | None = None) -> AsyncGenerator[tuple[ta.Ref[Doer], Any]]:
    async with ta.open_system("s") as system:
        yield await system.spawn(Doer, policy=policy), system


async def at_once(actor: Doer) -> str:
    return VARIABLE.get()


@waits
async def wait_forever(actor: Doer) -> None:
    await trio.Event().wait()


@waits
async def after_a_while(actor: Doer) -> str:
    before = VARIABLE.get()
    await trio.lowlevel.checkpoint()
    await trio.sleep(1)
    assert VARIABLE.get() == before
    await trio.lowlevel.checkpoint()
    return VARIABLE.get()


async def deadline_now(actor: Doer) -> float:
    return actor.context.deadline


@waits
async def deadline_later(actor: Doer) -> float:
    await trio.lowlevel.checkpoint()
    return actor.context.deadline


@pytest.mark.parametrize("act", [deadline_now, deadline_later])
async def test_it_knows_the_deadline_of_its_asker(act: Act, autojump_clock: MockClock) -> None:
    async with doer() as (ref, _):
        assert await ref.ask(Do(act)) == float("inf")
        with trio.CancelScope(deadline=trio.current_time() + 50.0) as scope:
            assert await ref.ask(Do(act)) == scope.deadline
            # It is abandoned when the caller gives up.
            assert await ref.ask(Do(act), abandon_on_cancel=True) == float("inf")


@pytest.mark.parametrize("act", [at_once, after_a_while])
async def test_it_runs_in_the_context_of_its_asker(act: Act, autojump_clock: MockClock) -> None:
    seen: dict[str, str] = {}

    async def ask(ref: ta.Ref[Doer], name: str) -> None:
        VARIABLE.set(name)
        seen[name] = await ref.ask(Do(act))

    async with doer() as (ref, _), trio.open_nursery() as nursery:
        for name in "abcdefghijkl":
            nursery.start_soon(ask, ref, name)
    assert seen == {name: name for name in "abcdefghijkl"}
    assert VARIABLE.get() == "none"


async def test_its_settings_stay_in_its_context() -> None:
    async def set_it(actor: Doer) -> str:
        VARIABLE.set("mine")
        return VARIABLE.get()

    async with doer() as (ref, _):
        assert await ref.ask(Do(set_it)) == "mine"
        assert await ref.ask(Do(at_once)) == "none"


async def test_a_waiting_one_is_cancelled_with_its_asker_and_cleans_up(autojump_clock: MockClock) -> None:
    cleaned: list[float] = []

    @waits
    async def wait(actor: Doer) -> None:
        try:
            await trio.Event().wait()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            cleaned.append(trio.current_time())

    async with doer() as (ref, system):
        start = trio.current_time()
        with trio.move_on_after(2) as scope:
            await ref.ask(Do(wait))
        assert scope.cancelled_caught
        assert cleaned == [start + 3]
        assert trio.current_time() == start + 3
        assert await ref.ask(Do(at_once)) == "none"
        assert system.tree().find(ref.path).restarts == 0


async def test_a_scope_after_the_first_wait_is_its_own(autojump_clock: MockClock) -> None:
    @waits
    async def wait(actor: Doer) -> str:
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(1):
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # a nursery is what is tried
            nursery.start_soon(trio.sleep, 1)
        return "through"

    async with doer() as (ref, _):
        assert await ref.ask(Do(wait)) == "through"


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("directive", [ta.Directive.RESUME, ta.Directive.RESTART])
async def test_its_errors(is_waiting: bool, directive: ta.Directive) -> None:
    async def fail(actor: Doer) -> None:
        if is_waiting:
            await trio.lowlevel.checkpoint()
        raise KeyError("boom")

    if is_waiting:
        WAITING.add(fail)
    policy = ta.Policy(directives={KeyError: directive}, backoff=ta.Backoff(base=0.0, jitter=0.0))
    async with doer(policy) as (ref, system):
        expected = KeyError if directive is ta.Directive.RESUME else ta.ActorFailedError
        with pytest.raises(expected):
            await ref.ask(Do(fail))
        assert await ref.ask(Do(at_once)) == "none"
        assert system.tree().find(ref.path).restarts == (directive is ta.Directive.RESTART)


async def test_told_and_posted_messages_wait_too(autojump_clock: MockClock) -> None:
    got: list[object] = []

    @waits
    async def note(actor: Doer) -> str:
        await trio.lowlevel.checkpoint()
        await trio.sleep(1)
        got.append(VARIABLE.get())
        return "done"

    async with doer() as (ref, _):
        context = copy_context()
        context.run(VARIABLE.set, "shared")
        await ref.tell(Tell(note))
        ref.post(Do(note), lambda result: got.append(result.unwrap()), context=context)
        ref.post(Do(note), lambda result: got.append(result.unwrap()), context=context)
        await trio.sleep(10)
    assert got == ["none", "shared", "done", "shared", "done"]


async def test_it_may_defer_its_reply() -> None:
    replies: list[ta.DeferredReply[Any]] = []

    async def defer(actor: Doer) -> ta.DeferredReply[Any]:
        replies.append(actor.context.defer())
        return replies[-1]

    async with doer() as (ref, _), trio.open_nursery() as nursery:
        got: list[object] = []

        async def ask() -> None:
            got.append(await ref.ask(Do(defer)))

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert not got
        replies[0].set(5)
        await wait_all_tasks_blocked()
        assert got == [5]


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


class TestLastLook:
    """A caller served in its own task looks for the reply itself, before it parks."""

    @staticmethod
    def deferred(replies: list[ta.DeferredReply[str]], look: Callable[[], Any]) -> Act:
        async def act(actor: Doer) -> ta.DeferredReply[str]:
            replies.append(actor.context.defer())
            assert replies[-1].poll_once_more(look)
            return replies[-1]

        return act

    async def test_its_last_look_finds_its_reply_and_the_loop_has_turned(self) -> None:
        replies: list[ta.DeferredReply[str]] = []
        turns = Turns()
        seen: list[int] = []

        def look() -> None:
            seen.append(turns.count)
            replies[0].set("found")

        async with doer() as (ref, _):
            await wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(turns)
            assert await ref.ask(Do(self.deferred(replies, look))) == "found"
            trio.lowlevel.remove_instrument(turns)
        assert seen == [turns.count] == [1]

    async def test_it_looks_once_and_waits_if_it_finds_nothing(self, autojump_clock: MockClock) -> None:
        replies: list[ta.DeferredReply[str]] = []
        looks = itertools.count()

        async def reply() -> None:
            await trio.sleep(1.0)
            replies[0].set("later")

        async with doer() as (ref, _), trio.open_nursery() as nursery:
            nursery.start_soon(reply)
            assert await ref.ask(Do(self.deferred(replies, lambda: next(looks)))) == "later"
        assert next(looks) == 1

    async def test_it_looks_even_if_the_reply_has_arrived(self) -> None:
        looks = itertools.count()

        async def act(actor: Doer) -> ta.DeferredReply[str]:
            reply: ta.DeferredReply[str] = actor.context.defer()
            assert reply.poll_once_more(lambda: next(looks))
            reply.set("there")
            return reply

        async with doer() as (ref, _):
            assert await ref.ask(Do(act)) == "there"
        assert next(looks) == 1

    @pytest.mark.parametrize("is_found", [True, False])
    async def test_cancelled_before_it_looks_it_has_its_reply_or_waits_for_its_end(
        self, is_found: bool
    ) -> None:
        replies: list[ta.DeferredReply[str]] = []
        answers: list[str] = []

        def look() -> None:
            if is_found:
                replies[0].set("found")

        def unwind() -> None:
            replies[0].cancelled()

        async def act(actor: Doer) -> ta.DeferredReply[str]:
            replies.append(actor.context.defer(on_cancel=unwind))
            assert replies[0].poll_once_more(look)
            scope.cancel()
            return replies[0]

        async with doer() as (ref, _):
            with trio.CancelScope() as scope:
                answers.append(await ref.ask(Do(act)))
        assert answers == (["found"] if is_found else [])
        assert scope.cancelled_caught is not is_found

    async def test_nobody_looks_for_a_request_served_in_another_task(self) -> None:
        looked: list[bool] = []

        async def act(actor: Doer) -> ta.DeferredReply[str]:
            reply: ta.DeferredReply[str] = actor.context.defer()
            looked.append(reply.poll_once_more(lambda: None))
            reply.set("at once")
            return reply

        async def also(actor: Doer) -> ta.DeferredReply[str]:
            return await act(actor)

        async with doer() as (ref, _), trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ref.ask, Do(waits(act)))
            done: list[object] = []
            ref.post(Do(also), done.append)
            await wait_all_tasks_blocked()
        assert len(done) == 1
        assert looked == [False] * 3


async def test_stopping_an_actor_ends_a_waiting_request(autojump_clock: MockClock) -> None:
    async with doer(ta.Policy(grace=1.0)) as (ref, _), trio.open_nursery() as nursery:
        errors: list[Exception] = []

        async def ask() -> None:
            try:
                await ref.ask(Do(wait_forever))
            except ta.ActorFailedError as error:
                errors.append(error)

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await ref.stop()
        await wait_all_tasks_blocked()
        assert len(errors) == 1


async def test_an_idle_actor_serves_in_the_task_that_asks() -> None:
    tasks: list[trio.lowlevel.Task] = []

    async def note(actor: Doer) -> None:
        tasks.append(trio.lowlevel.current_task())

    async with doer() as (ref, system):
        await ref.ask(Do(note))
        await wait_all_tasks_blocked()
        await ref.ask(Do(note))
        assert tasks[-1] is trio.lowlevel.current_task()
        assert system.tree().find(ref.path).handled == 2


async def test_messages_sent_meanwhile_follow_it() -> None:
    got: list[str] = []

    async def first(actor: Doer) -> None:
        actor.context.ref.post(Do(second), lambda result: got.append("second done"), at_once=True)
        got.append("first")

    async def second(actor: Doer) -> None:
        got.append("second")

    async with doer() as (ref, _):
        await wait_all_tasks_blocked()
        await ref.ask(Do(first))
        await wait_all_tasks_blocked()
        assert got == ["first", "second", "second done"]


async def test_it_does_nothing_for_a_cancelled_asker() -> None:
    done: list[Doer] = []

    async def note(actor: Doer) -> None:
        done.append(actor)

    async with doer() as (ref, _):
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await ref.ask(Do(note))
        assert scope.cancelled_caught
        assert done == []


def ending(how: str) -> Callable[[Doer], Awaitable[str]]:
    """The end of an actor while it serves."""

    async def end(actor: Doer) -> str:
        context = actor.context
        if how == "crash":
            context.crash(KeyError("boom"))
        elif how == "cancel":
            context.ref.cancel("enough")
        else:
            (context.stop if how == "stop" else context.finish)()
        return how

    return end


@pytest.mark.parametrize("how", ["stop", "cancel", "crash", "finish"])
async def test_an_actor_ends_while_another_task_serves_for_it(how: str) -> None:
    async with doer(ta.Policy(backoff=ta.Backoff(base=0.0, jitter=0.0))) as (ref, system):
        await wait_all_tasks_blocked()
        assert await ref.ask(Do(ending(how))) == how
        if how in ("stop", "cancel"):
            await ref.wait_terminated()
        else:
            assert await ref.ask(Do(at_once)) == "none"
            assert system.tree().find(ref.path).restarts == 1


@pytest.mark.parametrize("how", ["stop", "cancel", "crash", "finish"])
async def test_an_actor_ended_by_one_of_several_serves_none_of_the_later(how: str) -> None:
    served: list[Doer] = []
    results: list[str] = []

    async def note(actor: Doer) -> str:
        served.append(actor)
        return "noted"

    def done(result: outcome.Outcome[Any]) -> None:
        results.append(type(result.error).__name__ if isinstance(result, outcome.Error) else result.unwrap())

    async with doer(ta.Policy(backoff=ta.Backoff(base=0.0, jitter=0.0))) as (ref, _):
        await wait_all_tasks_blocked()
        for act in (note, note, ending(how), note, note):
            ref.post(Do(act), done, context=copy_context())
        await wait_all_tasks_blocked()
    if how in ("stop", "cancel"):
        assert results == ["noted", "noted", how, "ActorStoppedError", "ActorStoppedError"]
        assert len(served) == 2
    else:
        assert results == ["noted", "noted", how, "noted", "noted"]
        assert served[0] is served[1] is not served[2] is served[3]


async def test_several_requests_at_once_yield_to_the_loop_after_a_few() -> None:
    served: list[int] = []
    seen: list[int] = []

    async def note(actor: Doer) -> None:
        served.append(len(served))

    async def look() -> None:
        while len(served) < 40:
            seen.append(len(served))
            await trio.lowlevel.checkpoint()

    async with doer() as (ref, _), trio.open_nursery() as nursery:
        await wait_all_tasks_blocked()
        for _ in range(40):
            ref.post(Do(note), lambda result: None, context=copy_context())
        nursery.start_soon(look)
    seen.append(40)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * 9


async def test_requests_after_a_waiting_one_follow_it(autojump_clock: MockClock) -> None:
    got: list[str] = []

    @waits
    async def slowly(actor: Doer) -> None:
        await trio.sleep(1)
        got.append("slowly")

    async def quickly(actor: Doer) -> None:
        got.append("quickly")

    async with doer() as (ref, _):
        await wait_all_tasks_blocked()
        for act in (quickly, quickly, slowly, quickly, slowly, quickly):
            ref.post(Do(act), lambda result: None, context=copy_context())
        await trio.sleep(5)
    assert got == ["quickly", "quickly", "slowly", "quickly", "slowly", "quickly"]


async def test_its_crash_keeps_nothing_of_its_asker() -> None:
    class Heavy:
        pass

    async def fail(actor: Doer) -> None:
        raise KeyError("boom")

    async def ask(ref: ta.Ref[Doer]) -> weakref.ref[Heavy]:
        heavy = Heavy()
        with pytest.raises(ta.ActorFailedError) as caught:
            await ref.ask(Do(fail))
        assert "in fail" in caught.value.__cause__.__notes__[0]  # type: ignore[union-attr]
        del caught
        return weakref.ref(heavy)

    async with doer(ta.Policy(backoff=ta.Backoff(base=0.0, jitter=0.0))) as (ref, _):
        await wait_all_tasks_blocked()
        heavy = await ask(ref)
        await wait_all_tasks_blocked()
        gc.collect()
        assert heavy() is None
