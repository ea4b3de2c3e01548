"""Files become arrays: bit for bit, by name, in bounded memory; all of them or none."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from weight_files import WORDS, dtype_of, encoded, noise, used

import trio_accel as ta
from trio_accel.devices import OpenDevice
from trio_accel.weights import _files, _transfers


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=request.param)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_transfers, "_CHUNK_BYTES", 4096)
    return 4096


def written(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("packed", [False, True])
async def test_each_dtype_and_shape_is_exact(device: ta.Device, tmp_path: Path, *, packed: bool) -> None:
    shapes = ((), (0,), (3, 0, 2), (7,), (5, 3), (1, 4096), (4097,), (3, 50, 70))
    arrays = {f"{dtype} {shape}": noise(shape, dtype) for dtype in WORDS for shape in shapes}
    path = written(tmp_path, encoded(arrays, {"format": "pt"}))
    weights = await ta.weights.load(device, path, packed=packed)
    assert list(weights) == list(arrays)
    blocks = {array.block for array in weights.values()}
    assert len(blocks) == (len(WORDS) if packed else len(arrays))
    assert all(array.spec.offset % 256 == 0 for array in weights.values())
    assert weights.metadata == {"format": "pt"}
    assert weights.nbytes == sum(array.nbytes for array in arrays.values())
    for name, expected in arrays.items():
        found = await weights[name].to_host()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes(), name
        assert weights[name].spec.is_contiguous


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("wanted", ["float64", "float32", "float16", "bfloat16", "complex64"])
async def test_floats_are_converted_as_numpy_converts_and_others_are_not(
    device: ta.Device, tmp_path: Path, wanted: str
) -> None:
    numbers = np.random.default_rng(1).standard_normal((90, 77)) * 1e5
    dtypes = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
    with np.errstate(all="ignore"):
        floats = {name: numbers.astype(dtype_of(name)) for name in dtypes}
    others = {name: noise((1000,), name) for name in ("int64", "uint8", "bool")}
    path = written(tmp_path, encoded({**floats, **others}))
    weights = await ta.weights.load(device, path, dtype=wanted)
    for name, array in floats.items():
        found = await weights[name].to_host()
        with np.errstate(all="ignore"):
            expected = array.astype(dtype_of(wanted))
        assert found.dtype == dtype_of(wanted)
        assert found.tobytes() == expected.tobytes(), name
    for name, array in others.items():
        assert (await weights[name].to_host()).tobytes() == array.tobytes()


async def test_a_conversion_that_would_lose_something_is_refused(device: ta.Device, tmp_path: Path) -> None:
    path = written(tmp_path, encoded({"x": noise((3,), "complex64")}))
    with pytest.raises(TypeError, match="'x' is complex64: as float32 it would lose its imaginary parts"):
        await ta.weights.load(device, path, dtype="float32")
    for dtype in ("int8", "bool"):
        with pytest.raises(TypeError, match="dtype must be a floating or complex type"):
            await ta.weights.load(device, path, dtype=dtype)


async def test_packed_arrays_do_not_overlap_and_are_released_together(
    device: ta.Device, tmp_path: Path
) -> None:
    arrays = {name: noise((size,), "float32") for name, size in (("a", 3), ("b", 100), ("c", 64), ("d", 1))}
    path = written(tmp_path, encoded({**arrays, "e": noise((9,), "int8")}))
    before = await used(device)
    weights = await ta.weights.load(device, path, dtype="float64", packed=True)
    assert (await used(device))[1] - before[1] == 2
    await weights["b"].fill(0)
    for name in "acd":
        expected = arrays[name].astype("float64")
        np.testing.assert_array_equal(await weights[name].to_host(), expected)
    weights["a"].release()
    with pytest.raises(ta.StaleRefError):
        await weights["d"].to_host()
    assert (await weights["e"].to_host()).shape == (9,)
    assert len(await ta.weights.load(device, path, names=(), packed=True)) == 0


async def test_names_are_chosen(device: ta.Device, tmp_path: Path) -> None:
    arrays = {name: noise((8,), "float32") for name in "abcd"}
    path = written(tmp_path, encoded(arrays))
    weights = await ta.weights.load(device, path, names=["d", "b", "b"])
    assert list(weights) == ["b", "d"]
    assert "a" not in weights
    assert len(await ta.weights.load(device, path, names=())) == 0
    with pytest.raises(ValueError, match=r"names has 'e', which .*model.safetensors does not hold"):
        await ta.weights.load(device, path, names=["a", "e"])
    with pytest.raises(TypeError, match="several names, got the text 'a'"):
        await ta.weights.load(device, path, names="a")


async def test_dtypes_without_a_device_are_refused_by_name(device: ta.Device, tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
    }
    text = json.dumps(header).encode()
    path = written(tmp_path, len(text).to_bytes(8, "little") + text + bytes(5))
    with pytest.raises(ta.NotSupportedError, match="'a' has the element type F6_E2M3"):
        await ta.weights.load(device, path)
    assert list(await ta.weights.load(device, path, names=["b"])) == ["b"]
    contents = await ta.weights.inspect(path)
    assert (contents.tensors["a"].format, contents.tensors["a"].shape) == ("F6_E2M3", (4,))


async def test_progress_ends_with_all_bytes_and_its_error_ends_the_loading(
    device: ta.Device, tmp_path: Path, small_pieces: int
) -> None:
    arrays = {"a": noise((9000,), "uint8"), "b": noise((3000,), "float32"), "c": noise((), "int8")}
    path = written(tmp_path, encoded(arrays))
    told: list[tuple[int, int]] = []
    weights = await ta.weights.load(device, path, progress=lambda *both: told.append(both))
    assert [total for _, total in told] == [21001] * len(told)
    done = [0, *(bytes_ for bytes_, _ in told)]
    assert done[-1] == 21001
    assert all(0 < after - before <= small_pieces for before, after in itertools.pairwise(done))
    weights.release()
    before = await used(device)

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError(f"{done} of {total}")

    with pytest.raises(ZeroDivisionError):
        await ta.weights.load(device, path, progress=fail)
    assert await used(device) == before


async def test_an_index_and_several_files(device: ta.Device, tmp_path: Path) -> None:
    first, second = {"a": noise((5,), "float32"), "b": noise((6,), "int8")}, {"c": noise((7,), "float16")}
    one = written(tmp_path, encoded(first, {"x": "1", "y": "1"}), "model-1.safetensors")
    two = written(tmp_path, encoded(second, {"y": "2", "z": "2"}), "model-2.safetensors")
    places = {"a": one.name, "c": two.name}
    index = written(tmp_path, json.dumps({"weight_map": places}).encode(), "model.safetensors.index.json")
    assert set(await ta.weights.load(device, index)) == {"a", "c"}
    weights = await ta.weights.load(device, [one, os.fspath(two)])
    assert list(weights) == ["a", "b", "c"]
    assert weights.metadata == {"x": "1", "y": "1", "z": "2"}
    assert (await weights["c"].to_host()).tobytes() == second["c"].tobytes()
    with pytest.raises(ta.weights.WeightsError, match="both hold 'a'"):
        await ta.weights.load(device, [one, one])
    for wrong, said in (
        ({"weight_map": {"c": one.name}}, "does not hold 'c', which its index says"),
        ({"weight_map": {"c": "../model-2.safetensors"}}, "must be in a file of the same folder"),
        ({"weight_map": {"c": 3}}, "must be in a file of the same folder"),
        ({"weight_map": []}, "weight_map is missing"),
        ([], "weight_map is missing"),
    ):
        index.write_text(json.dumps(wrong))
        with pytest.raises(ta.weights.WeightsError, match=said):
            await ta.weights.load(device, index)
    index.write_text("[" * 100_000)
    with pytest.raises(ta.weights.WeightsError, match="nested too deeply"):
        await ta.weights.load(device, index)
    index.write_text(json.dumps({"weight_map": {"c": "missing.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="missing"):
        await ta.weights.load(device, index)


async def test_invalid_files(device: ta.Device, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FileNotFoundError):
        await ta.weights.load(device, tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        await ta.weights.load(device, tmp_path)
    for name in ("pipe", "pipe.json"):
        with trio.fail_after(60), pytest.raises(ta.weights.WeightsError, match="not a regular file"):
            await ta.weights.load(device, tmp_path / name)
    with pytest.raises(ta.weights.WeightsError, match="not a regular file"):
        await ta.weights.load(device, "/dev/zero")
    with pytest.raises(TypeError, match="path"):
        await ta.weights.load(device, b"model.safetensors")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one file at least"):
        await ta.weights.load(device, [])


async def test_host_memory_is_that_of_a_few_pieces(
    device: ta.Device, tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    empty = OpenDevice.host_empty

    def counting(device: ta.Device, *arguments: Any) -> Any:
        array = empty(device, *arguments)
        made.append(array.nbytes)
        return array

    monkeypatch.setattr(OpenDevice, "host_empty", counting)
    path = written(tmp_path, encoded({"a": noise((1 << 20,), "uint8"), "b": noise((99_999,), "float32")}))
    for dtype in (None, "float64"):
        made.clear()
        await ta.weights.load(device, path, dtype=dtype)
        assert made == [small_pieces] * 2


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_more_than_there_is_is_refused_before_anything_is_made(
    system: ta.System, tmp_path: Path, isolation: Any
) -> None:
    path = written(tmp_path, encoded({name: noise((20_000,), "float32") for name in "abc"}))
    options = ta.DeviceOptions(isolation=isolation, memory_limit=200_000)
    async with system.open_device(BACKEND, options=options) as device:
        told: list[int] = []
        for _ in range(2):
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await ta.weights.load(device, path, progress=lambda done, _: told.append(done))
            assert (caught.value.requested, caught.value.total) == (240_000, 200_000)
        assert not told
        assert (await device.statistics()).memory.peak == 0
        assert len(await ta.weights.load(device, path, names=["a", "b"])) == 2
        # Both are released, and released memory counts for nothing.
        assert (await ta.weights.load(device, path, dtype="float16")).nbytes == 120_000


@pytest.mark.usefixtures("small_pieces")
async def test_memory_that_ends_in_the_middle_is_given_back(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(self: Any) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(_transfers._Loading, "_check_memory", unknown)
    path = written(tmp_path, encoded({name: noise((20_000,), "float32") for name in "abc"}))
    options = ta.DeviceOptions(isolation="inline", memory_limit=200_000)
    async with system.open_device(BACKEND, options=options) as device:
        with pytest.raises(ta.OutOfMemoryError):
            await ta.weights.load(device, path)
        assert (await used(device))[1] == 0


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("how", ["shorter", "longer", "touched"])
async def test_a_file_that_changes_meanwhile_is_an_error(device: ta.Device, tmp_path: Path, how: str) -> None:
    content = encoded({"a": noise((50_000,), "uint8")})
    path = written(tmp_path, content)
    before = await used(device)

    def change(done: int, total: int) -> None:
        if how == "shorter":
            os.truncate(path, len(content) // 2)
        elif how == "longer":
            path.write_bytes(content + b"x")
        else:
            os.utime(path, ns=(1, 1))

    with pytest.raises(ta.weights.WeightsError, match="while it was read"):
        await ta.weights.load(device, path, progress=change)
    assert await used(device) == before


@pytest.mark.usefixtures("small_pieces")
async def test_a_file_replaced_meanwhile_is_read_in_its_old_state(device: ta.Device, tmp_path: Path) -> None:
    expected = noise((50_000,), "uint8")
    path = written(tmp_path, encoded({"a": expected}))
    other = written(tmp_path, encoded({"a": noise((10,), "int64")}), "other")
    weights = await ta.weights.load(device, path, progress=lambda *_: other.exists() and other.replace(path))
    assert (await weights["a"].to_host()).tobytes() == expected.tobytes()


@pytest.mark.usefixtures("small_pieces")
async def test_a_cancelled_loading_leaves_nothing(device: ta.Device, tmp_path: Path) -> None:
    path = written(tmp_path, encoded({"a": noise((50_000,), "uint8"), "b": noise((50_000,), "uint8")}))
    before = await used(device)
    for at in (4096, 50_000, 60_000):
        with trio.CancelScope() as scope:
            await ta.weights.load(
                device, path, progress=lambda done, _, at=at: scope.cancel() if done >= at else None
            )
        assert scope.cancelled_caught
        assert await used(device) == before
    with trio.CancelScope() as scope:
        scope.cancel()
        await ta.weights.load(device, path)
    assert scope.cancelled_caught


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, isolation: Any) -> None:
    path = written(tmp_path, encoded({"a": noise((50_000,), "uint8"), "b": noise((50_000,), "uint8")}))

    async def main() -> None:
        options = ta.DeviceOptions(isolation=isolation)
        async with (
            ta.open_system("interrupted") as system,
            system.open_device(BACKEND, options=options) as device,
        ):
            with pytest.raises(KeyboardInterrupt):
                await ta.weights.load(device, path, progress=lambda *_: signal.raise_signal(signal.SIGINT))
            assert (await used(device))[1] == 0

    trio.run(main)


@pytest.mark.usefixtures("small_pieces")
async def test_reading_never_runs_in_the_loop(
    device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[bool] = []
    read = _files.OpenFile.read

    def noted(self: Any, *arguments: Any) -> None:
        inside.append(trio.lowlevel.in_trio_run())
        read(self, *arguments)

    monkeypatch.setattr(_files.OpenFile, "read", noted)
    await ta.weights.load(device, written(tmp_path, encoded({"a": noise((50_000,), "uint8")})))
    assert len(inside) > 10
    assert not any(inside)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("retry", [0, 1])
async def test_a_lost_context_is_an_error_or_the_files_are_read_again(
    system: ta.System, tmp_path: Path, retry: int
) -> None:
    expected = noise((50_000,), "uint8")
    path = written(tmp_path, encoded({"a": expected, "b": noise((9,), "int8")}))
    options = ta.DeviceOptions(isolation="inline", retry=retry)
    async with system.open_device(BACKEND, options=options) as device:
        told: list[int] = []

        def poison(done: int, total: int) -> None:
            told.append(done)
            if len(told) == 5:
                ta.testing.poison(device, "meanwhile")

        if not retry:
            with pytest.raises((ta.ContextLostError, ta.StaleRefError)):
                await ta.weights.load(device, path, progress=poison)
        else:
            weights = await ta.weights.load(device, path, progress=poison)
            assert told.count(told[0]) == 2
            assert (await weights["a"].to_host()).tobytes() == expected.tobytes()
            del weights
        assert (await used(device))[1] == 0
    assert device.generation == 2


@pytest.mark.usefixtures("small_pieces")
async def test_a_killed_worker_costs_no_existing_array(system: ta.System, tmp_path: Path) -> None:
    arrays = {name: noise((50_000,), "uint8") for name in "ab"}
    path = written(tmp_path, encoded(arrays))
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with system.open_device(BACKEND, options=options) as device:
        pid = (await device.statistics()).pid
        assert pid is not None
        told: list[int] = []

        def kill(done: int, total: int) -> None:
            told.append(done)
            if len(told) == 5:
                os.kill(pid, 9)

        weights = await ta.weights.load(device, path, progress=kill)
        for name, expected in arrays.items():
            assert (await weights[name].to_host()).tobytes() == expected.tobytes()
        assert device.generation == 2


async def test_others_may_fill_the_queue(system: ta.System, tmp_path: Path) -> None:
    expected = noise((1 << 24,), "uint8")
    path = written(tmp_path, encoded({"a": expected}))
    options = ta.DeviceOptions(isolation="inline", in_flight=1)
    async with system.open_device(BACKEND, options=options) as device:
        weights = await ta.weights.load(device, path)
        assert (await weights["a"].to_host()).tobytes() == expected.tobytes()


async def test_it_is_a_mapping_that_can_be_released(device: ta.Device, tmp_path: Path) -> None:
    weights = await ta.weights.load(device, written(tmp_path, encoded({"a": noise((4,), "int32")})))
    assert {**weights} == {"a": weights["a"]}
    assert repr(weights) == "<LoadedArrays: 1 arrays, 16 bytes>"
    weights.release()
    with pytest.raises(ta.StaleRefError):
        await weights["a"].to_host()
    with pytest.raises(TypeError, match="open Device"):
        await ta.weights.load("cpu", "x")  # type: ignore[arg-type]
