"""Each step gets what the store has, so that a continued run gives the results of an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from trio_accel.agents import StepEvent, Workflow, current_step
from trio_accel.cluster import SqliteStore, StoreError

pytestmark = pytest.mark.no_device


@attrs.define
class Basket:
    """A mutable value with a mutable value."""

    fruits: list[str]


def grow(value: Any) -> Any:
    """Change a value in place, in each kind of value."""
    if isinstance(value, list):
        value.append("grown")
    elif isinstance(value, dict):
        value["grown"] = len(value)
    elif isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, bytearray):
        value += b"grown"
    elif isinstance(value, set):
        value.add("grown")
    elif isinstance(value, Basket):
        value.fruits.append("grown")
    elif isinstance(value, tuple):
        grow(value[0])
    return value


VALUES: dict[str, Any] = {
    "list": lambda: ["a"],
    "dict": lambda: {"a": [1]},
    "array": lambda: np.arange(3.0),
    "bytearray": lambda: bytearray(b"a"),
    "set": lambda: {"a"},
    "object": lambda: Basket(["a"]),
    "tuple": lambda: (["a"], 1),
}


def made_flow(make: Any, fails_at: str | None, calls: list[str]) -> Workflow:
    """Return a flow of which each step changes all that it gets; at most one step fails."""
    flow = Workflow("values")
    flow.input("late")

    def begin(name: str) -> None:
        calls.append(name)
        if name == fails_at:
            raise ConnectionError(name)

    @flow.step()
    async def first(given: Any) -> Any:
        begin("first")
        return grow(given)

    @flow.step()
    async def second(first: Any, given: Any, late: Any) -> Any:
        begin("second")
        return [grow(first), grow(given), grow(late)]

    @flow.step(attempts=2, when=lambda first: grow(first) is not None)
    async def third(first: Any, second: Any, given: Any) -> Any:
        tried = current_step().attempt
        grow(first)
        known = await current_step().once("made", made)
        grow(known)
        if not tried:
            raise OSError("a first attempt")
        begin("third")
        return [first, grow(second), given, known]

    async def made() -> Any:
        return make()

    @flow.step(over="items", at_once=1)
    async def fourth(item: Any, first: Any, third: Any) -> Any:
        begin(f"fourth {len(calls)}" if fails_at is None else "fourth")
        return [grow(item), grow(first)]

    @flow.step()
    async def fifth(first: Any, second: Any, third: Any, fourth: Any, late: Any, items: Any) -> Any:
        begin("fifth")
        return [first, second, third, fourth, late, items]

    return flow


async def results_of(flow: Workflow, path: Path, make: Any, key: str = "k") -> dict[str, Any]:
    store = SqliteStore(path)
    await store.open()
    shared, found = make(), {}
    send, receive = trio.open_memory_channel[StepEvent](0)

    async def change_events() -> None:
        async for event in receive:
            grow(event.value)

    async def give() -> None:
        run = flow.runs[key]
        await run._begun.wait()
        if run.missing:
            late = make()
            await run.give(late=late)
            grow(late)

    async def run() -> None:
        result = await flow.run(store=store, key=key, events=send, given=make(), items=[shared, shared])
        found.update(result.results)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change_events)
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            if key in flow.runs:
                nursery.start_soon(give)
    except* ConnectionError:
        pass
    finally:
        await store.aclose()
    return found


@pytest.mark.parametrize("kind", VALUES)
async def test_a_continued_run_is_as_an_undisturbed_one(tmp_path: Path, kind: str) -> None:
    make = VALUES[kind]
    undisturbed = await results_of(made_flow(make, None, []), tmp_path / "whole.db", make)
    assert [*undisturbed] == ["first", "second", "third", "fourth", "fifth"]
    # Nobody has changed what an earlier step returned.
    fresh = repr(grow(make()))
    assert repr(undisturbed["first"]) == repr(undisturbed["fifth"][0]) == fresh
    assert repr(undisturbed["fifth"][4:]) == repr([make(), [make(), make()]])
    for fails_at in ("first", "second", "third", "fourth", "fifth"):
        path = tmp_path / f"{fails_at}.db"
        assert await results_of(made_flow(make, fails_at, []), path, make) == {}
        calls = list[str]()
        continued = await results_of(made_flow(make, None, calls), path, make)
        assert len(calls) < 6 or fails_at in {"first", "second"}
        assert repr(continued) == repr(undisturbed)
        # A finished run gives the same once more.
        assert repr(await results_of(made_flow(make, None, []), path, make)) == repr(undisturbed)


async def test_a_value_that_nobody_can_read_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    flow = Workflow("unreadable")

    @flow.step()
    async def makes(x: int) -> Any:
        return Unreadable()

    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    with pytest.raises(TypeError, match="makes cannot be kept in the store: nobody reads this"):
        await flow.run(store=store, key="k", x=1)
    await store.aclose()


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("nobody reads this")


async def test_inputs_with_arrays_are_compared(tmp_path: Path) -> None:
    flow = Workflow("compared")

    @flow.step()
    async def total(x: dict[str, Any]) -> float:
        return float(x["a"].sum())

    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    for _ in range(2):
        found = await flow.run(store=store, key="k", x={"a": np.arange(3.0)})
        assert found.results == {"total": 3.0}
    with pytest.raises(ValueError, match="the run was begun with other inputs"):
        await flow.run(store=store, key="k", x={"a": np.arange(4.0)})
    await store.aclose()


async def test_a_missing_item_is_damage(tmp_path: Path) -> None:
    flow = Workflow("items")

    @flow.step(over="numbers")
    async def twice(number: int) -> int:
        return 2 * number

    @flow.step()
    async def fails(twice: list[int]) -> None:
        raise ValueError("not now")

    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    with pytest.raises(ValueError, match="not now"):
        await flow.run(store=store, key="k", numbers=[1, 2, 3])
    await store._run(store._sql, "update accel_messages set id = 'x' where id = 'twice[1]'")
    with pytest.raises(StoreError):
        await flow.run(store=store, key="k", numbers=[1, 2, 3])
    await store.aclose()


async def test_without_a_store_steps_share_values() -> None:
    flow = Workflow("shared")

    @flow.step()
    async def first(log: list[str]) -> list[str]:
        log.append("first")
        return log

    @flow.step()
    async def second(first: list[str], log: list[str]) -> bool:
        return first is log

    log = list[str]()
    assert (await flow.run(log=log)).results == {"first": ["first"], "second": True}
    assert log == ["first"]
