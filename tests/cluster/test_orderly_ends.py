"""Every orderly end of a durable entity saves its state, and messages that only read are never stored."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from cluster_entities import Account, Add, Counted, Echo, Fail, Later, Peek, Tamper, until

import trio_accel as ta
from trio_accel import cluster

INLINE = ta.DeviceOptions(isolation="inline")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "entities")


@asynccontextmanager
async def alone(path: str) -> AsyncGenerator[Any, None]:
    """Have entities in this process."""
    async with (
        ta.open_system("test") as system,
        system.open_devices(["cpu"], options=INLINE) as devices,
        cluster.open_entities(system, devices, cluster.SqliteStore(path)) as entities,
    ):
        yield entities


@asynccontextmanager
async def opened(path: str, names: int = 1, **options: Any) -> AsyncGenerator[Any, None]:
    chosen = cluster.ClusterOptions(devices=("cpu",), device=INLINE, **options)
    nodes, store = cluster.LocalNodes(names), cluster.SqliteStore(path)
    async with (
        ta.open_system("test") as system,
        cluster.open_cluster(system, nodes, store=store, options=chosen) as made,
    ):
        yield made


def rows(path: str, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(statement).fetchall()


def unsaved(path: str) -> int:
    """Return the number of messages that would run again."""
    found = rows(
        path,
        "select count(*) from accel_messages m where number > "
        "coalesce((select number from accel_saves s where s.entity = m.entity), 0)",
    )
    return int(found[0][0])


async def test_the_end_of_a_program_saves(path: str) -> None:
    for turn in range(3):
        async with alone(path) as entities:
            for number in range(1, 4):
                total = await entities.entity(Account, "a").ask(Add(1.0), id=f"{turn} {number}")
                assert total == 3.0 * turn + number
            assert await entities.entity(Account, "a").ask(Add(5.0), id="0 2") == 2.0
        assert unsaved(path) == 0


async def test_a_cancelled_program_saves(path: str) -> None:
    with trio.CancelScope() as scope:
        async with opened(path) as made:
            await made.entity(Account, "a").ask(Add(1.0))
            scope.cancel()
            await trio.sleep_forever()
    assert rows(path, "select number from accel_saves") == [(1,)]


async def test_a_failed_incarnation_is_saved_by_its_successor(path: str) -> None:
    async with alone(path) as entities:
        ref = entities.entity(Account, "a")
        assert await ref.ask(Add(1.0)) == 1.0
        with pytest.raises(ZeroDivisionError):
            await ref.ask(Fail(ZeroDivisionError("half")))
    assert rows(path, "select number from accel_saves") == [(1,)]
    async with alone(path) as entities:
        assert await entities.entity(Account, "a").ask(Add(1.0)) == 2.0


async def test_a_drain_an_idle_end_and_a_close_save(path: str) -> None:
    keys = [f"key {number}" for number in range(6)]
    async with opened(path, 2) as made:
        for key in keys:
            await made.entity(Account, key).ask(Add(1.0))
        assert unsaved(path) == 6
        leaves = sum("on node-1" in repr(made.entity(Account, key)) for key in keys)
        assert leaves
        await made.drain("node-1")
        assert unsaved(path) == 6 - leaves
        for key in keys:
            assert await made.entity(Account, key).ask(Add(1.0)) == 2.0
    assert unsaved(path) == 0
    async with opened(path, idle_after=0.2) as made:
        for key in keys:
            assert await made.entity(Account, key).ask(Add(1.0)) == 3.0
        with trio.fail_after(30):
            await until(lambda: unsaved(path) == 0)
        assert await made.entity(Account, "key 0").ask(Add(1.0)) == 4.0
    assert unsaved(path) == 0


async def test_an_entity_that_another_one_asks_during_the_close_is_saved(path: str) -> None:
    totals = list[float]()
    async with trio.open_nursery() as nursery, opened(path, 2) as made:
        for key in "abcd":
            await made.entity(Account, key).ask(Add(1.0))

        async def ask(key: str) -> None:
            totals.append(await made.entity(Counted, key).ask(Later(key, 0.5)))

        for key in "abcd":
            nursery.start_soon(ask, key)
        await trio.testing.wait_all_tasks_blocked()
        for key in "abcd":
            assert await made.entity(Counted, f"behind {key}").ask(Add(1.0)) == {"total": 1.0}
    assert totals == [2.0] * 4
    assert unsaved(path) == 0


async def test_a_release_may_change_replies_after_an_orderly_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with alone(path) as entities:
        ref = entities.entity(Counted, "a")
        assert await ref.ask(Add(1.0)) == {"total": 1.0}
        assert await ref.ask(Peek()) == {"total": 1.0}
    monkeypatch.setattr(Counted, "more", {"pages": 0})
    async with alone(path) as entities:
        ref = entities.entity(Counted, "a")
        assert await ref.ask(Add(1.0)) == {"total": 2.0, "pages": 0}
        assert await ref.ask(Peek()) == {"total": 2.0, "pages": 0}
    monkeypatch.setattr(Counted, "more", {})
    async with alone(path) as entities:
        assert await entities.entity(Counted, "a").ask(Peek()) == {"total": 2.0}


async def test_reads_are_neither_stored_nor_compared(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone(path) as entities:
        ref = entities.entity(Counted, "a")
        for number in range(1, 4):
            assert await ref.ask(Add(1.0)) == {"total": float(number)}
            assert await ref.ask(Peek(), id="the same") == {"total": float(number)}
            await ref.tell(Tamper("nothing"))
        assert rows(path, "select number from accel_messages order by number") == [(1,), (2,), (3,)]
        # A copy is as the store of a killed program.
        copy = path + ".copy"
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    monkeypatch.setattr(Counted, "peeked", {"pages": 0})
    async with alone(copy) as entities:
        assert await entities.entity(Counted, "a").ask(Add(1.0)) == {"total": 4.0}


async def test_a_read_that_an_earlier_release_has_stored_is_not_run(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = path + ".copy"
    stored = Counted.__handlers__ | {Peek: attrs.evolve(Counted.__handlers__[Peek], reads=False)}
    with monkeypatch.context() as patched:
        patched.setattr(Counted, "__handlers__", stored)
        async with alone(path) as entities:
            ref = entities.entity(Counted, "a")
            assert await ref.ask(Add(1.0)) == {"total": 1.0}
            assert await ref.ask(Peek(), id="a read") == {"total": 1.0}
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
    monkeypatch.setattr(Counted, "peeked", {"pages": 0})
    async with alone(copy) as entities:
        ref = entities.entity(Counted, "a")
        assert await ref.ask(Peek()) == {"total": 1.0, "pages": 0}
        assert await ref.ask(Peek(), id="a read") == {"total": 1.0}
        assert await ref.ask(Add(1.0)) == {"total": 2.0}


@pytest.mark.parametrize("how", ["attribute", "new attribute", "item", "list", "then refuses"])
async def test_a_read_that_changes_the_state_fails_and_is_undone(path: str, how: str) -> None:
    async with alone(path) as entities:
        ref = entities.entity(Counted, "a")
        assert await ref.ask(Add(1.0)) == {"total": 1.0}
        with pytest.raises(RuntimeError, match=r"the handler of Tamper has reads=True, and has changed self"):
            await ref.tell(Tamper(how))
        assert await ref.ask(Peek()) == {"total": 1.0}
        assert await ref.ask(Add(1.0)) == {"total": 2.0}


async def test_a_fenced_owner_answers_no_reads(path: str) -> None:
    async with alone(path) as older, alone(path) as newer:
        assert await older.entity(Counted, "a").ask(Add(1.0)) == {"total": 1.0}
        assert await newer.entity(Counted, "a").ask(Add(1.0)) == {"total": 2.0}
        with pytest.raises(cluster.FencedError):
            await older.entity(Counted, "a").ask(Peek())
        assert await newer.entity(Counted, "a").ask(Peek()) == {"total": 2.0}
    # The end of the older one has written nothing.
    assert rows(path, "select number from accel_saves") == [(2,)]


async def test_a_save_that_fails_at_the_end_is_one_warning(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with alone(path) as entities:
        ref = entities.entity(Counted, "unsaveable")
        assert await ref.ask(Add(1.0)) == {"total": 1.0}
        assert await entities.entity(Counted, "unsaveable too").ask(Add(1.0)) == {"total": 1.0}
    [line] = [record.getMessage() for record in caplog.records if record.name == "trio_accel.cluster"]
    assert "2 entities end without a save, so their last messages run again" in line
    assert "cannot be saved" in line
    async with alone(path) as entities:
        assert await entities.entity(Counted, "unsaveable").ask(Add(1.0)) == {"total": 2.0}


def test_reads_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match=r"handles\(Peek\): reads must be True or False, got 'yes'"):
        ta.handles(Peek, reads="yes")  # type: ignore[call-overload]


async def test_a_long_message_is_finished_before_the_close(path: str) -> None:
    async with trio.open_nursery() as nursery, opened(path) as made:
        ref = made.entity(Account, "a")

        async def ask() -> None:
            assert await ref.ask(Echo(7, 0.3)) == 7

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert await made.entity(Account, "behind").ask(Add(1.0)) == 1.0
    assert rows(path, "select entity, number from accel_saves order by entity") == [
        ("cluster_entities:Account/str/'a'", 1),
        ("cluster_entities:Account/str/'behind'", 1),
    ]
