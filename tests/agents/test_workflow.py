"""Workflows: the order of starts, the propagation of failures, and the stored results."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from databases import MakeStore

import trio_accel as ta
from trio_accel.agents import StepEvent, Workflow, WorkflowTree, current_step
from trio_accel.cluster import FencedError, Store

pytestmark = pytest.mark.no_device


@asynccontextmanager
async def opened(make_store: MakeStore) -> AsyncGenerator[Store, None]:
    store: Store = make_store()
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


async def test_steps_request_one_another_by_name_and_start_when_it_is_there(autojump_clock: Any) -> None:
    flow = Workflow("order")
    started: dict[str, float] = {}

    async def take(seconds: float) -> None:
        started[current_step().name] = trio.current_time() - begin
        await trio.sleep(seconds)

    @flow.step()
    async def fast(x: int) -> int:
        await take(1)
        return x + 1

    @flow.step()
    async def slow(x: int) -> int:
        await take(10)
        return x + 2

    @flow.step()
    async def after(fast: int) -> int:
        await take(2)
        return fast * 10

    @flow.step()
    async def last(after: int, slow: int) -> int:
        await take(3)
        return after + slow

    begin = trio.current_time()
    found = await flow.run(x=1)
    assert found.results == {"fast": 2, "slow": 3, "after": 20, "last": 23}
    # `after` does not wait for `slow`, which began when it did.
    assert started == {"fast": 0, "slow": 0, "after": 1, "last": 10}
    times = {name: (one.waited, one.seconds) for name, one in found.steps.items()}
    assert times == {"fast": (0, 1), "slow": (0, 10), "after": (1, 2), "last": (10, 3)}
    assert found.seconds == 13
    assert flow.runs == {}


async def test_a_fan_out_is_bounded_and_its_results_are_in_order(autojump_clock: Any) -> None:
    flow = Workflow("fan")
    running, most = 0, 0

    @flow.step(over="numbers", at_once=3)
    async def square(number: int, offset: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(10 - number)
        running -= 1
        return number * number + offset

    found = await flow.run(numbers=range(10), offset=100)
    assert found.results["square"] == [100 + number**2 for number in range(10)]
    assert most == 3
    assert found.steps["square"].attempts == 10
    assert (await flow.run(numbers=[], offset=0)).results["square"] == []
    with pytest.raises(TypeError, match="square needs a list of items, and numbers is None"):
        await flow.run(numbers=None, offset=0)
    # Its order differs in the process that continues the run.
    for items in ({"a", "b"}, frozenset((1, 2))):
        with pytest.raises(TypeError, match=r"needs items in an order, and numbers is a set; return sorted"):
            await flow.run(numbers=items, offset=0)


async def test_a_failing_branch_does_not_end_others_if_so_configured() -> None:
    flow = Workflow("branches")

    @flow.step(may_fail=True)
    async def broken(x: int) -> int:
        raise OSError("no network")

    @flow.step()
    async def needs(broken: int) -> int:
        return broken

    @flow.step()
    async def needs_needs(needs: int) -> int:
        return needs

    @flow.step()
    async def other(x: int) -> int:
        return x

    @flow.step()
    async def does_without(other: int, broken: int = -1, needs: int = -2, given: int = 7) -> list[int]:
        return [other, broken, needs, given]

    found = await flow.run(x=1)
    assert found.results == {"other": 1, "does_without": [1, -1, -2, 7]}
    states = {name: (one.state, one.value) for name, one in found.steps.items()}
    assert states["broken"] == ("failed", "OSError: no network")
    assert states["needs"] == ("skipped", "broken was failed")
    assert states["needs_needs"] == ("skipped", "needs was skipped")
    assert (await flow.run(x=1, given=8)).results["does_without"] == [1, -1, -2, 8]


async def test_an_error_ends_all_other_steps_and_is_raised_unchanged() -> None:
    flow, ended = Workflow("error"), []

    @flow.step()
    async def hangs(x: int) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("hangs")

    @flow.step(over="items")
    async def fails(item: int) -> None:
        if item == 6:
            await trio.sleep_forever()
        await trio.testing.wait_all_tasks_blocked()
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError) as caught:
        await flow.run(x=1, items=[5, 6])
    assert caught.value.args == (5,)
    assert caught.value.__notes__[0].endswith(": fails[0], attempt 1 of 1")
    assert ended == ["hangs"]


async def test_conditions_choose_branches_and_joins_do_without() -> None:
    flow = Workflow("branch")

    @flow.step()
    async def route(question: str) -> str:
        return "search" if question.endswith("?") else "talk"

    @flow.step(when=lambda route: route == "search")
    async def search(question: str) -> str:
        return f"found {question}"

    @flow.step(when=lambda route: route == "talk")
    async def talk(question: str) -> str:
        return f"said {question}"

    @flow.step()
    async def answer(search: str | None = None, talk: str | None = None) -> str | None:
        return search or talk

    assert (await flow.run(question="a?")).results["answer"] == "found a?"
    found = await flow.run(question="a")
    assert found.results["answer"] == "said a"
    assert found.steps["search"].value == "its condition was false"


async def test_attempts_have_pauses_and_one_key(autojump_clock: Any) -> None:
    flow = Workflow("again")
    seen: list[tuple[float, str, int]] = []

    @flow.step(attempts=3, backoff=ta.Backoff(initial=1.0, base=5.0, jitter=0.0))
    async def works_at_last(x: int) -> int:
        seen.append((trio.current_time() - begin, current_step().key, current_step().attempt))
        if len(seen) < 3:
            raise OSError("busy")
        return x

    begin = trio.current_time()
    found = await flow.run(x=4, key="k")
    assert found.results == {"works_at_last": 4}
    assert seen == [(when, "workflow/again/k/works_at_last", n) for n, when in enumerate((0, 1, 6))]
    assert found.steps["works_at_last"].attempts == 3


async def test_deadlines_reach_the_innermost(autojump_clock: Any) -> None:
    flow, cancelled = Workflow("late"), []

    async def tool() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(trio.current_time() - begin)

    async def model() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tool)
            nursery.start_soon(trio.sleep_forever)

    @flow.step(deadline=2.0, attempts=5, may_fail=True)
    async def hangs(x: int) -> None:
        await current_step().once("model", model)

    @flow.step(over="items", deadline=3.0, may_fail=True)
    async def each(item: int) -> None:
        await trio.sleep(item)

    begin = trio.current_time()
    found = await flow.run(x=1, items=[1, 2, 9])
    assert cancelled == [2.0]
    assert "hangs took longer than 2 s" in found.steps["hangs"].value
    assert "each[2] took longer than 3 s" in found.steps["each"].value
    begin = trio.current_time()
    with trio.move_on_after(0.5):
        await flow.run(x=1, items=[])
    assert cancelled == [2.0, 0.5]


async def test_events_come_as_they_happen_and_a_slow_reader_holds_the_step_up() -> None:
    flow, told = Workflow("events"), []

    @flow.step()
    async def tokens(x: int) -> str:
        for token in "abc":
            await current_step().tell(token)
            told.append(token)
        return "abc"

    send, receive = trio.open_memory_channel[StepEvent](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: flow.run(x=1, events=send))
        events = []
        async for event in receive:
            await trio.testing.wait_all_tasks_blocked()
            events.append((event.step, event.kind, event.value))
            assert len(told) <= len(events)
    assert events == [
        ("tokens", "started", None),
        *(("tokens", "told", token) for token in "abc"),
        ("tokens", "finished", "abc"),
    ]


async def test_a_reader_that_leaves_ends_all_steps() -> None:
    flow, ended = Workflow("leaves"), []

    @flow.step(attempts=9, may_fail=True)
    async def tells(x: int) -> None:
        while True:
            await current_step().tell(x)

    @flow.step()
    async def hangs(x: int) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    send, receive = trio.open_memory_channel[StepEvent](0)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            for _ in range(4):
                await receive.receive()
            left.append(trio.current_time())
            receive.close()

        left: list[float] = []
        nursery.start_soon(read)
        with pytest.raises(trio.BrokenResourceError):
            await flow.run(x=1, events=send)
    assert ended[0] - left[0] < 0.2


async def test_a_run_continues_and_its_end_is_three_rows(make_store: MakeStore) -> None:
    calls: list[str] = []
    is_broken = True

    def make() -> Workflow:
        flow = Workflow("kept")

        @flow.step()
        async def first(x: Any) -> Any:
            calls.append("first")
            return x + 1

        @flow.step(over="first")
        async def each(item: Any) -> Any:
            calls.append(current_step().name)
            return item * 2

        @flow.step(may_fail=True)
        async def fails(x: Any) -> None:
            calls.append("fails")
            raise OSError("once and for all")

        @flow.step()
        async def last(each: list[Any]) -> Any:
            calls.append("last")
            if is_broken:
                raise OSError("later")
            return sum(each)

        return flow

    async with opened(make_store) as store:
        with pytest.raises(OSError, match="later"):
            await make().run(store=store, key="a", x=np.array([1, 2]))
        before, is_broken = make_store.rows(), False
        assert sorted(calls) == ["each[0]", "each[1]", "fails", "first", "last"]
        assert before == [1, 0, 6]
        calls.clear()
        send, receive = trio.open_memory_channel[StepEvent](100)
        found = await make().run(store=store, key="a", events=send, x=np.array([1, 2]))
        assert calls == ["last"]
        assert found.results["last"] == 10
        assert found.steps["first"].is_kept
        assert not found.steps["last"].is_kept
        assert found.steps["fails"].value == "OSError: once and for all"
        kinds = {event.step: event.kind for event in [event async for event in receive]}
        assert kinds == {"first": "kept", "fails": "failed", "each": "kept", "last": "finished"}
        assert make_store.rows() == [1, 1, 1]
        # A finished run is unchanged.
        again = await make().run(store=store, key="a", x=np.array([1, 2]))
        assert (calls, again.results["last"]) == (["last"], 10)
        np.testing.assert_array_equal(again.results["first"], [2, 3])
        assert again.results["each"] == [4, 6]
        with pytest.raises(ValueError, match="the run was begun with other inputs: x was array"):
            await make().run(store=store, key="a", x=np.array([1, 3]))


async def test_once_keeps_calls_of_a_step_also_between_attempts(make_store: MakeStore) -> None:
    calls: list[str] = []
    broken_at = {1: 2, 2: 4}

    def make() -> Workflow:
        flow = Workflow("once")

        async def ask(text: str) -> str:
            calls.append(text)
            return text + "!"

        @flow.step(attempts=2, backoff=ta.Backoff(initial=0.0))
        async def loop(text: str) -> str:
            attempts.append(current_step().attempt)
            for turn in range(5):
                if broken_at.get(len(attempts)) == turn:
                    raise OSError("broken")
                text = await current_step().once(f"turn {turn}", ask, text)
            return text

        return flow

    attempts: list[int] = []
    async with opened(make_store) as store:
        with pytest.raises(OSError, match="broken"):
            await make().run(store=store, key="a", text="t")
        found = await make().run(store=store, key="a", text="t")
    assert found.results["loop"] == "t!!!!!"
    assert calls == ["t", "t!", "t!!", "t!!!", "t!!!!"]
    assert attempts == [0, 1, 0]


async def test_an_older_owner_is_fenced_off(make_store: MakeStore) -> None:
    flows = []
    begun, gate, calls = trio.Event(), trio.Event(), []
    for name in ("old", "new"):
        flow = Workflow("fenced")

        @flow.step(may_fail=True, attempts=3)
        async def first(x: int, name: str = name) -> str:
            calls.append(name)
            if name == "old":
                begun.set()
                await gate.wait()
            return name

        flows.append(flow)
    async with opened(make_store) as one, opened(make_store) as other, trio.open_nursery() as nursery:

        async def run_old() -> None:
            with pytest.raises(FencedError):
                await flows[0].run(store=one, key="a", x=1)

        nursery.start_soon(run_old)
        await begun.wait()
        assert (await flows[1].run(store=other, key="a", x=1)).results == {"first": "new"}
        gate.set()
    async with opened(make_store) as store:
        assert (await flows[0].run(store=store, key="a", x=1)).results == {"first": "new"}
    assert calls == ["old", "new"]


async def test_steps_that_come_and_go_between_two_starts_do_no_harm(make_store: MakeStore) -> None:
    calls: list[str] = []

    def make(*names: str, end: bool) -> Workflow:
        flow = Workflow("changed")

        async def of(value: str) -> str:
            calls.append(current_step().name)
            return value

        async def a(x: str) -> str:
            return await of(x + "a")

        async def b(a: str) -> str:
            return await of(a + "b")

        async def c(x: str) -> str:
            return await of(x + "c")

        async def last(a: str, b: str = "-", c: str = "-") -> str:
            if not end:
                raise OSError("not yet")
            return await of(f"{a} {b} {c}")

        for function in (a, b, c, last):
            if function.__name__ in {*names, "last"}:
                flow.step()(function)
        return flow

    async with opened(make_store) as store:
        with pytest.raises(OSError, match="not yet"):
            await make("a", "b", end=False).run(store=store, key="k", x="x")
        assert calls == ["a", "b"]
        # The step `b` is removed and `c` is new.
        found = await make("c", "a", end=True).run(store=store, key="k", x="x")
    assert calls == ["a", "b", "c", "last"]
    assert found.results == {"a": "xa", "c": "xc", "last": "xa - xc"}


async def test_a_later_input_is_kept(make_store: MakeStore) -> None:
    def make(is_broken: bool) -> Workflow:
        flow = Workflow("approve")
        flow.input("approval")

        @flow.step()
        async def draft(text: str) -> str:
            return text + "!"

        @flow.step()
        async def sent(draft: str, approval: bool) -> str:
            if is_broken:
                raise OSError("mail")
            return f"{draft} {approval}"

        return flow

    flow, started = make(is_broken=True), trio.Event()

    async def fails(store: Store) -> None:
        nursery.start_soon(waits_for_run)
        with pytest.raises(OSError, match="mail"):
            await flow.run(store=store, key="k", text="t")

    async def waits_for_run() -> None:
        started.set()

    async with opened(make_store) as store:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, store)
            await started.wait()
            run = flow.runs["k"]
            assert run.missing == ("approval",)
            with pytest.raises(ValueError, match="'aproval' is not awaited; it waits for approval"):
                await run.give(aproval=True)
            with pytest.raises(TypeError, match="approval cannot be kept"):
                await run.give(approval=lambda: 1)
            await run.give(approval=True)
            with pytest.raises(ValueError, match="'approval' is not awaited; it waits for no input"):
                await run.give(approval=False)
        found = await make(is_broken=False).run(store=store, key="k", text="t")
        assert found.results["sent"] == "t! True"
        with pytest.raises(ValueError, match="approval comes later: give it by Run"):
            await make(is_broken=False).run(store=store, key="k", text="t", approval=True)


async def test_the_tree_shows_runs_and_their_steps() -> None:
    flow = Workflow("shown")

    @flow.step()
    async def first(x: int) -> int:
        return x

    @flow.step()
    async def hangs(first: int) -> None:
        await trio.sleep_forever()

    @flow.step()
    async def last(hangs: None) -> None: ...

    async with ta.open_system("tree") as system, trio.open_nursery() as nursery:
        await system.spawn(WorkflowTree, flow, name="flows")
        nursery.start_soon(lambda: flow.run(key="k", x=1))
        await trio.testing.wait_all_tasks_blocked()
        text = str(system.tree())
        nursery.cancel_scope.cancel()
    assert "shown k" in text
    states = [line.strip("│├└─ ").split(",")[:2] for line in text.splitlines() if "(step)" in line]
    assert states == [
        ["first (step) terminated", " finished"],
        ["hangs (step) running", " running"],
        ["last (step) starting", " waiting"],
    ]


def test_mermaid_draws_the_steps() -> None:
    flow = Workflow("drawn")
    flow.input("approval")

    @flow.step()
    async def pages(question: str) -> list[str]: ...

    @flow.step(over="pages")
    async def end(page: str, approval: bool, style: str = "") -> str: ...

    lines = flow.mermaid().splitlines()
    assert lines[0] == "flowchart TD"
    numbers = {line.split('"')[1]: line.split("(")[0].split("[")[0].strip() for line in lines if '"' in line}
    assert set(numbers) == {"question", "pages", "approval", "style", "end"}
    assert f'    {numbers["approval"]}((("approval")))' in lines
    edges = [line.strip() for line in lines if "--" in line or "==" in line or "-." in line]
    assert sorted(edges) == sorted(
        [
            f"{numbers['question']} --> {numbers['pages']}",
            f"{numbers['pages']} ==> {numbers['end']}",
            f"{numbers['approval']} --> {numbers['end']}",
            f"{numbers['style']} -.-> {numbers['end']}",
        ]
    )
