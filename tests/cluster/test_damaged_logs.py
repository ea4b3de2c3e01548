"""Whatever is damaged of a store, its acknowledged messages come back, or `StoreError`."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio
from stores import entry, opened

from trio_accel.cluster import Entry, Journal, SqliteStore, StoreError

pytestmark = pytest.mark.no_device

SUFFIXES = ("", "-wal", "-mark")
MESSAGES = 12


async def fill(path: Path, *, checkpointed: int) -> dict[str, bytes]:
    """Acknowledge messages; return the files as a kill leaves them."""
    async with opened(SqliteStore(path)) as store:
        await store.take("a", await store.next_epoch("a program"))
        for number in range(1, MESSAGES + 1):
            await store.write("a", 1, entry(number), b"saved" if number == 5 else None)
            if number == checkpointed:
                with closing(sqlite3.connect(path)) as database:
                    database.execute("pragma wal_checkpoint(passive)")
        return contents(path)


def contents(path: Path) -> dict[str, bytes]:
    files = {suffix: Path(f"{path}{suffix}") for suffix in SUFFIXES}
    return {suffix: file.read_bytes() for suffix, file in files.items() if file.exists()}


def restore(path: Path, files: dict[str, bytes]) -> None:
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)


async def read(path: Path, files: dict[str, bytes]) -> Journal:
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
    restore(path, files)
    async with opened(SqliteStore(path)) as store:
        journal: Journal = await store.take("a", 1)
        return journal


def changed(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]


def cut(data: bytes, offset: int) -> bytes:
    return data[:offset]


@pytest.mark.parametrize("step", [97 * 61, pytest.param(97, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointed", [0, 7])
@pytest.mark.parametrize("damage", [changed, cut])
@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_damage_at_an_offset(
    tmp_path: Path, suffix: str, damage: Callable[[bytes, int], bytes], checkpointed: int, step: int
) -> None:
    path, errors = tmp_path / "runs.db", list[StoreError]()
    files = await fill(path, checkpointed=checkpointed)
    right = await read(path, files)
    assert right.number == MESSAGES
    data = files[suffix]
    for offset in (*range(0, len(data), step), len(data) - 1):
        damaged = damage(data, offset)
        try:
            assert await read(path, {**files, suffix: damaged}) == right, offset
        except StoreError as error:
            errors.append(error)
    # Pages of the file that the log replaces are not read.
    assert errors or (suffix == "" and (not checkpointed or len(data) < step))


@pytest.mark.parametrize("size", [0, 1, 4095])
async def test_a_file_cut_below_a_page_is_no_new_database(tmp_path: Path, size: int) -> None:
    path = tmp_path / "runs.db"
    files = await fill(path, checkpointed=0)
    with pytest.raises(StoreError):
        await read(path, {"": files[""][:size], "-mark": files["-mark"]})


async def test_a_missing_log(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    files = await fill(path, checkpointed=7)
    with pytest.raises(StoreError, match=r"it has 10 of the 15 changes .* restore a backup") as caught:
        await read(path, {"": files[""], "-mark": files["-mark"]})
    assert caught.value.is_damaged


async def test_an_earlier_file_with_a_later_log(tmp_path: Path) -> None:
    """SQLite applies a log to any file, so the messages between both would be missing."""
    path = tmp_path / "runs.db"
    await fill(path, checkpointed=0)
    async with opened(SqliteStore(path)) as store:
        await store.take("b", 1)
    earlier = contents(path)
    async with opened(SqliteStore(path)) as store:
        for number in range(1, 4):
            await store.write("b", 1, entry(number))
    async with opened(SqliteStore(path)) as store:
        await store.write("a", 1, entry(MESSAGES + 1))
        later = contents(path)
    assert (await read(path, later)).number == MESSAGES + 1
    with pytest.raises(
        StoreError, match=r"without its log, it has 16 of the 20 changes that are in"
    ) as caught:
        await read(path, {**later, "": earlier[""]})
    assert caught.value.is_damaged
    # A mark of an earlier version has no such count.
    assert (await read(path, {**later, "-mark": later["-mark"][:48]})).number == MESSAGES + 1


async def test_the_log_is_written_to_the_file_from_time_to_time(tmp_path: Path) -> None:
    path, data = tmp_path / "runs.db", bytes(1 << 20)
    async with opened(SqliteStore(path)) as store, opened(SqliteStore(path)) as other:
        await other.take("b", 1)
        await store.take("a", 1)
        for number in range(1, 21):
            await store.write("a", 1, Entry(number, str(number), data, b""))
            await other.write("b", 1, entry(number))
        files = contents(path)
        assert len(files["-wal"]) < 8 << 20
        assert len(files[""]) > 12 << 20
        assert (await other.take("b", 1)).number == 20
    assert contents(path).keys() == {"", "-mark"}


async def test_the_mark_of_another_store(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    files = await fill(path, checkpointed=0)
    other = await fill(tmp_path / "other.db", checkpointed=0)
    with pytest.raises(StoreError, match="it has 0 of the 15 changes"):
        await read(path, {**files, "-mark": other["-mark"]})


async def test_a_mark_may_be_damaged_old_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    files = await fill(path, checkpointed=0)
    right, mark = await read(path, files), files["-mark"]
    for offset in range(len(mark)):
        with pytest.raises(StoreError, match=r"runs\.db-mark is damaged") as caught:
            await read(path, {**files, "-mark": changed(mark, offset)})
        assert caught.value.is_damaged
    # As after a power cut.
    for other in (b"", bytes(len(mark))):
        assert await read(path, {**files, "-mark": other}) == right
    assert await read(path, {suffix: files[suffix] for suffix in ("", "-wal")}) == right


async def test_two_stores_of_a_file_advance_one_mark(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(SqliteStore(path)) as one, opened(SqliteStore(path)) as other:
        epoch = await one.next_epoch()
        await one.take("a", epoch)
        await other.take("b", epoch)

        async def write(store: SqliteStore, name: str) -> None:
            for number in range(1, 6):
                await store.write(name, epoch, entry(number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, one, "a")
            nursery.start_soon(write, other, "b")
        saved = contents(path)
    frame = 4096 + 24
    assert (await read(path, saved)).number == 5
    # The last frame belongs to the last commit, whichever store it came from.
    with pytest.raises(StoreError, match=r"it has 13 of the 14 changes"):
        await read(path, {**saved, "-wal": saved["-wal"][:-frame]})


async def test_a_damaged_log_is_noticed_at_a_new_connection(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    files = await fill(path, checkpointed=0)
    await read(path, files)
    async with opened(SqliteStore(path)) as store:
        store._disconnect()
        restore(path, {**files, "-wal": files["-wal"][:4096]})
        with pytest.raises(StoreError, match="changes that were acknowledged"):
            await store.take("a", 1)
