"""Stores of durable entities: acknowledged writes are there, and a replaced owner writes no more."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
from stores import MakeStore, entry, numbers, opened, repeated

from trio_accel.cluster import Entry, FencedError, Journal, PostgresStore, SqliteStore, StoreError

# A process of its own with a store: it opens it, and follows its test.
_PROGRAM = """
import pickle, sys, trio
from trio_accel.cluster import Entry

async def epochs(store):
    print(*[await store.next_epoch() for _ in range(40)])

async def messages(store):
    await store.take("counter", 1)
    for number in range(1, 1_000_000):
        saved = b"%d" % number if number % 7 == 0 else None
        entry = Entry(number, f"id {number}", b"m%d" % number, b"r%d" % number)
        await store.write("counter", 1, entry, saved)
        print(number, flush=True)

async def main():
    store = pickle.loads(bytes.fromhex(sys.argv[2]))
    await store.open()
    try:
        await globals()[sys.argv[1]](store)
    finally:
        await store.aclose()

trio.run(main)
"""


def _start(store: Any, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, what, pickle.dumps(store).hex()], stdout=subprocess.PIPE, text=True
    )


async def count(store: Any, what: str) -> int:
    return await store._run(store._number, f"select count(*) from accel_messages where {what}")


def age(store: Any, seconds: float) -> None:
    """Make all messages older: the clock of the database has advanced, or jumped."""
    words = type(store).words
    type(store).words = {**words, "NOW": f"({words['NOW']} + {seconds})"}


class TestEpochs:
    async def test_stores_that_ask_at_the_same_time_get_different_ones(self, make_store: MakeStore) -> None:
        found: list[int] = []

        async def ask(store: Any) -> None:
            # The first ones make the tables, all at the same time.
            async with opened(store):
                own = [await store.next_epoch() for _ in range(20)]
            assert own == sorted(own)
            found.extend(own)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask, make_store())
        assert sorted(found) == list(range(1, 121))

    async def test_a_replaced_program_gets_none(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            assert await store.next_epoch("old") == 1
            assert await store.next_epoch("old", takes_over=False) == 2
            assert await store.next_epoch("new") == 3
            with pytest.raises(FencedError, match="another program"):
                await store.next_epoch("old", takes_over=False)
            assert await store.next_epoch("new", takes_over=False) == 4

    def test_processes_get_different_ones(self, make_store: MakeStore) -> None:
        processes = [_start(make_store(), "epochs") for _ in range(3)]
        found = [int(word) for process in processes for word in process.communicate()[0].split()]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert sorted(found) == list(range(1, 121))


class TestJournals:
    async def test_of_a_new_entity_is_empty(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            assert await store.take("new", 1) == Journal(0, None, (), {})

    async def test_has_all_written_entries(self, make_store: MakeStore) -> None:
        written = (entry(1), entry(2), entry(3))
        async with opened(make_store()) as store:
            await store.take("a", 1)
            await store.take("b", 1)
            for one in written:
                await store.write("a", 1, one)
            await store.write("b", 1, entry(1))
        async with opened(make_store()) as store:
            journal = await store.take("a", 2)
            assert journal == Journal(3, None, written, {one.id: one.reply for one in written})
            assert numbers(await store.take("b", 2)) == [1]

    async def test_begins_after_the_last_save(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            await store.take("a", 1)
            for number in range(1, 8):
                await store.write("a", 1, entry(number), b"save %d" % number if number % 3 == 0 else None)
            journal = await store.take("a", 1)
            assert (journal.number, journal.saved, journal.entries) == (7, (6, b"save 6"), (entry(7),))
            assert journal.replies == {entry(number).id: entry(number).reply for number in range(1, 8)}
            # Messages that never run again are not kept.
            assert await count(store, "length(message) > 0") == 1
            await store.write("a", 1, entry(8), b"")
            assert (await store.take("a", 1)).saved == (8, b"")

    async def test_is_found_by_any_name(self, make_store: MakeStore) -> None:
        names = [
            "",
            "?",
            "%s",
            "'; drop table accel_owners",
            "NOW BEGIN BYTES",
            "é ☃ 😀",
            "a" * 1000,
            "a",
            "A",
        ]
        async with opened(make_store()) as store:
            for number, name in enumerate(names, 1):
                await store.take(name, number)
                await store.write(name, number, entry(1, name))
            for number, name in enumerate(names, 1):
                assert (await store.take(name, number)).replies == {name: entry(1).reply}

    async def test_large_messages_come_back(self, make_store: MakeStore) -> None:
        data = bytes(range(256)) * 40_000
        async with opened(make_store()) as store:
            await store.take("a", 1)
            await store.write("a", 1, Entry(1, "id", data, data), data)
            await store.write("a", 1, Entry(2, "id 2", data, data))
            journal = await store.take("a", 1)
        assert journal == Journal(2, (1, data), (Entry(2, "id 2", data, data),), {"id": data, "id 2": data})


class TestReplies:
    @pytest.fixture(autouse=True)
    def clocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the clocks of the databases right after each test."""
        for store in (SqliteStore, PostgresStore):
            monkeypatch.setattr(store, "words", store.words)

    async def test_of_so_many_messages_are_kept(self, make_store: MakeStore) -> None:
        async with opened(make_store(ids=10)) as store:
            await store.take("a", 1)
            for number in range(1, 44):
                await store.write("a", 1, entry(number), b"" if number % 4 == 0 else None)
            assert list((await store.take("a", 1)).replies) == [f"id {number}" for number in range(34, 44)]
            # Replies that nobody asks for are removed: the last save was after message 40.
            assert await count(store, "number <= 30") == 0

    async def test_since_the_save_are_kept_all(self, make_store: MakeStore) -> None:
        async with opened(make_store(ids=3, keep=60)) as store:
            await store.take("a", 1)
            for number in range(1, 12):
                await store.write("a", 1, entry(number), b"" if number == 4 else None)
            age(store, 1e6)
            journal = await store.take("a", 1)
            assert numbers(journal) == list(range(5, 12))
            assert list(journal.replies) == [f"id {number}" for number in range(5, 12)]

    async def test_old_ones_are_forgotten(self, make_store: MakeStore) -> None:
        async with opened(make_store(ids=10, keep=100)) as store:
            await store.take("a", 1)
            for number in range(1, 5):
                await store.write("a", 1, entry(number), b"")
            age(store, 90)
            await store.write("a", 1, entry(5), b"")
            assert len((await store.take("a", 1)).replies) == 5
            age(store, 20)
            assert list((await store.take("a", 1)).replies) == ["id 5"]
            assert await count(store, "1 = 1") == 5
            await store.write("a", 1, entry(6), b"")
            assert await count(store, "1 = 1") == 2

    async def test_stay_when_the_clock_goes_back(self, make_store: MakeStore) -> None:
        async with opened(make_store(keep=100)) as store:
            await store.take("a", 1)
            await store.write("a", 1, entry(1), b"")
            age(store, -1e6)
            await store.write("a", 1, entry(2), b"")
            assert list((await store.take("a", 1)).replies) == ["id 1", "id 2"]

    async def test_of_other_entities_stay(self, make_store: MakeStore) -> None:
        async with opened(make_store(ids=1)) as store:
            for name in "ab":
                await store.take(name, 1)
                await store.write(name, 1, entry(1))
            for number in range(2, 9):
                await store.write("a", 1, entry(number), b"")
            assert await count(store, "entity = 'a'") == 1
            assert await store.take("b", 1) == Journal(1, None, (entry(1),), {"id 1": entry(1).reply})

    async def test_the_same_id_twice_is_an_error(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            await store.take("a", 1)
            await store.take("b", 1)
            await store.write("a", 1, entry(1), b"saved")
            await store.write("b", 1, entry(1))
            with pytest.raises(StoreError, match=r"(?i)unique") as caught:
                await store.write("a", 1, entry(2, "id 1"), b"not saved")
            assert type(caught.value.__cause__).__module__.partition(".")[0] in ("sqlite3", "psycopg")
            with pytest.raises(StoreError):
                await store.write("a", 1, entry(1, "id 2"))
            # Nothing of them was kept, and the next one is.
            await store.write("a", 1, entry(2))
            journal = await store.take("a", 1)
            assert (journal.saved, numbers(journal)) == ((1, b"saved"), [2])


class TestFences:
    async def test_who_was_replaced_writes_no_more(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as older, opened(make_store()) as newer:
            await older.take("a", 1)
            await older.take("other", 1)
            await older.write("a", 1, entry(1))
            assert numbers(await newer.take("a", 2)) == [1]
            for saved in (None, b"saved"):
                with pytest.raises(FencedError, match="a: its owner is of epoch 2, and this one of epoch 1"):
                    await older.write("a", 1, entry(2), saved)
            with pytest.raises(FencedError, match="epoch 2"):
                await older.take("a", 1)
            await newer.write("a", 2, entry(2))
            await older.write("other", 1, entry(1))
            assert await newer.take("a", 3) == Journal(
                2, None, (entry(1), entry(2)), {"id 1": entry(1).reply, "id 2": entry(2).reply}
            )

    async def test_who_never_took_it_does_not_write(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            with pytest.raises(FencedError):
                await store.write("a", 1, entry(1))
            await store.take("a", 1)
            with pytest.raises(FencedError):
                await store.write("a", 2, entry(1))

    async def test_the_newer_finds_all_writes_of_the_older(self, make_store: MakeStore) -> None:
        acknowledged: list[int] = []
        enough = trio.Event()

        async def go_on(store: Any) -> None:
            await store.take("a", 1)
            for number in itertools.count(1):
                await store.write("a", 1, entry(number))
                acknowledged.append(number)
                if number == 20:
                    enough.set()

        async def go_on_until_replaced(store: Any) -> None:
            with pytest.raises(FencedError):
                await go_on(store)

        async with opened(make_store()) as older, opened(make_store()) as newer:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(go_on_until_replaced, older)
                await enough.wait()
                journal = await newer.take("a", 2)
            assert numbers(journal) == numbers(await newer.take("a", 2)) == acknowledged

    async def test_of_many_that_take_at_the_same_time_one_is_left(self, make_store: MakeStore) -> None:
        owners: list[int] = []

        async def take(store: Any, epoch: int) -> None:
            try:
                for turn in range(5):
                    journal = await store.take("a", epoch)
                    await store.write("a", epoch, entry(journal.number + 1, f"{epoch} {turn}"))
                owners.append(epoch)
            except FencedError:
                pass

        async with opened(make_store()) as store:
            async with trio.open_nursery() as nursery:
                stores = [make_store() for _ in range(6)]
                for epoch, one in enumerate(stores, 1):
                    await one.open()
                    nursery.start_soon(take, one, epoch)
            for one in stores:
                await one.aclose()
            journal = await store.take("a", 7)
        assert owners[-1] == 6
        assert numbers(journal) == list(range(1, journal.number + 1))
        epochs = [int(one.id.split()[0]) for one in journal.entries]
        assert epochs == sorted(epochs)


class TestFailures:
    async def test_a_begun_call_is_waited_for(self, make_store: MakeStore) -> None:
        async with opened(make_store()) as store:
            await store.take("a", 1)
            work, begun, cancelled = store._write, trio.Event(), threading.Event()
            token = trio.lowlevel.current_trio_token()
            written: list[bool] = []

            def slow(*arguments: Any) -> None:
                trio.from_thread.run_sync(begun.set, trio_token=token)
                # The cancellation arrives before this has ended.
                assert cancelled.wait(60)
                work(*arguments)
                written.append(True)

            async def write(scope: trio.CancelScope) -> None:
                with scope:
                    await store._run(slow, "a", 1, entry(1), None)
                assert written

            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                nursery.start_soon(write, scope)
                await begun.wait()
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                cancelled.set()
            assert numbers(await store.take("a", 1)) == [1]
            with trio.CancelScope() as scope:
                scope.cancel()
                await store.write("a", 1, entry(2))
            # It had not begun.
            assert scope.cancelled_caught
            assert numbers(await store.take("a", 1)) == [1]

    async def test_a_call_that_takes_too_long_is_given_up(self, make_store: MakeStore) -> None:
        async with opened(make_store(timeout=60)) as store:
            is_over, store.timeout = threading.Event(), 0.2
            with pytest.raises(StoreError, match=r"has not answered within 0\.2 s"):
                await store._run(is_over.wait)
            is_over.set()
            store.timeout = 60.0
            assert await repeated(store.take, "a", 1) == Journal(0, None, (), {})

    async def test_only_an_open_one_is_asked(self, make_store: MakeStore) -> None:
        store = make_store()
        with pytest.raises(StoreError, match="is not open"):
            await store.next_epoch()
        async with opened(store):
            assert await store.next_epoch() == 1
        with pytest.raises(StoreError, match="is not open"):
            await store.take("a", 1)
        async with opened(store):
            assert await store.next_epoch() == 2

    def test_acknowledged_writes_outlive_a_process(self, make_store: MakeStore) -> None:
        store = make_store(ids=1000)
        known = 0
        with _start(store, "messages") as process:
            assert process.stdout is not None
            for line in process.stdout:
                known = int(line)
                if known == 150:
                    process.kill()
                    # Its acknowledgements before its end also hold.
                    known = max([known, *map(int, process.stdout.read().split())])
        assert process.returncode == -signal.SIGKILL

        async def recover() -> Journal:
            async with opened(store):
                return await store.take("counter", 2)

        journal = trio.run(recover)
        # The last one may have been kept, and its acknowledgement was never sent.
        assert known <= journal.number <= known + 1
        last = journal.number // 7 * 7
        assert journal.saved == (last, b"%d" % last)
        assert numbers(journal) == list(range(last + 1, journal.number + 1))
        assert journal.replies == {f"id {number}": b"r%d" % number for number in range(1, journal.number + 1)}


class TestOptions:
    def test_it_is_handed_on_before_it_is_open(self, make_store: MakeStore) -> None:
        store = make_store(ids=7, keep=8.0, timeout=9.0)
        other = pickle.loads(pickle.dumps(store))
        assert type(other) is type(store)
        assert (other.ids, other.keep, other.timeout) == (7, 8.0, 9.0)
        assert repr(other) == repr(store)

    @pytest.mark.parametrize(
        ("name", "value"), [("ids", 0), ("ids", 1.5), ("keep", 0), ("keep", "day"), ("timeout", -1)]
    )
    def test_senseless_options_are_refused(self, tmp_path: Path, name: str, value: object) -> None:
        options: Any = {name: value}
        with pytest.raises(ValueError, match=f"SqliteStore: {name} must be "):
            SqliteStore(tmp_path / "store.db", **options)


class TestSqlite:
    async def test_a_locked_file_is_waited_for(self, make_sqlite: MakeStore) -> None:
        async with opened(make_sqlite(timeout=0.5)) as store:
            await repeated(store.take, "a", 1)
            path = store.path
            with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
                other.execute("begin immediate")
                # The lock stays, so the call ends by its time.
                with pytest.raises(StoreError, match="locked"):
                    await store.write("a", 1, entry(1))
                other.execute("rollback")
            await repeated(store.write, "a", 1, entry(1))
            assert numbers(await store.take("a", 1)) == [1]

    async def test_writers_without_a_pause_let_others_write(self, make_sqlite: MakeStore) -> None:
        """A process that commits slowly and begins at once again leaves gaps of microseconds."""
        is_over = False
        async with opened(make_sqlite(timeout=1.5)) as store:
            await store.take("a", 1)

            def write() -> None:
                with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
                    while not is_over:
                        other.execute("begin immediate")
                        time.sleep(0.02)
                        other.execute("commit")
                        time.sleep(0.0001)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, write)
                try:
                    for number in range(1, 6):
                        await store.write("a", 1, entry(number))
                finally:
                    is_over = True

    async def test_an_error_reports_whether_the_call_has_begun(self, make_sqlite: MakeStore) -> None:
        async with opened(make_sqlite(timeout=0.2)) as store:
            await store.take("a", 1)
            with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
                other.execute("begin immediate")
                with pytest.raises(StoreError, match="locked") as caught:
                    await store.write("a", 1, entry(1))
                assert not caught.value.is_begun
                assert not pickle.loads(pickle.dumps(caught.value)).is_begun
            await store.write("a", 1, entry(1))
            with pytest.raises(StoreError, match="UNIQUE") as caught:
                await store.write("a", 1, entry(1))
            assert caught.value.is_begun

    async def test_a_file_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "nowhere" / "store.db")
        with pytest.raises(StoreError, match="unable to open database file"):
            await store.open()
        await store.aclose()

    async def test_a_file_of_another_kind_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("no database" * 1000)
        store = SqliteStore(tmp_path / "text")
        with pytest.raises(StoreError, match="not a database"):
            await store.open()
        await store.aclose()

    async def test_it_outlives_a_power_cut(self, make_sqlite: MakeStore) -> None:
        async with opened(make_sqlite()) as store:
            found = [
                store._database.execute(f"pragma {name}").fetchone()[0]
                for name in ("synchronous", "journal_mode")
            ]
        assert found == [2, "wal"]

    def test_it_is_of_one_host_and_its_path_of_every_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = SqliteStore("store.db")
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(store)).path == str(tmp_path / "store.db")
        assert not store.is_shared


class TestPostgres:
    async def test_it_is_of_all_hosts_and_its_password_is_not_shown(self, postgres: Any) -> None:
        store = PostgresStore(f"{postgres.dsn()} password=secret port=1", timeout=2)
        assert store.is_shared
        with pytest.raises(StoreError) as caught:
            await store.open()
        await store.aclose()
        assert "secret" not in repr(store) + str(caught.value)

    async def test_a_stopped_server_comes_back(self, postgres: Any, make_postgres: MakeStore) -> None:
        async with opened(make_postgres(timeout=2)) as store:
            await store.take("a", 1)
            await store.write("a", 1, entry(1))
            postgres.stop()
            try:
                # It stays stopped, so the call ends by its time.
                for _ in range(2):
                    with pytest.raises(StoreError):
                        await store.write("a", 1, entry(2))
            finally:
                postgres.start()
            await store.write("a", 1, entry(2))
            assert numbers(await store.take("a", 1)) == [1, 2]

    async def test_a_server_restarted_meanwhile_fails_no_call(
        self, postgres: Any, make_postgres: MakeStore
    ) -> None:
        async with opened(make_postgres()) as store:
            await store.take("a", 1)
            for number in range(1, 3):
                await store.write("a", 1, entry(number))
                postgres.stop()
                postgres.start()
            assert numbers(await store.take("a", 1)) == [1, 2]

    async def test_a_server_that_hangs_is_given_up(self, postgres: Any, make_postgres: MakeStore) -> None:
        async with opened(make_postgres(timeout=1)) as store:
            await store.take("a", 1)
            stopped = postgres.processes()
            for process in reversed(stopped):
                os.kill(process, signal.SIGSTOP)
            try:
                # It stays stopped, so the call ends by its time.
                with pytest.raises(StoreError, match="has not answered within 1 s"):
                    await store.write("a", 1, entry(1))
                # Its thread has ended, while the server still hangs.
                with trio.fail_after(60):
                    async with store._limiter:
                        pass
            finally:
                for process in stopped:
                    os.kill(process, signal.SIGCONT)
            journal = await store.take("a", 2)
            await store.write("a", 2, entry(journal.number + 1, "next"))
            assert "next" in (await store.take("a", 2)).replies

    async def test_an_owner_stopped_in_the_middle_delays_nobody(self, make_postgres: MakeStore) -> None:
        async with opened(make_postgres(timeout=6)) as older, opened(make_postgres(timeout=6)) as newer:
            await older.take("a", 1)
            begun, is_over = trio.Event(), threading.Event()
            token = trio.lowlevel.current_trio_token()

            def stop_in_the_middle(*arguments: Any) -> None:
                older._write(*arguments)
                trio.from_thread.run_sync(begun.set, trio_token=token)
                assert is_over.wait(60)

            async def write() -> None:
                with pytest.raises(StoreError):
                    await older._run(stop_in_the_middle, "a", 1, entry(1), None)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await begun.wait()
                assert await newer.take("a", 2) == Journal(0, None, (), {})
                is_over.set()
            with pytest.raises(FencedError):
                await older.write("a", 1, entry(1))
