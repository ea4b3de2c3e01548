"""Checkpoints that are damaged, hostile, or from another training in the same folder."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_trainer import config, raises_inside
from train_models import CallMlp, batches

import trio_accel as ta
from trio_accel import train
from trio_accel.train import _checkpoints
from trio_accel.train._layout import FlatLayout

INLINE = ta.DeviceOptions(isolation="inline")
SHARD = train.Parallel(shard_optimizer=True)


class TurnedMlp(CallMlp):
    """The same network, with parameters named in another order."""

    def initial(self, rng: np.random.Generator) -> Any:
        return dict(reversed(super().initial(rng).items()))


def trained(
    until: int,
    folder: Path | None = None,
    *,
    load: Any = "latest",
    every: int = 2,
    keep: int = 9,
    **changes: Any,
) -> list[float]:
    """Train on two ranks in this process, and return the losses."""
    module = changes.pop("module", CallMlp)
    saved = None if folder is None else train.Checkpoint(folder, every=every, keep=keep, load=load)

    async def main() -> list[float]:
        chosen = config(**{"parallel": SHARD, "checkpoint": saved} | changes)
        async with (
            ta.open_system("training") as system,
            system.open_devices(["cpu"] * 2, options=INLINE) as devices,
            train.open_trainer(devices, module, chosen, width=3) as trainer,
        ):
            return [step.loss async for step in trainer.steps(batches(8), until=until)]

    return trio.run(main)


UNDISTURBED: list[float] = []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("base")
    trained(4, folder)
    UNDISTURBED[:] = trained(6)
    return folder


def goes_on_or_is_refused(folder: Path) -> bool:
    """Train from the checkpoint of step 4; whether it was refused."""
    refused: list[BaseException] = []
    try:
        assert trained(6, folder, load=folder / "step-00000004", every=None) == UNDISTURBED[4:]
    except* train.CheckpointError as group:
        refused.append(group)
    return bool(refused)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def replaced(values: Any, path: tuple[Any, ...], by: Any) -> None:
    """Replace or remove (...) the value at a path."""
    *outer, key = path
    for one in outer:
        values = values[one]
    if by is ...:
        del values[key]
    else:
        values[key] = copy.deepcopy(by)


def signed(values: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the checksum that belongs to it."""
    values = {name: value for name, value in values.items() if name != "checksum"}
    return {**values, "checksum": zlib.crc32(json.dumps(values, sort_keys=True).encode())}


NAMES = ["../../x", "/etc/passwd", "../step-00000002/model-000.safetensors", "", ".", "a\0b", "\ud800"]
NUMBERS = [10**9, 10**400, -(10**9), 1 << 63, math.nan, math.inf, -1.0, 0.0, 0.5, 2.0, 1e308]
NESTED = [[], {}, [NAMES[0]], {NAMES[1]: [1, 1]}, [[[-1]]], [[1e9]], [["w1", "w1"], [[1], [1]]]]
JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from(NUMBERS),
    st.sampled_from(NAMES),
    st.sampled_from(NESTED),
)


@settings(max_examples=25)
@given(st.data())
def test_any_change_of_the_manifest_is_refused_or_makes_no_difference(
    base: Path, data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        shutil.copytree(base, folder)
        path = folder / "step-00000004" / "training.json"
        values = json.loads(path.read_text())
        replaced(values, data.draw(st.sampled_from([*places(values)])), data.draw(st.just(...) | JSON))
        path.write_text(json.dumps(values))
        goes_on_or_is_refused(folder)


@settings(max_examples=150)
@given(st.data())
def test_a_manifest_with_a_right_checksum_is_read_or_refused(base: Path, data: st.DataObject) -> None:
    """Anyone who can write files can also write checksums: no other error, and no long wait."""
    layouts = [{"parameters": _LAYOUT, "buffers": FlatLayout([], [])}]
    identity = _checkpoints.Identity("adamw", train.adamw().states)

    async def read(folder: Path) -> None:
        chosen = train.Checkpoint(folder, load=folder / "step-00000004")
        began = time.process_time()
        with suppress(train.CheckpointError):
            await _checkpoints.load(chosen, identity, layouts)
        assert time.process_time() - began < 1.0

    with TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        shutil.copytree(base, folder)
        path = folder / "step-00000004" / "training.json"
        values = json.loads(path.read_text())
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.sampled_from([*places(values)]))
            replaced(values, place, data.draw(st.just(...) | JSON))
        path.write_text(json.dumps(signed(values)))
        trio.run(read, folder)


_LAYOUT = FlatLayout(["w1", "b1", "w2", "b2"], [(64, 3), (3,), (3, 10), (10,)])


PARTS = [f"optimizer-000-00{part}.safetensors" for part in range(2)]
FILES = [*PARTS, "model-000.safetensors", "training.json"]
# Bytes that a file has instead of its own.
CONTENTS: dict[str, Callable[[bytes, float], bytes]] = {
    "cut": lambda data, at: data[: int(at * len(data))],
    "longer": lambda data, at: data + b"\0",
    "flipped": lambda data, at: (
        data[: (place := int(at * len(data)))] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
    ),
}
# The object in its place.
INSTEAD: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "circle": lambda path: path.symlink_to(path),
    "earlier": lambda path: shutil.copy(path.parent.with_name("step-00000002") / path.name, path),
}
MOVED = ["renamed", "link", "swapped"]


def damaged(path: Path, how: str, other: Path, at: float) -> None:
    """Damage a file of a checkpoint."""
    data, elsewhere = path.read_bytes(), path.parent.with_name("elsewhere")
    if how in CONTENTS:
        path.write_bytes(CONTENTS[how](data, at))
    elif how in INSTEAD:
        path.unlink()
        INSTEAD[how](path)
    elif how == "swapped":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        path.rename(elsewhere)
        if how == "link":
            path.symlink_to(elsewhere)


@settings(max_examples=40)
@given(
    st.sampled_from([*CONTENTS, *INSTEAD, *MOVED]),
    st.sampled_from(FILES),
    st.sampled_from(FILES),
    st.floats(0, 1, exclude_max=True),
)
@example("swapped", "optimizer-000-000.safetensors", "optimizer-000-001.safetensors", 0.0)
@example("flipped", "model-000.safetensors", "training.json", 0.99)
def test_any_damage_of_a_file_is_refused_or_makes_no_difference(
    base: Path, how: str, file: str, other: str, at: float
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        shutil.copytree(base, folder)
        newest = folder / "step-00000004"
        damaged(newest / file, how, newest / other, at)
        is_refused = goes_on_or_is_refused(folder)
        assert is_refused or how in ("link", "earlier", "longer") or file == other


HOSTILE = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe{}",
    b"{" * 100_000,
    b"[" * (4 << 20),
    b"1" * (4 << 20),
    b"[" + b"[]," * (1 << 20) + b"1]",
    b" " * (64 << 20),
    b'{"checksum": NaN}',
    b'{"checksum": 1e999}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_refused_within_a_second(base: Path, tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    (folder / "step-00000004" / "training.json").write_bytes(text)
    began = time.process_time()
    with raises_inside(train.CheckpointError, r"step-00000004 is damaged: training.json "):
        trained(6, folder, load=folder / "step-00000004")
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("how", ["removed", "cut", "flipped", "folder"])
@pytest.mark.parametrize("file", ["optimizer-000-001.safetensors", "training.json"])
def test_the_checkpoint_before_a_damaged_one(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, file: str
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    newest = folder / "step-00000004" / file
    damaged(newest, how, newest, 0.5)
    # One checkpoint stays, and this training has written it.
    assert trained(3, folder, every=3, keep=1) == UNDISTURBED[2:3]
    [told] = [one for one in caplog.records if "is damaged and left out" in one.message]
    assert f"step-00000004 is damaged and left out: {file} " in told.message
    # A program without a logging configuration prints it.
    assert getattr(told, "is_untold", False)
    assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000004"]
    assert trained(6, folder, keep=1) == UNDISTURBED[3:]
    assert os.listdir(folder) == ["step-00000006"]


def test_no_checkpoint_is_complete(base: Path, tmp_path: Path) -> None:
    """A training does not begin again if there was one before."""
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    for name in ("step-00000002", "step-00000004"):
        (folder / name / "model-000.safetensors").unlink()
    with raises_inside(train.CheckpointError, r"all checkpoints in .* are damaged; .*model-000.* is missing"):
        trained(6, folder)
    assert trained(6, folder, load=None) == UNDISTURBED


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    text = r"nosuch does not exist: load must be 'latest', None or the path of a checkpoint"
    with raises_inside(train.CheckpointError, text):
        trained(6, tmp_path, load="nosuch")


@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("load", [None, "step-00000002"])
def test_a_new_training_with_later_checkpoints(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int, load: str | None
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    shutil.copytree(folder / "step-00000004", folder / "step-00000044")
    other: dict[str, Any] = {"optimizer": train.adamw(1e-3)}
    found = trained(3, folder, load=load and folder / load, every=1, keep=keep, **other)
    [told] = [one for one in caplog.records if "none of them is loaded" in one.message]
    assert "step-00000004, step-00000044; none of them is loaded" in told.message
    assert getattr(told, "is_untold", False)
    names = sorted(os.listdir(folder))
    assert names[-2:] == ["step-00000004", "step-00000044"]
    assert names[-3] == "step-00000003"
    # The newest one was written last.
    begun = found + trained(5, folder, every=1, keep=keep, **other)
    first = [] if load is None else UNDISTURBED[:2]
    assert len(first + begun) == 5
    assert first + begun != UNDISTURBED[:5]
    if load is None:
        assert begun == trained(5, **other)
    assert "step-00000005" in os.listdir(folder)


def test_checkpoints_of_another_training_are_removed_before_its_own(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    shutil.move(folder / "step-00000004", folder / "step-00000005")
    other: dict[str, Any] = {"load": None, "optimizer": train.adamw(1e-3), "every": 2}
    trained(4, folder, keep=2, **other)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000004", "step-00000005"]
    trained(6, folder, keep=2, **{**other, "load": "latest"})
    assert sorted(os.listdir(folder)) == ["step-00000004", "step-00000006"]


def test_damaged_checkpoints_are_removed_first(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    shutil.copytree(folder / "step-00000004", folder / "step-00000005")
    (folder / "step-00000005" / "training.json").unlink()
    assert trained(6, folder, keep=2) == UNDISTURBED[4:]
    assert sorted(os.listdir(folder)) == ["step-00000004", "step-00000006"]


def test_parameters_in_another_order_keep_the_optimizers_state(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "runs")
    found = trained(6, tmp_path / "runs", module=TurnedMlp)
    np.testing.assert_allclose(found, UNDISTURBED[4:], rtol=1e-12)


@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
def test_an_optimizer_that_keeps_other_arrays(tmp_path: Path, momenta: tuple[float, float]) -> None:
    trained(2, tmp_path, optimizer=train.sgd(0.1, momentum=momenta[0]))
    with raises_inside(train.CheckpointError, r"its optimizer keeps .*, and this one "):
        trained(4, tmp_path, optimizer=train.sgd(0.1, momentum=momenta[1]))
