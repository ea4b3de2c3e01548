"""Large arrays of saves: files by content, which no replaced owner can harm."""

from __future__ import annotations

import builtins
import errno
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio
from hypothesis import given, settings, strategies
from saves_entities import (
    Box,
    Break,
    DyingStore,
    Forget,
    Look,
    Model,
    Other,
    Put,
    Step,
    StoppingStore,
    UnsureStore,
    ordered,
    seen,
)

import trio_accel as ta
from trio_accel import cluster

MIB = 1 << 20
INLINE = ta.DeviceOptions(isolation="inline")
IN_FILES = ["f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8"]
IN_FILES += [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn]
IN_SAVES = [">f8", ">i2", "c16", "g", "S5", "U3", "M8[s]", [("a", "i4"), ("b", "f8")], ml_dtypes.int4]


@asynccontextmanager
async def alone(store: Any, cls: type[Box] = Box) -> AsyncGenerator[Any, None]:
    """Have an entity in this process; a later one of the same store's file takes it over."""
    with trio.fail_after(60):
        async with (
            ta.open_system("test") as system,
            system.open_devices(["cpu"], options=INLINE) as devices,
            cluster.open_entities(system, devices, store) as entities,
        ):
            yield entities.entity(cls, "a")


@asynccontextmanager
async def opened(nodes: cluster.LocalNodes, store: Any) -> AsyncGenerator[cluster.Cluster, None]:
    options = cluster.ClusterOptions(device=INLINE, backoff=ta.Backoff(base=0.05))
    with trio.fail_after(60):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, store=store, options=options) as made,
        ):
            yield made


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "entities")


def files(store: Any) -> dict[str, os.stat_result]:
    """The files in the folders of all entities, by name."""
    return {file.name: file.stat() for file in Path(store.folder).glob("*/*")}


def large(number: int, nbytes: int = MIB) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


async def restarted(ref: Any) -> dict[str, Any]:
    """The contents after the end of an incarnation, without one more save."""
    with pytest.raises(ZeroDivisionError):
        await ref.ask(Break())
    return await ref.ask(Look())


def array_of(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    made = np.dtype(dtype)
    count = int(np.prod(shape)) * made.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if made.kind == "b" else 128, count, np.uint8)
    return data.view(made).reshape(shape) if count else np.zeros(shape, made)


class TestRoundTrips:
    @settings(max_examples=15, deadline=None)
    @given(
        dtype=strategies.sampled_from(IN_FILES + IN_SAVES),
        shape=strategies.lists(strategies.integers(1, 5), max_size=4).map(tuple),
        rows=strategies.sampled_from([MIB // 32, MIB // 2 + 3, MIB + 1]),
        order=strategies.sampled_from(["whole", "transposed", "every second", "reversed", "read-only"]),
        seed=strategies.integers(0, 99),
    )
    def test_of_dtypes_shapes_and_orders(
        self, dtype: Any, shape: tuple[int, ...], rows: int, order: str, seed: int
    ) -> None:
        array = array_of(dtype, (max(1, rows // int(np.prod(shape))), *shape), seed)
        given, array = array.copy(), ordered(array, order)
        in_files = [*map(np.dtype, IN_FILES)]
        # Arrays within the save are as NumPy's pickle makes them, which changes the order of some bytes.
        wanted: Any = pickle.loads(pickle.dumps(array, 5))
        if array.dtype in in_files and array.nbytes >= MIB:
            wanted = np.array(array, order="C")
        is_file = wanted.dtype in in_files and wanted.nbytes >= MIB

        async def main(store: Any) -> None:
            async with alone(store) as ref:
                await ref.ask(Put({"array": given}, order))
                await ref.ask(Put({"step": 3}))
                assert await restarted(ref) == {"array": seen(wanted), "step": "3"}
            assert len(files(store)) == is_file
            if is_file:
                [file] = Path(store.folder).glob("*/*")  # noqa: ASYNC240
                contents = await ta.weights.inspect(file)
                [info] = contents.tensors.values()
                assert (info.shape, info.dtype.dtype) == (wanted.shape, wanted.dtype)

        with tempfile.TemporaryDirectory() as folder:
            trio.run(main, cluster.SqliteStore(f"{folder}/entities"))

    async def test_of_small_views_and_special_arrays(self, path: str) -> None:
        values = {
            "empty": np.zeros((0, MIB)),
            "number": np.array(1.5),
            "text": np.array("x" * MIB),
            "objects": np.array([1, "two", None] * 100_000, dtype=object),
            "masked": np.ma.masked_array(np.arange(MIB), mask=[True, False] * (MIB // 2)),
            "small": np.zeros(MIB - 1, np.uint8),
            "nested": [np.zeros(MIB)],
            "bytes": bytes(MIB),
        }
        store = cluster.SqliteStore(path, timeout=60)
        async with alone(store) as ref:
            await ref.ask(Put(values))
            assert await restarted(ref) == {name: seen(value) for name, value in values.items()}
        assert files(store) == {}
        assert not Path(store.folder).exists()  # noqa: ASYNC240

    async def test_two_of_the_same_content_are_two_arrays_and_one_file(self, path: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        same = large(1)
        others = {"rows": same.reshape(2, -1), "signed": same.view(np.int8)}
        async with alone(store) as ref:
            await ref.ask(Put({"one": same, "two": same.copy(), **others}))
            assert len(files(store)) == 3
            found = await restarted(ref)
        assert found == {name: seen(value) for name, value in {"one": same, "two": same, **others}.items()}

    async def test_without_a_folder_arrays_are_in_the_database(self, path: str) -> None:
        array = large(1)
        async with alone(cluster.SqliteStore(path, folder=None)) as ref:
            await ref.ask(Put({"array": array}))
            assert await restarted(ref) == {"array": seen(array)}
        # A folder may be there later.
        store = cluster.SqliteStore(path, timeout=60)
        async with alone(store) as ref:
            assert await ref.ask(Look()) == {"array": seen(array)}
            assert len(files(store)) == 1
        async with alone(cluster.SqliteStore(path, folder=None)) as ref:
            with pytest.raises(cluster.StoreError, match=r"'a'.*a store without a folder"):
                await ref.ask(Look())
        async with alone(store) as ref:
            assert await ref.ask(Look()) == {"array": seen(array)}

    async def test_by_postgres(self, make_postgres: Callable[..., Any], tmp_path: Path) -> None:
        assert make_postgres().folder is None
        store, array = make_postgres(folder=tmp_path / "arrays"), large(1, 3 * MIB)
        async with alone(store) as ref:
            await ref.ask(Put({"array": array}))
            await ref.ask(Put({"other": 1}))
        async with alone(make_postgres(folder=tmp_path / "arrays")) as ref:
            assert await ref.ask(Look()) == {"array": seen(array), "other": "1"}
            assert len(files(store)) == 1
            await ref.ask(Forget())
        assert files(store) == {}


class TestFiles:
    async def test_of_unchanged_arrays_are_not_written_again(self, path: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        arrays = {f"array {number}": large(number) for number in range(4)}
        async with alone(store) as ref:
            await ref.ask(Put(arrays))
            before = files(store)
            await ref.ask(Put({"array 0": large(10), "array 1": arrays["array 1"].copy()}))
            after = files(store)
        kept = before.keys() & after.keys()
        assert (len(before), len(after), len(kept)) == (4, 4, 3)
        for name in kept:
            assert (before[name].st_ino, before[name].st_mtime_ns) == (
                after[name].st_ino,
                after[name].st_mtime_ns,
            )
        # Neither does another owner write them.
        async with alone(cluster.SqliteStore(path, timeout=60)) as ref:
            await ref.ask(Put({"step": 1}))
            assert {name: one.st_ino for name, one in files(store).items()} == {
                name: one.st_ino for name, one in after.items()
            }

    async def test_that_no_save_names_are_removed_and_nothing_else(self, path: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        async with alone(store) as ref:
            await ref.ask(Put({"array": large(1)}))
            [name] = files(store)
            folder = next(Path(store.folder).iterdir())  # noqa: ASYNC240
            await ref.ask(Put({"array": large(2)}))
            assert len(files(store)) == 1
            assert name not in files(store)
            # The same content comes back.
            await ref.ask(Put({"array": large(1)}))
            assert [*files(store)] == [name]
            digest, _, epoch = name.partition("-")
            left = [f"{digest[::-1]}-{epoch}", f"{digest[::-1]}-{epoch}.part", f"{digest}-{epoch}.part"]
            others = ["note", f"{digest}", f"{digest}-x", f"{digest[::-1]}-{int(epoch) + 99}", f"{name}.old"]
            for one in left + others:
                (folder / one).write_bytes(b"x")
            (folder.parent / "of another").mkdir()
            (folder.parent / "of another" / left[0]).write_bytes(b"x")
            assert await restarted(ref) == {"array": seen(large(1))}
            assert sorted(files(store)) == sorted([name, *others, left[0]])
            assert (folder.parent / "of another" / left[0]).exists()
            await ref.ask(Forget())
            assert sorted(files(store)) == sorted([*others, left[0]])

    async def test_are_on_the_disk_before_the_commit_and_written_in_a_thread(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        fsync, replace, unlink, main = os.fsync, os.replace, os.unlink, threading.get_ident()

        def told(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                name = arguments[0]
                if isinstance(name, int):
                    name = os.readlink(f"/proc/self/fd/{name}")
                if path in str(name):
                    assert threading.get_ident() != main
                    done.append(f"{what} {os.path.relpath(str(name), path + '.arrays')}")
                elif str(name) == os.path.dirname(path):
                    done.append(f"{what} above")
                return work(*arguments)

            return call

        store = StoppingStore(path)
        async with alone(store) as ref, trio.open_nursery() as nursery:
            monkeypatch.setattr(os, "fsync", told("fsync", fsync))
            monkeypatch.setattr(os, "replace", told("replace", replace))
            monkeypatch.setattr(os, "unlink", told("unlink", unlink))
            there, go = store.stop("before the commit")
            nursery.start_soon(ref.ask, Put({"array": large(1)}))
            await there.wait()
            [name] = files(store)
            folder = next(Path(store.folder).iterdir()).name  # noqa: ASYNC240
            assert done == [
                f"fsync {folder}/{name}.part",
                f"replace {folder}/{name}.part",
                f"fsync {folder}",
                "fsync .",
                "fsync above",
            ]
            go.set()

    async def test_of_two_entities_are_apart(self, path: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        async with alone(store) as ref:
            await ref.ask(Put({"array": large(1)}))
        async with alone(store, Other) as ref:
            await ref.ask(Put({"array": large(1)}))
            assert len([*Path(store.folder).glob("*/*")]) == 2  # noqa: ASYNC240
            await ref.ask(Forget())
        async with alone(store) as ref:
            assert await ref.ask(Look()) == {"array": seen(large(1))}


class TestOwners:
    """One owner is stopped, another takes the entity, and the first one continues."""

    async def _replaced(self, path: str, where: str, before: dict[str, Any], late: dict[str, Any]) -> None:
        """Have the first owner stop in a message; the second one's arrays must be whole, whatever it does."""
        store = StoppingStore(path)
        errors: list[type[Exception]] = []

        async def be_late(ref: Any) -> None:
            try:
                await ref.ask(Put(late))
            except (cluster.FencedError, cluster.StoreError) as error:
                errors.append(type(error))

        async with alone(store) as first:
            await first.ask(Put(before))
            found_first = files(store).keys()
            async with trio.open_nursery() as nursery:
                there, go = store.stop(where)
                if where == "taken":
                    with pytest.raises(ZeroDivisionError):
                        await first.ask(Break())
                nursery.start_soon(be_late, first)
                await there.wait()
                async with alone(cluster.SqliteStore(path, timeout=60)) as second:
                    found = await second.ask(Look())
                    wanted = before | (late if where == "committed" else {})
                    assert found == {name: seen(value) for name, value in wanted.items()}
                    own = {"own": large(50), "shared": large(60)}
                    await second.ask(Put(own))
                    # Files written or removed by the first one come to be the second one's.
                    await second.ask(Put(late))
                    wanted |= own | late
                    named = files(store)
                    go.set()
                    while nursery.child_tasks:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    # A file found by the first one may be removed by the time when it reads it.
                    is_gone = where == "taken" and not found_first <= named.keys()
                    error = cluster.StoreError if is_gone else cluster.FencedError
                    assert errors == ([] if where == "committed" else [error])
                    assert files(store).keys() == named.keys()
                    assert await restarted(second) == {name: seen(value) for name, value in wanted.items()}
                    # Another message of the first one is also refused, and has no files.
                    with pytest.raises(cluster.FencedError):
                        await first.ask(Put({"array": large(70)}))
                    assert files(store).keys() == named.keys()
                    assert await restarted(second) == {name: seen(value) for name, value in wanted.items()}

    @pytest.mark.parametrize("where", ["taken", "before the commit", "committed"])
    async def test_stopping_one_harms_no_later_one(self, path: str, where: str) -> None:
        before = {"array": large(1), "kept": large(2)}
        await self._replaced(path, where, before, {"array": large(3), "new": large(4)})

    async def test_stopped_before_its_sweep(self, path: str) -> None:
        # All that it has found is still there, so it gets as far as to remove the rest.
        await self._replaced(path, "taken", {"array": large(1)}, {"new": large(2)})

    @pytest.mark.parametrize("where", ["taken", "before the commit", "committed"])
    async def test_with_the_same_contents(self, path: str, where: str) -> None:
        before = {"array": large(60), "kept": large(50)}
        await self._replaced(path, where, before, {"array": large(50), "kept": large(60), "new": large(1)})

    async def test_stopped_before_its_files(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store, is_there, go = cluster.SqliteStore(path, timeout=60), trio.Event(), threading.Event()
        mkdir, has_stopped = os.mkdir, False
        token = trio.lowlevel.current_trio_token()

        def stop(*arguments: Any) -> None:
            nonlocal has_stopped
            if not has_stopped:
                has_stopped = True
                trio.from_thread.run_sync(is_there.set, trio_token=token)
                go.wait(30)
            mkdir(*arguments)

        async def be_late(ref: Any) -> None:
            with pytest.raises(cluster.FencedError):
                await ref.ask(Put({"array": large(2), "new": large(3)}))

        async with alone(store) as first:
            await first.ask(Put({"array": large(1)}))
            monkeypatch.setattr(os, "mkdir", stop)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(be_late, first)
                await is_there.wait()
                async with alone(cluster.SqliteStore(path, timeout=60)) as second:
                    await second.ask(Put({"array": large(2)}))
                    named = files(store)
                    go.set()
                    while nursery.child_tasks:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    assert files(store).keys() == named.keys()
                    assert await restarted(second) == {"array": seen(large(2))}

    async def test_with_an_uncertain_commit_leave_files_until_it_is_known(self, path: str) -> None:
        store, lost = UnsureStore(path), Path(path + ".lost")
        async with alone(store) as ref:
            await ref.ask(Put({"array": large(1)}))
            lost.touch()  # noqa: ASYNC240
            with pytest.raises(cluster.StoreError, match="the answer is lost"):
                await ref.ask(Put({"array": large(2)}), id="unsure")
            assert len(files(store)) == 2
            lost.unlink()  # noqa: ASYNC240
            assert await ref.ask(Put({"array": large(2)}), id="unsure") is None
            assert len(files(store)) == 1
            assert await ref.ask(Look()) == {"array": seen(large(2))}


class TestFailures:
    @pytest.mark.parametrize(
        "harm", ["a bit", "cut off", "longer", "missing", "another", "empty", "a folder"]
    )
    async def test_a_damaged_file_is_named_and_nothing_is_lost(self, path: str, harm: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        arrays = {"array": large(1), "other": large(2)}
        async with alone(store) as ref:
            await ref.ask(Put(arrays))
        one, other = sorted(Path(store.folder).glob("*/*"))  # noqa: ASYNC240
        whole = one.read_bytes()
        match harm:
            case "a bit":
                one.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
            case "cut off":
                one.write_bytes(whole[:-1])
            case "longer":
                one.write_bytes(whole + b"x")
            case "another":
                one.write_bytes(other.read_bytes())
            case "empty":
                one.write_bytes(b"")
            case _:
                one.unlink()
                if harm == "a folder":
                    one.mkdir()
        named = files(store).keys()
        async with alone(store) as ref:
            for _ in range(2):
                with pytest.raises(cluster.StoreError) as caught:
                    await ref.ask(Look())
                assert "Box" in str(caught.value)
                assert "'a'" in str(caught.value)
                assert str(one) in str(caught.value)
            assert files(store).keys() == named
            if harm == "a folder":
                one.rmdir()
            one.write_bytes(whole)
            assert await ref.ask(Look()) == {name: seen(value) for name, value in arrays.items()}

    @pytest.mark.parametrize("call", ["writelines", "fsync", "replace"])
    async def test_a_full_disk(self, path: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        store = cluster.SqliteStore(path, timeout=60)
        calls = 0

        def fail(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            # The first of two files is complete by then.
            if calls > (5 if call == "fsync" else 1):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            work(*arguments)

        class File:
            def __init__(self, *arguments: Any) -> None:
                self._file = real_open(*arguments)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                self._file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

            def writelines(self, parts: list[Any]) -> None:
                self._file.write(parts[1][:1000])
                fail(parts)

        real_open = builtins.open
        work: Callable[..., Any] = getattr(os, call, lambda *_: None)
        arrays = {"array": large(1)}
        async with alone(store) as ref:
            await ref.ask(Put(arrays))
            before = files(store).keys()
            with monkeypatch.context() as patch:
                if call == "writelines":
                    patch.setattr(
                        builtins,
                        "open",
                        lambda *them, **how: (
                            File(*them) if ".part" in str(them[0]) else real_open(*them, **how)
                        ),
                    )
                else:
                    patch.setattr(os, call, fail)
                with pytest.raises(cluster.StoreError, match=r"(?s)'a'.*cannot write.*No space") as caught:
                    await ref.ask(Put({"array": large(2), "other": large(3)}))
            assert store.folder is not None
            assert store.folder in str(caught.value)
            assert calls > 1
            assert files(store).keys() == before
            assert await ref.ask(Look()) == {name: seen(value) for name, value in arrays.items()}
            await ref.ask(Put({"array": large(2)}))
            assert await restarted(ref) == {"array": seen(large(2))}

    @pytest.mark.parametrize("what", ["nothing above", "a file"])
    async def test_a_missing_folder(self, tmp_path: Path, what: str) -> None:
        folder = tmp_path / "mount" / "arrays"
        if what == "a file":
            folder = tmp_path / "arrays"
            folder.write_text("this is not a folder")
        store = cluster.SqliteStore(tmp_path / "entities", folder=folder)
        async with alone(store) as ref:
            await ref.ask(Put({"step": 1}))
            with pytest.raises(cluster.StoreError, match="cannot write an array") as caught:
                await ref.ask(Put({"array": large(1)}))
            assert str(folder) in str(caught.value)
            assert await ref.ask(Look()) == {"step": "1"}
        assert not (tmp_path / "mount").exists()

    async def test_a_folder_that_may_not_be_written(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = cluster.SqliteStore(path, timeout=60)

        def refuse(name: str, *_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

        async with alone(store) as ref:
            await ref.ask(Put({"step": 1}))
            # Root may write everywhere.
            with monkeypatch.context() as patch:
                patch.setattr(os, "mkdir", refuse)
                with pytest.raises(cluster.StoreError, match="Permission denied") as caught:
                    await ref.ask(Put({"array": large(1)}))
            assert str(store.folder) in str(caught.value)
            assert await ref.ask(Look()) == {"step": "1"}


class TestClusters:
    async def test_an_agent_that_dies_between_its_files_and_the_commit(self, path: str) -> None:
        nodes, store = cluster.LocalNodes(2), DyingStore(path)
        async with opened(nodes, store) as made:
            ref = made.entity(Model, "a")
            for number in range(1, 4):
                assert await ref.ask(Step(1.0)) == number
            assert len(files(store)) == 2
            kill = Path(path + ".kill")
            kill.touch()  # noqa: ASYNC240
            # The save after the fourth message has its file, and was not committed.
            assert await ref.ask(Step(1.0)) == 4
            assert Path(path + ".killed").read_text() == "3"  # noqa: ASYNC240
            assert len(files(store)) == 2
            for number in range(5, 8):
                assert await ref.ask(Step(1.0)) == number
            assert len(files(store)) == 2

    async def test_an_entity_moves_with_its_arrays(self, path: str) -> None:
        nodes, store, total = cluster.LocalNodes(2), cluster.SqliteStore(path, timeout=60), 0.0
        async with opened(nodes, store) as made:
            ref, homes = made.entity(Model, "a"), set[str]()
            for harm in ("nothing", "drain", "kill", "nothing"):
                for _ in range(3):
                    total += 1.0
                    assert await ref.ask(Step(1.0)) == total
                [home] = [one.name for one in made.members if f"on {one.name}" in repr(ref)]
                homes.add(home)
                if harm == "drain":
                    await made.drain(home)
                elif harm == "kill":
                    os.kill(nodes.pid(home), signal.SIGKILL)
            assert len(homes) == 2
            assert len(files(store)) == 2
