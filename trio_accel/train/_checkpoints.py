"""Checkpoints: complete folders of files, readable by any number of ranks (D206).

A checkpoint is a folder ``step-00000500`` with safetensors files and `training.json`, the manifest. The
manifest lists every other file with its size and CRC-32, and has a CRC-32 of itself. So a reader detects a
missing, cut, swapped or changed file before any of it becomes a state. The manifest itself is also validated,
because a checksum does not prove its origin.

A damaged checkpoint and a checkpoint of another model are different errors. `load` looks for a replacement of
the first one. It refuses the second one, because the user has mixed up folders or models.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .. import weights
from ..actors import fits, is_number, must_be_whole, named_options, validator, warn_untold
from ..backends.base import NotSupportedError
from ..devices import AccelRef
from ._config import LARGEST_SCALE, LEAST_SCALE, Checkpoint
from ._layout import FlatLayout
from ._optimizers import SHAPED

__all__ = ["CheckpointError"]


_STEP = re.compile(r"step-([0-9]{8,})")
_MANIFEST = "training.json"
_FILES = {
    "parameters": "model-{:03}.safetensors",
    "buffers": "buffers-{:03}.safetensors",
    SHAPED: "optimizer-{:03}.safetensors",
}
_OPTIMIZER = "optimizer-{:03}-{:03}.safetensors"
# The parser holds the loop for less than half a second with this; the names of 80 000 parameters fit.
_MAX_MANIFEST_BYTES = 4 << 20
_PIECE_BYTES = 4 << 20

Layouts: TypeAlias = "Mapping[str, FlatLayout]"
State: TypeAlias = "Mapping[str, AccelRef]"
HostState: TypeAlias = "dict[str, npt.NDArray[Any]]"


class CheckpointError(Exception):
    """A checkpoint is damaged, or belongs to another model or optimizer."""


class _DamageError(ValueError):
    """A problem with the files of one checkpoint."""


# Such a number fits into 64 bits.
_count = [must_be_whole(0), validator("be below 2**63", lambda value: value < 1 << 63)]


@attrs.frozen
class TrainingProgress:
    """The numbers in the state of a training.

    Attributes:
        step: The number of committed steps.
        batches: The number of batches that the steps have used.
        scale: The factor of the loss.
        good: The number of steps since the scale changed.
        best: The best value of the metric `Checkpoint.best`; None before the first one.
        best_step: The step with the best value.
    """

    step: int = 0
    batches: int = 0
    scale: float = 1.0
    good: int = 0
    best: float | None = None
    best_step: int = 0


@attrs.frozen
class Identity:
    """Properties that a checkpoint and a training must share, in addition to the shapes.

    Attributes:
        optimizer: The kind of the optimizer.
        states: The names of the arrays next to parameters and buffers.
        base: The checksum of the frozen parameters; 0 without any.
    """

    optimizer: str
    states: Sequence[str]
    base: int = 0


def _layout(saved: Any) -> FlatLayout:
    if isinstance(saved, FlatLayout):
        return saved
    names, shapes = saved
    if not (fits(list[str], names) and fits(list[list[int]], shapes)):
        raise TypeError("parameters and buffers must be lists of names and shapes")
    if len(set(names)) != len(names) or len(names) != len(shapes) or min(sum(shapes, [0])) < 0:
        raise ValueError("each parameter and buffer must keep its shape")
    return FlatLayout(names, shapes)


@named_options
@attrs.frozen(kw_only=True)
class _SavedCell:
    """One part of the model in a manifest.

    Attributes:
        parts: Ranks that shared the optimizer's arrays, each with a file.
        parameters: Names and shapes, in the order of the optimizer's flat arrays.
        buffers: Names and shapes.
        optimizer: Names and shapes of an optimizer's arrays, where these depend on the shapes of parameters.
    """

    parts: int = attrs.field(validator=must_be_whole(1))
    parameters: FlatLayout = attrs.field(converter=_layout)
    buffers: FlatLayout = attrs.field(converter=_layout)
    optimizer: FlatLayout = attrs.field(default=FlatLayout([], []), converter=_layout)


def _cells(saved: Any) -> list[_SavedCell]:
    return [_SavedCell(**cell) for cell in saved]


@named_options
@attrs.frozen(kw_only=True)
class _Manifest:
    """The content of `training.json`, without its checksum.

    Attributes:
        step: See `TrainingProgress`, also for `batches`, `scale`, `good`, `best` and `best_step`.
        saved: Nanoseconds since 1970, when it was saved. The newest checkpoint of a folder was saved last,
            whatever its step is: a training may have begun again.
        optimizer: See `Identity`, also for `states` and `base`.
        cells: The parts of the model.
        files: The size and the CRC-32 of each file.
    """

    step: int = attrs.field(validator=_count)
    batches: int = attrs.field(validator=_count)
    scale: float = attrs.field(
        validator=validator("be a scale", lambda value: is_number(value, LEAST_SCALE, LARGEST_SCALE))
    )
    good: int = attrs.field(validator=_count)
    saved: int = attrs.field(validator=_count)
    optimizer: str
    states: list[str]
    cells: list[_SavedCell] = attrs.field(converter=_cells)
    files: dict[str, list[int]]
    base: int = attrs.field(default=0, validator=_count)
    best: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            validator("be a number", lambda value: is_number(value, -sys.float_info.max, sys.float_info.max))
        ),
    )
    best_step: int = attrs.field(default=0, validator=_count)

    @property
    def progress(self) -> TrainingProgress:
        """The numbers of the training."""
        return TrainingProgress(self.step, self.batches, self.scale, self.good, self.best, self.best_step)

    @property
    def flat_states(self) -> list[str]:
        """The states with the shape of the flat parameters."""
        return [name for name in self.states if name != SHAPED]

    def check_files(self) -> None:
        """Require the entries of all files that there must be, and no other.

        Raises:
            _DamageError: One is missing or unknown.
        """
        flat = self.flat_states
        parts = sum(cell.parts for cell in self.cells) if flat else 0
        _require(parts <= len(self.files), f"{_MANIFEST} lists fewer files than the {parts} parts")
        expected: set[str] = set()
        for number, cell in enumerate(self.cells):
            expected |= {_FILES["parameters"].format(number)}
            for name in ("buffers", SHAPED):
                expected |= {_FILES[name].format(number)} if getattr(cell, name).names else set()
            expected |= {_OPTIMIZER.format(number, part) for part in range(cell.parts) if flat}
        different = sorted(expected ^ self.files.keys())
        _require(not different, f"{_MANIFEST} has a wrong list of files: {different[:1]}")


def _steps(folder: Path) -> dict[Path, int]:
    """Return the checkpoints of a folder with their steps, in that order."""
    matches = [(path, _STEP.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
    steps = {path: int(match[1]) for path, match in matches if match}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def name_of(progress: TrainingProgress) -> str:
    """Name the folder of a checkpoint."""
    return f"step-{progress.step:08}"


async def write(
    target: Path,
    keep: int,
    progress: TrainingProgress,
    identity: Identity,
    cells: Sequence[tuple[Layouts, Sequence[State]]],
) -> None:
    """Write a checkpoint, and remove the oldest ones until `keep` remain.

    Args:
        target: The path of the checkpoint, with a name by `name_of`.
        keep: The number of checkpoints to keep, up to this step.
        progress: The step and the other numbers of the training.
        identity: The properties that a training must have to load it.
        cells: For each part of the model, its layouts and the states of ranks. The first state has parameters
            and buffers, and each has its part of the optimizer's arrays. Ranks with equal states share an
            entry.
    """
    staging = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    await trio.to_thread.run_sync(partial(staging.mkdir, parents=True))
    files: dict[str, list[int]] = {}

    async def put(file: str, arrays: Mapping[str, AccelRef]) -> None:
        await weights.save(staging / file, arrays)
        files[file] = await trio.to_thread.run_sync(_size_and_checksum, staging / file)

    try:
        for cell, (layouts, states) in enumerate(cells):
            for name, file in _FILES.items():
                if name in states[0]:
                    await put(file.format(cell), layouts[name].views(states[0][name]))
            for number, state in enumerate(states):
                optimizer_arrays = {name: array for name, array in state.items() if name not in layouts}
                if optimizer_arrays:
                    await put(_OPTIMIZER.format(cell, number), optimizer_arrays)
        manifest = _manifest_of(progress, identity, cells, files)
        await trio.to_thread.run_sync(_finish, staging, target, manifest, keep)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(partial(shutil.rmtree, staging, ignore_errors=True))


def _manifest_of(
    progress: TrainingProgress,
    identity: Identity,
    cells: Sequence[tuple[Layouts, Sequence[State]]],
    files: object,
) -> dict[str, Any]:
    return {
        **attrs.asdict(progress),
        **attrs.asdict(identity),
        "saved": time.time_ns(),
        "cells": [
            {
                "parts": len(states),
                **{name: [layout.names, layout.shapes] for name, layout in layouts.items()},
            }
            for layouts, states in cells
        ],
        "files": files,
    }


def _finish(staging: Path, target: Path, manifest: Mapping[str, Any], keep: int) -> None:
    """Rename a checkpoint to its final name when all its files are on disk."""
    text = json.dumps({**manifest, "checksum": _checksum(manifest)})
    if len(text) > _MAX_MANIFEST_BYTES:
        raise ValueError(
            f"a checkpoint can have the names and shapes of as many parameters as fit into "
            f"{_MAX_MANIFEST_BYTES} bytes, and these take {len(text)}"
        )
    with (staging / _MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(staging)
    aside = staging.with_name(f"{staging.name}-old")
    if target.exists():
        target.rename(aside)
    staging.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
    _sync(target.parent)
    # Later ones belong to another training, or to a future that this one has left. Among the others, damaged
    # ones are removed first, then the ones saved first, because they may belong to another training.
    steps, damaged = _steps(target.parent), dict[Path, str]()
    manifests = _read_manifests(target.parent, damaged)
    for path in [path for path in (*damaged, *manifests) if steps[path] <= manifest["step"]][:-keep]:
        if path in damaged or steps[path] != manifest["best_step"]:
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


async def load(
    checkpoint: Checkpoint, identity: Identity, cells: Sequence[Layouts]
) -> tuple[TrainingProgress, list[HostState]] | None:
    """Read the checkpoint that a training begins with, whatever number of ranks wrote it.

    Damaged checkpoints are left out with a warning, if ``"latest"`` is wanted and another one is complete.

    Returns:
        The progress, and for each part of the model its flat arrays without the padding; None if the training
        starts from the beginning.

    Raises:
        CheckpointError: The wanted checkpoint is missing, damaged, or belongs to another model or optimizer.
    """
    folder = Path(checkpoint.folder)
    damaged: dict[Path, str] = {}
    result: tuple[TrainingProgress, list[HostState]] | None = None
    if checkpoint.load == "latest":
        result = await _load_newest(folder, identity, cells, damaged)
    elif checkpoint.load is not None:
        path = Path(checkpoint.load)
        if not await trio.Path(path).exists():
            raise CheckpointError(
                f"{path} does not exist: load must be 'latest', None or the path of a checkpoint"
            )
        try:
            result = await _read(path, await trio.to_thread.run_sync(_read_manifest, path), identity, cells)
        except _DamageError as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    step = result[0].step if result is not None else 0
    there = await trio.to_thread.run_sync(_steps, folder)
    if later := [path.name for path in there if there[path] > step and path not in damaged]:
        warn_untold(
            "trio_accel.train",
            "%s has checkpoints of later steps than %d, where this training begins: %s; none of them is "
            "loaded, and each stays until this training comes to its step",
            folder,
            step,
            ", ".join(later),
        )
    return result


async def _load_newest(
    folder: Path, identity: Identity, cells: Sequence[Layouts], damaged: dict[Path, str]
) -> tuple[TrainingProgress, list[HostState]] | None:
    """Read the newest complete checkpoint; map each damaged one to its reason in `damaged`."""
    result: tuple[TrainingProgress, list[HostState]] | None = None
    manifests = await trio.to_thread.run_sync(_read_manifests, folder, damaged)
    for path in reversed(manifests):
        try:
            result = await _read(path, manifests[path], identity, cells)
            break
        except _DamageError as error:
            damaged[path] = str(error)
    for path, reason in damaged.items():
        warn_untold("trio_accel.train", "checkpoint %s is damaged and left out: %s", path, reason)
    if damaged and result is None:
        path, reason = [*damaged.items()][-1]
        raise CheckpointError(f"all checkpoints in {folder} are damaged; {path.name}: {reason}")
    return result


def _read_manifests(folder: Path, damaged: dict[Path, str]) -> dict[Path, _Manifest]:
    """Read the manifests of a folder, in the order in which the checkpoints were saved."""
    manifests: dict[Path, _Manifest] = {}
    for path in _steps(folder):
        try:
            manifests[path] = _read_manifest(path)
        except _DamageError as error:
            damaged[path] = str(error)
    return dict(sorted(manifests.items(), key=lambda item: item[1].saved))


def _read_manifest(path: Path) -> _Manifest:
    """Read and check `training.json`.

    Raises:
        _DamageError: It is missing or wrong.
    """
    with _damage_of(_MANIFEST):
        with _open_regular(path / _MANIFEST) as file:
            text = file.read(_MAX_MANIFEST_BYTES + 1)
        _require(len(text) <= _MAX_MANIFEST_BYTES, f"{_MANIFEST} has more than {_MAX_MANIFEST_BYTES} bytes")
        values: dict[str, Any] = json.loads(text)
        has_checksum = type(values) is dict and "checksum" in values
        _require(has_checksum, f"{_MANIFEST} has no checksum; checkpoints of earlier versions had none")
        is_same = values.pop("checksum") == _checksum(values)
        _require(is_same, f"{_MANIFEST} was changed: its checksum is another")
        manifest = _Manifest(**values)
        manifest.check_files()
    return manifest


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise _DamageError(problem)


@contextmanager
def _damage_of(name: str) -> Generator[None, None, None]:
    """Turn the errors of a file's content into damage of the checkpoint."""
    try:
        yield
    except _DamageError:
        raise
    except FileNotFoundError:
        raise _DamageError(f"{name} is missing") from None
    except UnicodeDecodeError as error:
        # Python's text has a byte of the file, which may be a link to a secret.
        raise _DamageError(f"{name} is not UTF-8 at byte {error.start}") from None
    except (OSError, ValueError, TypeError, RecursionError, NotSupportedError) as error:
        raise _DamageError(f"{name} cannot be read: {error!s:.200}") from error


def _open_regular(path: Path) -> IO[bytes]:
    # Without the flag, opening a pipe waits for its writer.
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _DamageError(f"{path.name} is not a regular file")
    return file


def _size_and_checksum(path: Path) -> list[int]:
    size = checksum = 0
    with _open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


async def _read(
    path: Path, manifest: _Manifest, identity: Identity, cells: Sequence[Layouts]
) -> tuple[TrainingProgress, list[HostState]]:
    """Read the arrays of a checkpoint.

    Raises:
        CheckpointError: It belongs to another model or optimizer.
        _DamageError: A file is missing or changed.
    """
    descriptions = [
        f"{kind} with {len(parts)} parts of the model"
        for kind, parts in ((manifest.optimizer, manifest.cells), (identity.optimizer, cells))
    ]
    if descriptions[0] != descriptions[1]:
        raise CheckpointError(f"checkpoint {path} is of {descriptions[0]}, and this is {descriptions[1]}")
    if manifest.states != [*identity.states]:
        state_names = [", ".join(names) or "nothing" for names in (manifest.states, identity.states)]
        raise CheckpointError(
            f"checkpoint {path}: its optimizer keeps {state_names[0]}, and this one {state_names[1]}"
        )
    for layouts, saved in zip(cells, manifest.cells, strict=True):
        for name, layout in layouts.items():
            if difference := layout.difference_to(getattr(saved, name)):
                raise CheckpointError(f"checkpoint {path} is of another model: {name}: {difference}")
    if manifest.base != identity.base:
        raise CheckpointError(
            f"checkpoint {path} is of another model: parameters that are not trained differ"
        )
    states = [await _read_cell(path, manifest, number, layouts) for number, layouts in enumerate(cells)]
    return manifest.progress, states


async def _read_cell(path: Path, manifest: _Manifest, cell: int, layouts: Layouts) -> HostState:
    saved, state = manifest.cells[cell], dict[str, npt.NDArray[Any]]()
    for name, layout in layouts.items():
        if layout.names:
            shapes = {key: shape for key, _, shape in layout.entries()}
            arrays = await _arrays(path, manifest, _FILES[name].format(cell), shapes)
            state[name] = layout.flattened(arrays, next(iter(arrays.values())).dtype.name)[: layout.size]
    # The parameters may have been in another order.
    layout, saved_layout = layouts["parameters"], attrs.evolve(saved.parameters, ranks=saved.parts)
    part = dict.fromkeys(manifest.flat_states, (saved_layout.padded // saved.parts,))
    files = [_OPTIMIZER.format(cell, number) for number in range(saved.parts) if part]
    parts = [await _arrays(path, manifest, file, part) for file in files]
    for name in manifest.flat_states:
        flat = np.concatenate([arrays[name] for arrays in parts])
        state[name] = layout.flattened(saved_layout.views(flat), flat.dtype.name)[: layout.size]
    return state


async def _arrays(
    path: Path, manifest: _Manifest, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, npt.NDArray[Any]]:
    """Read a file that must have floating arrays of these names and shapes."""
    file = path / name
    with _damage_of(name):
        [size, checksum] = manifest.files[name]
        there = (await trio.to_thread.run_sync(os.stat, file)).st_size
        _require(there == size, f"{name} has {there} bytes, and {size} were written")
        # The header is short, and shows whether the rest is worth reading.
        tensors = (await weights.inspect(file)).tensors
        has_shapes = {key: tensor.shape for key, tensor in tensors.items()} == shapes
        is_floating = all(tensor.dtype.kind == "float" for tensor in tensors.values())
        _require(has_shapes and is_floating, f"{name} has other arrays than the model")
        data, now = await trio.to_thread.run_sync(_checked_bytes, file)
        _require((len(data), now) == (size, checksum), f"{name} was changed: its checksum is another")
    return {
        key: np.frombuffer(data, tensor.dtype.dtype, tensor.size, tensor.offset).reshape(tensor.shape)
        for key, tensor in tensors.items()
    }


def _checked_bytes(path: Path) -> tuple[bytes, int]:
    with _open_regular(path) as file:
        data = file.read()
    return data, zlib.crc32(data)
