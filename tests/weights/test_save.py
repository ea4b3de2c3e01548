"""The written files have the format: the format's own library reads them, and so do we."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weight_files import WORDS, dtype_of, encoded, noise, used

import trio_accel as ta
from trio_accel.weights import _transfers

NUMPYS = [name for name in WORDS if not hasattr(ml_dtypes, name)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transfers, "_CHUNK_BYTES", 4096)


@pytest.mark.usefixtures("small_pieces")
async def test_each_dtype_comes_back(device: ta.Device, tmp_path: Path) -> None:
    shapes = ((), (0,), (7,), (33, 99))
    arrays = {f"{dtype} {shape}": noise(shape, dtype) for dtype in WORDS for shape in shapes}
    refs = {name: await device.put(array) for name, array in arrays.items()}
    path = tmp_path / "saved.safetensors"
    told: list[tuple[int, int]] = []
    await ta.weights.save(path, refs, metadata={"é": "ü"}, progress=lambda *both: told.append(both))
    total = sum(array.nbytes for array in arrays.values())
    assert told[-1] == (total, total)
    assert os.listdir(tmp_path) == [path.name]
    weights = await ta.weights.load(device, path)
    assert weights.metadata == {"é": "ü"}
    assert set(weights) == set(arrays)
    for name, array in arrays.items():
        assert (await weights[name].to_host()).tobytes() == array.tobytes()
        assert weights[name].shape == array.shape
    for tensor in (await ta.weights.inspect(path)).tensors.values():
        assert tensor.offset % tensor.dtype.itemsize == 0


async def test_the_formats_own_library_reads_and_writes_the_same(device: ta.Device, tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors")
    numpys = pytest.importorskip("safetensors.numpy")
    arrays = {f"x.{name}": noise((5, 9), name) for name in NUMPYS}
    ours, other = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    await ta.weights.save(ours, {name: await device.put(array) for name, array in arrays.items()})
    found = numpys.load_file(ours)
    assert set(found) == set(arrays)
    assert all(found[name].tobytes() == array.tobytes() for name, array in arrays.items())
    assert all(found[name].dtype == array.dtype for name, array in arrays.items())
    numpys.save_file(arrays, other, metadata={"a": "b"})
    weights = await ta.weights.load(device, other)
    for name, array in arrays.items():
        assert (await weights[name].to_host()).tobytes() == array.tobytes()
    await ta.weights.save(ours, weights, metadata=weights.metadata)
    with theirs.safe_open(ours, "numpy") as opened:
        assert opened.metadata() == {"a": "b"}


async def test_arguments_it_refuses_are_refused_by_the_formats_own_library(
    device: ta.Device, tmp_path: Path
) -> None:
    """Each bit of a header changed: a header that the library cannot read, we cannot read either."""
    theirs = pytest.importorskip("safetensors")
    content = encoded({"ab": noise((6,), "int16"), "c": noise((), "uint8")})
    path = tmp_path / "bits.safetensors"
    checked = 0
    for place in range(len(content) - 13):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        try:
            read = {name for name, _ in theirs.deserialize(bytes(changed))}
        except Exception:  # noqa: BLE001  # the library has an exception of its own, of a compiled module
            path.write_bytes(changed)
            with pytest.raises((ta.weights.WeightsError, ta.NotSupportedError)):
                await ta.weights.load(device, path)
            checked += 1
            continue
        path.write_bytes(changed)
        assert set(await ta.weights.load(device, path)) == read
    assert checked > 50


async def test_views_are_written_as_they_look(device: ta.Device, tmp_path: Path) -> None:
    host = noise((60, 50), "int32")
    x = await device.put(host)
    path = tmp_path / "views.safetensors"
    await ta.weights.save(path, {"t": x.T, "part": x[3:9:2, ::-1], "row": x[7], "all": x})
    weights = await ta.weights.load(device, path)
    expected = {"t": host.T, "part": host[3:9:2, ::-1], "row": host[7], "all": host}
    for name, array in expected.items():
        np.testing.assert_array_equal(await weights[name].to_host(), array)


async def test_wrong_arguments(device: ta.Device, tmp_path: Path) -> None:
    x = await device.put(np.zeros(3))
    path = tmp_path / "no.safetensors"
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        ({"__metadata__": x}, None, ValueError, "__metadata__"),
        ({1: x}, None, TypeError, "names of text"),
        ({"a": np.zeros(3)}, None, TypeError, "must be an AccelRef, got ndarray"),
        ({"a": x}, {"a": 1}, TypeError, "metadata must be text by name"),
        ({"\ud800": x}, None, ValueError, "surrogates"),
        ({"a": await device.zeros(2, "complex128")}, None, ta.NotSupportedError, "complex128"),
    ]
    for arrays, metadata, error, said in wrong:
        with pytest.raises(error, match=said):
            await ta.weights.save(path, arrays, metadata=metadata)
    with pytest.raises(FileNotFoundError):
        await ta.weights.save(tmp_path / "missing" / "x", {"a": x})
    assert os.listdir(tmp_path) == []
    with pytest.raises(IsADirectoryError):
        await ta.weights.save(tmp_path, {"a": x})


@pytest.mark.usefixtures("small_pieces")
async def test_a_failed_or_cancelled_save_changes_nothing(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    path.write_bytes(b"before")
    x = await device.put(noise((30_000,), "uint8"))
    before = await used(device)

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ta.weights.save(path, {"a": x}, progress=fail)
    with trio.CancelScope() as scope:
        await ta.weights.save(path, {"a": x}, progress=lambda *_: scope.cancel())
    assert scope.cancelled_caught
    assert await used(device) == before
    x.release()
    with pytest.raises(ta.StaleRefError):
        await ta.weights.save(path, {"a": x})
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == b"before"


@pytest.mark.usefixtures("small_pieces")
async def test_a_full_disk_changes_nothing(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    x = await device.put(noise((30_000,), "uint8"))
    await ta.weights.save(path, {"x": x[:100]})
    before, whole = await used(device), path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # In the header, at its end, in the first piece of the data and in the last one.
    for most in (10, 80, 5_000, 30_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                await ta.weights.save(path, {"x": x})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == [path.name]
        assert path.read_bytes() == whole
        assert await used(device) == before
    await ta.weights.save(path, {"x": x})
    assert path.stat().st_size > 30_000


@pytest.mark.parametrize("call", ["fsync", "replace"])
async def test_a_disk_full_at_the_last_moment_changes_nothing(
    device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "kept.safetensors"
    path.write_bytes(b"before")
    x = await device.put(np.ones(3))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space left"):
            await ta.weights.save(path, {"x": x})
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == b"before"


async def test_it_has_the_access_rights_of_a_new_file(device: ta.Device, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    await ta.weights.save(tmp_path / "x", {"a": await device.zeros(1)})
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("other", "x")}
    assert len(modes) == 1


_ARRAYS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(sorted(WORDS)).flatmap(
        lambda name: hnp.arrays(
            np.uint8,
            st.tuples(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)).map(
                lambda shape: (*shape[0], dtype_of(name).itemsize)
            ),
            elements=st.integers(0, 1 if name == "bool" else 255),
        ).map(lambda bits: bits.view(dtype_of(name))[..., 0])
    ),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(arrays=_ARRAYS, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_anything_comes_back(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    import tempfile

    async def main(folder: str) -> None:
        async with ta.open_system("roundtrip") as system, system.open_device("cpu") as device:
            path = f"{folder}/x.safetensors"
            refs = {name: await device.put(array) for name, array in arrays.items()}
            await ta.weights.save(path, refs, metadata=metadata)
            weights = await ta.weights.load(device, path)
            assert weights.metadata == metadata
            assert set(weights) == set(arrays)
            for name, array in arrays.items():
                found = await weights[name].to_host()
                assert (found.shape, found.dtype) == (array.shape, array.dtype)
                assert found.tobytes() == array.tobytes()
            await trio.to_thread.run_sync(Path(path).write_bytes, encoded(arrays, metadata))
            again = await ta.weights.load(device, path)
            for name, array in arrays.items():
                assert (await again[name].to_host()).tobytes() == array.tobytes()

    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, folder)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
async def test_a_replaced_file_keeps_its_mode(device: ta.Device, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "kept.safetensors"
    x = await device.put(np.ones(2))
    seen = set[int]()

    def look(*_: object) -> None:
        seen.update(stat.S_IMODE(found.stat().st_mode) for found in tmp_path.iterdir())

    before = os.umask(0o027)
    try:
        await ta.weights.save(path, {"x": x})
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(mode)
        await ta.weights.save(path, {"x": x}, progress=look)
    finally:
        os.umask(before)
    assert seen == {mode}
    assert stat.S_IMODE(path.stat().st_mode) == mode


async def test_links_and_other_paths(device: ta.Device, tmp_path: Path) -> None:
    x = await device.put(np.ones(2))
    (tmp_path / "other").mkdir()
    link, path = tmp_path / "link", tmp_path / "other" / "model"
    link.symlink_to(path)
    for _ in range(2):
        await ta.weights.save(link, {"x": x})
        assert link.is_symlink()
        assert list(await ta.weights.load(device, path)) == ["x"]
    os.link(path, tmp_path / "hard")
    await ta.weights.save(path, {"y": x})
    assert list(await ta.weights.load(device, tmp_path / "hard")) == ["x"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ta.weights.WeightsError, match="pipe is there and no regular file"):
        await ta.weights.save(pipe, {"x": x})
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        await ta.weights.save(tmp_path, {"x": x})
    assert sorted(os.listdir(tmp_path)) == ["hard", "link", "other", "pipe"]


async def test_leftovers_of_a_killed_save_are_removed(device: ta.Device, tmp_path: Path) -> None:
    """Once it is old: a younger file belongs to a running save, and other names are the user's."""
    names = [
        ".model.safetensors.0123456789abcdef",
        ".model.safetensors.fedcba9876543210",
        ".model.safetensors.mine",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"a part")
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (0, 0))
    await ta.weights.save(tmp_path / "model.safetensors", {"x": await device.put(np.ones(3))})
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "model.safetensors"])
