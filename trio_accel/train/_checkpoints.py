"""Checkpoints: folders that are whole or not there, read by any number of ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .. import weights
from ..devices import AccelRef, Device
from ._layout import Layout

__all__ = ["CheckpointError"]

_logger = logging.getLogger("trio_accel.train")

_STEP = re.compile(r"step-(\d{8,})")
_ABOUT = "training.json"
_FILES = {"parameters": "model-{:03}.safetensors", "buffers": "buffers-{:03}.safetensors"}
_OPTIMIZER = "optimizer-{:03}-{:03}.safetensors"

Layouts: TypeAlias = "Mapping[str, Layout]"
State: TypeAlias = "Mapping[str, AccelRef]"


class CheckpointError(Exception):
    """A checkpoint is not whole, or that of another model or optimizer."""


@attrs.frozen
class Progress:
    """State of a training that is no array.

    Attributes:
        step: Steps that are committed.
        batches: Batches that the steps have used.
        scale: Factor of the loss.
        good: Steps since it was changed.
    """

    step: int = 0
    batches: int = 0
    scale: float = 1.0
    good: int = 0


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder; blocks."""
    found = [path for path in _steps(folder) if (path / _ABOUT).is_file()]
    for path in _steps(folder):
        if path not in found:
            _logger.warning("checkpoint %s is not whole and is left out", path)
    return found[-1] if found else None


def _steps(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, the oldest first."""
    paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def name_of(progress: Progress) -> str:
    """Name the folder of a checkpoint."""
    return f"step-{progress.step:08}"


async def write(
    target: Path,
    keep: int,
    progress: Progress,
    optimizer: str,
    cells: Sequence[tuple[Layouts, Sequence[State]]],
) -> None:
    """Write a checkpoint, and remove those that are too many.

    Args:
        target: Where it is to be; its name is that of `name_of`.
        keep: How many stay.
        progress: State that is no array.
        optimizer: Its kind.
        cells: For each part of the model its layouts, and what ranks give: the first one the parameters and
            buffers, and all of them their part of the optimizer's arrays. Ranks that have the same give once.
    """
    made = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    await trio.to_thread.run_sync(partial(made.mkdir, parents=True))
    try:
        for cell, (layouts, states) in enumerate(cells):
            for name, file in _FILES.items():
                if name in states[0]:
                    await weights.save(made / file.format(cell), layouts[name].views(states[0][name]))
            for number, state in enumerate(states):
                kept = {name: array for name, array in state.items() if name not in layouts}
                if kept:
                    await weights.save(made / _OPTIMIZER.format(cell, number), kept)
        about = {
            **attrs.asdict(progress),
            "optimizer": optimizer,
            "cells": [
                {"parts": len(states), **{name: [one.names, one.shapes] for name, one in layouts.items()}}
                for layouts, states in cells
            ],
        }
        await trio.to_thread.run_sync(_finish, made, target, about, keep)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(partial(shutil.rmtree, made, ignore_errors=True))


def _finish(made: Path, target: Path, about: Mapping[str, Any], keep: int) -> None:
    """Name a checkpoint when all of it is on the disk."""
    with (made / _ABOUT).open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside = made.with_name(f"{made.name}-old")
    if target.exists():
        target.rename(aside)
    made.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    for path in _steps(target.parent)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


async def read(
    path: Path, device: Device, optimizer: str, cells: Sequence[Layouts]
) -> tuple[Progress, list[dict[str, npt.NDArray[Any]]]]:
    """Read a checkpoint, whatever the number of ranks was that wrote it.

    Returns:
        The state that is no array, and of each part of the model flat arrays without the zeros at the end.

    Raises:
        CheckpointError: It is not whole, or that of another model or optimizer.
    """
    about = await trio.to_thread.run_sync(_about, path)
    if about["optimizer"] != optimizer or len(about["cells"]) != len(cells):
        told = f"{about['optimizer']} with {len(about['cells'])} parts of the model"
        raise CheckpointError(f"checkpoint {path} is of {told}, and this is {optimizer} with {len(cells)}")
    states: list[dict[str, npt.NDArray[Any]]] = []
    for cell, (layouts, saved) in enumerate(zip(cells, about["cells"], strict=True)):
        state: dict[str, npt.NDArray[Any]] = {}
        for name, layout in layouts.items():
            names, shapes = saved[name]
            if difference := layout.difference(dict(zip(names, shapes, strict=True))):
                raise CheckpointError(f"checkpoint {path} is of another model: {name}: {difference}")
            if names:
                arrays = await _arrays(device, path / _FILES[name].format(cell))
                state[name] = layout.flattened(arrays, next(iter(arrays.values())).dtype.name)[: layout.size]
        parts: dict[str, list[npt.NDArray[Any]]] = {}
        for number in range(saved["parts"]):
            file = path / _OPTIMIZER.format(cell, number)
            for name, array in (await _arrays(device, file) if file.exists() else {}).items():
                parts.setdefault(name, []).append(array)
        size = layouts["parameters"].size
        states.append(state | {name: np.concatenate(arrays)[:size] for name, arrays in parts.items()})
    return Progress(*[about[field.name] for field in attrs.fields(Progress)]), states


async def _arrays(device: Device, path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        loaded = await weights.load(device, path)
    except (weights.WeightsError, OSError) as error:
        raise CheckpointError(f"a file of the checkpoint cannot be read: {error}") from error
    arrays = {name: await array.to_host() for name, array in loaded.items()}
    for array in loaded.values():
        array.release()
    return arrays


def _about(path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {_ABOUT}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path / _ABOUT} cannot be read: {error}") from error
    return about
