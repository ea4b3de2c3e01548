"""A damaged store gives right answers or `StoreError`, and a store of an older version still opens."""

from __future__ import annotations

import hashlib
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
from cluster_entities import Account, Add, Counted, Peek
from stores import MakeStore, entry, opened

import trio_accel as ta
from trio_accel import cluster
from trio_accel.agents import Workflow
from trio_accel.cluster import Entry, Journal, SqliteStore, StoreError

# The tables as the first version made them.
OLD_TABLES = """
create table accel_epoch (id integer primary key, epoch bigint not null, program text not null);
create table accel_owners (entity text primary key, epoch bigint not null);
create table accel_saves (entity text primary key, number bigint not null, saved blob not null);
create table accel_messages (entity text, number bigint, at double precision not null, id text not null,
    message blob not null, reply blob not null, primary key (entity, number), unique (entity, id));
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def fill(store: Any) -> None:
    async with opened(store):
        epoch = await store.next_epoch("a program")
        for name in "ab":
            await store.take(name, epoch)
            for number in range(1, 6):
                await store.write(name, epoch, entry(number), b"saved" if number == 3 else None)


async def read(store: Any) -> list[Journal]:
    async with opened(store):
        epoch = await store.next_epoch("another program")
        return [await store.take(name, epoch) for name in "ab"]


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("pragma writable_schema = on")
        database.execute(statement, values)


@pytest.mark.no_device
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_each_byte_may_be_wrong(path: Path, flip: int) -> None:
    trio.run(fill, SqliteStore(path))
    whole = path.read_bytes()
    right = trio.run(read, SqliteStore(path))
    places = [place for place in range(flip % 5, len(whole), 7) if whole[place] or place % 49 == 0]
    found = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= flip
        for file in path.parent.glob("store.db-*"):
            file.unlink()
        path.write_bytes(damaged)
        try:
            assert trio.run(read, SqliteStore(path)) == right, place
        except StoreError:
            found += 1
    assert found > 10


@pytest.mark.no_device
@pytest.mark.parametrize("size", [1, 17, 100, 1024, 4096, 8192, -4096, -100])
def test_a_truncated_file(path: Path, size: int) -> None:
    trio.run(fill, SqliteStore(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(StoreError) as caught:
        trio.run(read, SqliteStore(path))
    assert caught.value.is_damaged or size < 100


@pytest.mark.no_device
@pytest.mark.parametrize("contents", [b"\0" * 4096, b"not a database" * 1000, b"PK\3\4" * 100])
def test_another_file(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    with pytest.raises(StoreError):
        trio.run(read, SqliteStore(path))


@pytest.mark.no_device
async def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        await read(SqliteStore(tmp_path))


@pytest.mark.no_device
@pytest.mark.parametrize("table", ["accel_epoch", "accel_owners", "accel_saves", "accel_messages"])
async def test_a_missing_table(make_store: MakeStore, table: str) -> None:
    await fill(make_store())
    store = make_store()
    async with opened(store):
        await store._run(store._sql, f"drop table {table}")
    with pytest.raises(StoreError, match=f"lacks the table {table}; restore a backup") as caught:
        await read(store)
    assert caught.value.is_damaged


@pytest.mark.no_device
@pytest.mark.parametrize(
    "statement",
    [
        "update accel_messages set number = 'x' where number = 5",
        "update accel_messages set number = 9 where number = 5",
        "update accel_messages set id = x'00' where number = 5",
        "update accel_messages set id = 'another' where number = 5",
        "update accel_messages set message = 7 where number = 5",
        "update accel_messages set message = 'text' where number = 5",
        "update accel_messages set reply = 1.5 where number = 2",
        "update accel_messages set reply = (select message from accel_messages where number = 5)",
        "update accel_messages set reply = substr(reply, 1, 20) where number = 4",
        "update accel_messages set entity = 'c' where entity = 'a' and number = 4",
        "update accel_messages set at = at - 100000 where number = 2",
        "update accel_messages set at = at + 1 where number = 2",
        "update accel_messages set at = 'now' where number = 5",
        "delete from accel_messages where number = 4",
        "delete from accel_messages where number = 5",
        "delete from accel_messages where number = 1",
        "delete from accel_messages",
        "delete from accel_saves",
        "delete from accel_owners",
        "delete from accel_epoch",
        "update accel_epoch set epoch = epoch - 1",
        "update accel_epoch set program = 'another'",
        "update accel_records set record = x'00'",
        "update accel_records set record = 7",
        "update accel_saves set number = 'x'",
        "update accel_saves set number = 2",
        "update accel_saves set saved = 'text'",
        "update accel_saves set saved = x'a761'",
        "update accel_owners set epoch = 'x'",
        "update accel_owners set epoch = 1000000",
        "update accel_epoch set epoch = 'x'",
        "update accel_epoch set epoch = 1.5",
        "alter table accel_messages rename column reply to replay",
    ],
)
def test_rows_that_cannot_be(path: Path, statement: str) -> None:
    trio.run(fill, SqliteStore(path))
    execute(path, statement)
    with pytest.raises(StoreError):
        trio.run(read, SqliteStore(path))


@pytest.mark.no_device
async def test_a_damaged_time_forgets_no_reply(make_store: MakeStore) -> None:
    """Each save forgets the replies that are too old, so it checks their times first."""
    async with opened(make_store(ids=10)) as store:
        await store.take("a", 1)
        for number in range(1, 4):
            await store.write("a", 1, entry(number), b"")
        await store._run(store._sql, "update accel_messages set at = at / 2 where number = 2")
        for call in (
            partial(store.write, "a", 1, entry(4), b""),
            partial(store.take, "a", 1),
        ):
            with pytest.raises(StoreError, match=r"a, 2, .* it differs from its checksum") as caught:
                await call()
            assert caught.value.is_damaged


@pytest.mark.no_device
async def test_a_value_of_another_type_locks_no_file_and_is_not_quoted(path: Path) -> None:
    await fill(SqliteStore(path))
    execute(path, "update accel_messages set reply = cast(reply as text) where number = 5 and entity = 'a'")
    async with opened(SqliteStore(path)) as store:
        with pytest.raises(StoreError, match="it must be bytes, and is str") as caught:
            await store.take("a", 2)
        assert caught.value.is_damaged
        assert "reply 5" not in repr(caught.value)
        # The error may be kept for long.
        async with opened(SqliteStore(path, timeout=1.0)) as other:
            assert (await other.take("b", 2)).number == 5


async def entity_total(path: Path, key: str = "a") -> dict[str, float]:
    async def ask(entities: Any) -> Any:
        ref = entities.entity(Counted, key)
        await ref.ask(Add(1.0))
        return await ref.ask(Peek())

    async with (
        ta.open_system("test") as system,
        system.open_devices(["cpu"], options=ta.DeviceOptions(isolation="inline")) as devices,
        cluster.open_entities(system, devices, SqliteStore(path)) as entities,
    ):
        found = await outcome.acapture(ask, entities)
    return found.unwrap()  # type: ignore[no-any-return]  # outside of the groups


def old_store(path: Path, damage: Callable[[bytes], bytes] = bytes) -> None:
    """Make a store of the first version, with a save and two messages after it."""
    name = f"{Counted.__module__}:Counted/str/'a'"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(OLD_TABLES)
        database.execute("insert into accel_epoch values (1, 5, 'old')")
        database.execute("insert into accel_owners values (?, 5)", [name])
        saved = damage(pickle.dumps({"totals": {"total": 3.0}}, 5))
        database.execute("insert into accel_saves values (?, 3, ?)", [name, saved])
        for number in (4, 5):
            values = pickle.dumps((Add(1.0), False), 5), pickle.dumps({"total": float(number)}, 5)
            row = [name, number, 1e9, str(number), *map(damage, values)]
            database.execute("insert into accel_messages values (?, ?, ?, ?, ?, ?)", row)
        database.commit()


def sealed(data: bytes, *row: object) -> bytes:
    """Return a value as the second version stored it."""
    digest = hashlib.blake2b(repr(row).encode() + data, digest_size=16).digest()
    return b"\xa7accel1\n" + digest + data


def seal_as_before_times(path: Path) -> None:
    """Make the store one of the second version: it has checksums without times, and counts its changes."""
    with closing(sqlite3.connect(path)) as database:
        count = (
            "create table accel_changes (id integer primary key, store blob not null, number bigint not null)"
        )
        database.execute(count)
        database.execute("insert into accel_changes values (1, ?, 9)", (b"a store's own id",))
        for name, number, data in database.execute("select * from accel_saves").fetchall():
            values = sealed(data, name, number, "saved"), name
            database.execute("update accel_saves set saved = ? where entity = ?", values)
        for name, number, _, id_, *data in database.execute("select * from accel_messages").fetchall():
            values = (
                sealed(data[0], name, number, "message"),
                sealed(data[1], name, number, id_, "reply"),
                number,
            )
            database.execute("update accel_messages set message = ?, reply = ? where number = ?", values)
        database.commit()


@pytest.mark.parametrize("prepare", [Path, seal_as_before_times])
def test_a_store_of_an_older_version_still_opens(path: Path, prepare: Callable[[Path], object]) -> None:
    old_store(path)
    prepare(path)
    assert trio.run(entity_total, path) == {"total": 6.0}
    assert trio.run(entity_total, path) == {"total": 7.0}
    execute(path, "delete from accel_messages where number = (select max(number) from accel_messages)")
    with pytest.raises(StoreError, match=r"it must have .* messages up to 7, and a save"):
        trio.run(entity_total, path)


async def test_an_older_version_may_have_written_meanwhile(path: Path) -> None:
    """It writes no records, and its epochs are larger than those of the records."""
    await fill(SqliteStore(path))
    name, reply = "a", sealed(b"reply", "a", 6, "id 6", "reply")
    execute(path, "update accel_epoch set epoch = epoch + 1, program = 'older'")
    execute(path, "update accel_owners set epoch = (select epoch from accel_epoch) where entity = ?", name)
    execute(path, "insert into accel_messages values (?, 6, 1e9, 'id 6', ?, ?)", name, b"message", reply)
    first, second = await read(SqliteStore(path))
    assert (first.number, second.number, first.replies["id 6"]) == (6, 5, b"reply")
    execute(path, "delete from accel_messages where number = 6")
    with pytest.raises(StoreError, match="it must have 6 messages up to 6"):
        await read(SqliteStore(path))


async def test_an_error_names_the_missing_rows(path: Path) -> None:
    await fill(SqliteStore(path))
    execute(path, "delete from accel_messages where entity = 'a' and number = 5")
    fault = "it must have 5 messages up to 5, and a save of 3, and has 4 messages up to 4, and a save of 3"
    with pytest.raises(StoreError, match=f"store.db is damaged at a: {fault}; restore a backup") as caught:
        await read(SqliteStore(path))
    assert caught.value.is_damaged


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"x" + data,
        lambda data: data[:2] + b"\xff" * 8 + data[10:],
        lambda data: b"\xa7" + data,
        lambda data: pickle.dumps(7),
        lambda data: pickle.dumps((1, 2, 3)),
    ],
)
async def test_values_of_an_older_version_that_cannot_be_read(
    path: Path, damage: Callable[[bytes], bytes]
) -> None:
    old_store(path, damage)
    with trio.fail_after(10), pytest.raises(StoreError, match="cannot be read"):
        await entity_total(path)


async def test_entities_report_damage_at_once(path: Path) -> None:
    assert await entity_total(path) == {"total": 1.0}
    execute(path, "update accel_saves set saved = substr(saved, 1, length(saved) - 1)")
    with trio.fail_after(10), pytest.raises(StoreError, match="differs from its checksum"):
        await entity_total(path)
    # Others are none the worse.
    assert await entity_total(path, "b") == {"total": 1.0}


async def test_a_cluster_ends_with_a_damaged_store(path: Path) -> None:
    options = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="inline"))
    await fill(SqliteStore(path))
    execute(path, "update accel_epoch set epoch = 'x'")
    with trio.fail_after(60), pytest.raises(Exception) as caught:  # noqa: PT011  # a group, looked into below
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(
                system, cluster.LocalNodes(1), store=SqliteStore(path), options=options
            ) as made,
        ):
            await made.entity(Account, "a").ask(Add(1.0))
    assert "StoreError" in "".join(map(str, flat(caught.value)))


def flat(error: BaseException) -> list[str]:
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else []
    causes = [error.__cause__] if error.__cause__ else []
    return [repr(error), *[text for member in (*members, *causes) for text in flat(member)]]


@pytest.mark.no_device
async def test_a_damaged_workflow(path: Path) -> None:
    flow = Workflow("numbers")

    @flow.step()
    async def first(x: int) -> list[int]:
        return [x]

    @flow.step()
    async def second(first: list[int]) -> int:
        if x_fails:
            raise ValueError("not now")
        return len(first)

    async def run(key: str) -> Any:
        async with opened(SqliteStore(path)) as store:
            return (await flow.run(store=store, key=key, x=1)).results

    x_fails = True
    with pytest.raises(ValueError, match="not now"):
        await run("begun")
    x_fails = False
    assert await run("ended") == {"first": [1], "second": 1}
    for damage in (
        "update accel_messages set reply = substr(reply, 1, length(reply) - 1)",
        "update accel_messages set reply = x'80054b'",
        "update accel_messages set reply = x'80054b01'",
        "update accel_messages set reply = x'80054b012e'",
        "update accel_messages set reply = x'8005285d5d5d742e'",
    ):
        execute(path, damage)
        with pytest.raises(StoreError):
            await run("begun")
    for damage in ("update accel_saves set saved = x'80'", "update accel_saves set saved = x'80054b012e'"):
        execute(path, "delete from accel_messages")
        execute(path, damage)
        with pytest.raises(StoreError):
            await run("ended")


def test_a_store_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(StoreError("away", is_begun=False, is_damaged=True)))
    assert (str(error), error.is_begun, error.is_damaged) == ("away", False, True)


@pytest.mark.no_device
async def test_stored_bytes_may_be_any(make_store: MakeStore) -> None:
    store = make_store()
    values = [b"", b"\xa7", b"\xa7accel1\n", b"\xa7accel1\n" + b"x" * 99]
    async with opened(store):
        await store.take("a", 1)
        for number, value in enumerate(values, 1):
            await store.write("a", 1, Entry(number, str(number), value, value), value)
            assert (await store.take("a", 1)).saved == (number, value)
        assert list((await store.take("a", 1)).replies.values()) == values
