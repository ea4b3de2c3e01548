"""Workflows refuse mistakes with a sentence that gives a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel.agents import Workflow, current_step
from trio_accel.cluster import SqliteStore, StoreError

pytestmark = pytest.mark.no_device


async def plain(x: int) -> int:
    return x


def test_a_circle_is_refused_with_its_path() -> None:
    flow = Workflow("circle")

    @flow.step()
    async def a(x: int, c: int) -> int: ...

    @flow.step()
    async def b(a: int) -> int: ...

    async def c(b: int) -> int: ...

    with pytest.raises(ValueError, match=r"step c closes a circle: (a -> b -> c -> a|b -> c|c -> a)"):
        flow.step()(c)

    async def itself(itself: int) -> int: ...

    with pytest.raises(ValueError, match="itself closes a circle: itself -> itself"):
        flow.step()(itself)


def test_names_and_functions_that_cannot_be() -> None:
    flow = Workflow("names")
    flow.step()(plain)
    flow.input("later")
    with pytest.raises(ValueError, match="it has a plain already"):
        flow.step()(plain)
    with pytest.raises(ValueError, match="it has a plain already"):
        flow.input("plain")
    with pytest.raises(ValueError, match="a name must be that of a parameter, got 'a b'"):
        flow.input("a b")

    async def later(x: int) -> int: ...

    with pytest.raises(ValueError, match="it has a later already"):
        flow.step()(later)

    def blocking(x: int) -> int: ...

    with pytest.raises(TypeError, match="a step must be an async function"):
        flow.step()(blocking)  # type: ignore[type-var]

    async def any_names(**names: int) -> int: ...

    with pytest.raises(TypeError, match=r"each parameter must be a name that it needs, got \*\*names"):
        flow.step()(any_names)

    async def stored(store: int) -> int: ...

    with pytest.raises(ValueError, match="store is an option of run"):
        flow.step()(stored)

    async def of_nothing() -> int: ...

    with pytest.raises(TypeError, match="its first parameter must take an item"):
        flow.step(over="plain")(of_nothing)
    with pytest.raises(ValueError, match="name must be a text without a slash"):
        Workflow("a/b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "attempts must be"),
        ({"attempts": True}, "attempts must be"),
        ({"over": "pages", "at_once": 0}, "at_once must be"),
        ({"at_once": 3}, "at_once counts items, so it needs over"),
        ({"deadline": 0}, "deadline must be"),
        ({"deadline": float("nan")}, "deadline must be"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Workflow("options").step(**options)


async def test_inputs_that_do_not_fit() -> None:
    flow = Workflow("inputs")
    flow.step()(plain)
    with pytest.raises(TypeError, match="nobody makes 'x', which plain needs"):
        await flow.run()
    with pytest.raises(TypeError, match="no step needs an input 'xx'; did you mean 'x'"):
        await flow.run(xx=1)
    with pytest.raises(ValueError, match="plain is a step, and cannot be given to run"):
        await flow.run(x=1, plain=2)
    with pytest.raises(TypeError, match="a run with a store needs a key"):
        await flow.run(x=1, store=SqliteStore("nowhere"))
    with pytest.raises(StoreError, match=r"SqliteStore is not open; write await store\.open\(\) before"):
        await flow.run(x=1, store=SqliteStore("nowhere"), key="a")
    send, receive = trio.open_memory_channel[Any](1)
    with pytest.raises(TypeError, match="nobody makes"):
        await flow.run(events=send)
    # The reader is not left waiting.
    assert [event async for event in receive] == []


async def test_a_workflow_gets_no_steps_while_it_runs_and_no_second_run_of_a_key() -> None:
    flow = Workflow("runs")

    @flow.step()
    async def hangs(x: int) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: flow.run(x=1, key="k"))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="it is running; declare"):
            flow.step()(plain)
        with pytest.raises(RuntimeError, match="it is running; declare"):
            flow.input("more")
        with pytest.raises(ValueError, match="a run of the key 'k' goes on in this process already"):
            await flow.run(x=1, key="k")
        run = flow.runs["k"]
        nursery.cancel_scope.cancel()
    assert flow.runs == {}
    with pytest.raises(ValueError, match="give: 'more' is not awaited; it waits for no input"):
        await run.give(more=1)
    flow.step()(plain)


async def test_once_needs_other_names_in_one_attempt() -> None:
    flow = Workflow("once")

    @flow.step()
    async def twice(x: int) -> None:
        await current_step().once("a", plain, x)
        await current_step().once("a", plain, x)

    with pytest.raises(ValueError, match=r"twice has called 'a' in this attempt already"):
        await flow.run(x=1)
    with pytest.raises(RuntimeError, match="this task works for no step"):
        current_step()


async def test_values_beyond_a_store_are_refused(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store"))
    await store.open()
    try:
        async with ta.open_system("kept") as system, system.open_device("cpu") as device:
            array = await device.put(np.ones(3))

            async def made() -> Any:
                return [array]

            async def by_once(x: int) -> None:
                await current_step().once("a", made)

            async def by_result(x: int) -> Any:
                return await made()

            for function, name in ((by_result, "by_result"), (by_once, "by_once.a")):
                flow = Workflow("kept")
                flow.step(may_fail=True, attempts=2)(function)
                told = rf"{name} cannot be kept in the store: .*to_host"
                with pytest.raises(TypeError, match=told):
                    await flow.run(store=store, key=name, x=1)
                assert await flow.run(x=1)  # without a store nothing is kept
            with pytest.raises(TypeError, match=r"inputs. cannot be kept in the store: .*to_host"):
                await flow.run(store=store, key="x", x=array)
            flow = Workflow("kept")
            flow.step()(by_result)
            with pytest.raises(ValueError, match="the run was begun with other inputs: x was 1, and is 2"):
                await flow.run(store=store, key="by_result", x=2)
    finally:
        await store.aclose()


async def test_other_inputs_are_reported_by_name(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store"))
    await store.open()
    try:
        flow = Workflow("inputs")

        @flow.step()
        async def needs(x: Any, y: int = 0) -> Any:
            return x

        await flow.run(store=store, key="a", x={"b", "a", "c"})
        assert (await flow.run(store=store, key="a", x={"c", "a", "b"})).results == {"needs": {"a", "b", "c"}}
        with pytest.raises(
            ValueError, match="the run was begun with other inputs: y was 'nothing', and is 1"
        ):
            await flow.run(store=store, key="a", x={"b", "a", "c"}, y=1)
    finally:
        await store.aclose()


async def test_a_step_without_parentheses() -> None:
    flow = Workflow("bare")

    @flow.step
    async def twice(x: int) -> int:
        return 2 * x

    assert (await flow.run(x=3)).results == {"twice": 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 3.0}, "step: there is no option 'timeout'; write deadline="),
        ({"retries": 3}, "step: there is no option 'retries'; write attempts="),
        ({"dead_line": 3}, "step: there is no option 'dead_line'; did you mean 'deadline'"),
        ({"over": 3}, "step: over must be the name of a step or input, got 3"),
        ({"when": True}, "step: when must be a function of other names, got True"),
        ({"backoff": 1.0}, "step: backoff must be a Backoff, got 1.0"),
        ({"may_fail": "no"}, "step: may_fail must be True or False, got 'no'"),
    ],
)
def test_options_that_do_not_exist_or_have_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Workflow("options").step(**options)


async def test_arguments_of_other_types() -> None:
    flow: Any = Workflow("arguments")
    flow.step()(plain)
    with pytest.raises(TypeError, match="a step must be an async function, got 'plain'"):
        flow.step("plain")
    with pytest.raises(
        TypeError, match=r"store must be a Store, got 'runs.db'; write SqliteStore\('runs.db'\)"
    ):
        await flow.run(store="runs.db", key="k", x=1)
    for key in ("", 3):
        with pytest.raises(TypeError, match="key must be a str that is not empty, got"):
            await flow.run(key=key, x=1)
    with pytest.raises(TypeError, match=r"events must be a trio.MemorySendChannel, got 5"):
        await flow.run(events=5, x=1)
    with pytest.raises(
        KeyError, match="no run of the key 'k' goes on in this process; current runs: there are"
    ):
        flow.runs["k"]
    for path in (None, 3):
        with pytest.raises(TypeError, match="must be a str or a path, got"):
            SqliteStore(path)  # type: ignore[arg-type]
