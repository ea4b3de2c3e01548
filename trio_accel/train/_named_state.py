"""Named host arrays to the flat state of a training, and back for export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import NotSupportedError
from ._config import AVERAGE, Config
from ._layout import FlatLayout
from ._optimizers import SHAPED
from ._replicas import Replicas, States

__all__: list[str] = []

HostArrays: TypeAlias = "dict[str, np.ndarray]"


def flattened(
    config: Config, named: Mapping[str, Mapping[str, Any]], ranks: int
) -> tuple[dict[str, FlatLayout], HostArrays]:
    """Return the layouts of named arrays in flat ones, and the initial state as flat arrays.

    Args:
        config: The configuration.
        named: Parameters, buffers and shaped states of an optimizer by their kind, and then by name.
        ranks: The number of ranks that share the optimizer's arrays.

    Raises:
        ValueError: A buffer has integers that the state does not hold.
    """
    layouts = {
        kind: FlatLayout([*arrays], [*map(np.shape, arrays.values())], ranks if kind == "parameters" else 1)
        for kind, arrays in named.items()
    }
    master = config.precision.master
    first = layouts["parameters"].flattened(named["parameters"], master)
    flat = {"parameters": first, **{name: np.zeros_like(first) for name in config.states}}
    if SHAPED in flat:
        flat[SHAPED] = layouts[SHAPED].flattened(named[SHAPED], master)
    if named["buffers"]:
        flat["buffers"] = layouts["buffers"].flattened(named["buffers"], "float64")
        for name, view in layouts["buffers"].views(flat["buffers"]).items():
            array = named["buffers"][name]
            if array.dtype.kind in "iu" and (view.astype(array.dtype) != array).any():
                raise ValueError(
                    f"buffer {name!r} has integers beyond 2**53, which the float64 state does not hold"
                )
    return layouts, flat


async def parameters_of(replicas: Replicas[Any], states: States, name: str) -> HostArrays:
    """Return trained parameters by name; if ranks share layers, each value is a list of parts in rank order.

    Args:
        replicas: The ranks.
        states: The committed state of each rank.
        name: ``"parameters"`` or ``"average"``.

    Raises:
        ValueError: Two stages have a parameter of the same name.
    """
    return _joined(replicas, await _cells(replicas, states, name))


async def state_dict_of(replicas: Replicas[Any], states: States, name: str, master: str) -> HostArrays:
    """Return the entries of the model's `state_dict`; see `parameters_of`.

    Args:
        replicas: The ranks.
        states: The committed state of each rank.
        name: ``"parameters"`` or ``"average"``.
        master: The dtype of the trained parameters, which floating buffers have at least.

    Raises:
        ValueError: See `parameters_of`.
        NotSupportedError: An entry is neither a parameter nor a buffer.
    """
    trained, buffers = await _cells(replicas, states, name), await _cells(replicas, states, "buffers")
    cells: dict[int, dict[str, Any]] = {}
    for mesh in replicas.meshes:
        if mesh.data_rank:
            continue
        entries = replicas.entries[mesh.cell]
        has_frozen = any(kind == "frozen" for kind, _, _ in entries.values())
        sources: dict[str, Mapping[str, Any]] = {
            "parameters": {**replicas.frozen[mesh.cell], **trained[mesh.cell]},
            "buffers": buffers.get(mesh.cell, {}),
            "frozen": await replicas.model_frozen(mesh) if has_frozen else {},
        }
        cells[mesh.cell] = {}
        for key, (kind, source, dtype) in entries.items():
            if kind not in sources:
                raise NotSupportedError(
                    f"state_dict: the training does not keep {key!r}, because it is neither a parameter "
                    "nor a buffer"
                )
            array = sources[kind][source]
            cells[mesh.cell][key] = _as_buffer(array, dtype, master) if kind == "buffers" else _wide(array)
    return _joined(replicas, cells)


async def _cells(replicas: Replicas[Any], states: States, name: str) -> dict[int, HostArrays]:
    """Return a part of the committed state for each part of the model, as host arrays by name."""
    kind = "buffers" if name == "buffers" else "parameters"
    flats: dict[int, list[Any]] = {}
    for mesh, state in zip(replicas.meshes, states, strict=True):
        if name in state and (mesh.data_rank == 0 or (replicas.is_apart and name == AVERAGE)):
            flats.setdefault(mesh.cell, []).append(await state[name].to_host())
    return {
        mesh.cell: layouts[kind].views(np.concatenate(flats[mesh.cell]))
        for mesh, layouts in zip(replicas.meshes, replicas.layouts, strict=True)
        if mesh.data_rank == 0 and mesh.cell in flats
    }


def _joined(replicas: Replicas[Any], cells: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    parts: dict[str, list[Any]] = {}
    stages: dict[str, int] = {}
    for mesh in replicas.meshes:
        for name, array in cells[mesh.cell].items() if mesh.data_rank == 0 else ():
            if stages.setdefault(name, mesh.stage) != mesh.stage:
                raise ValueError(
                    f"stages {stages[name]} and {mesh.stage} both have {name!r}: name the layers of each "
                    "stage differently in configure(), such as by their number in the whole model"
                )
            parts.setdefault(name, []).append(array)
    has_parts = replicas.meshes[0].tensor > 1
    return {name: arrays if has_parts else arrays[0] for name, arrays in parts.items()}


def _as_buffer(array: Any, dtype: str, master: str) -> Any:
    """Return a buffer of its own dtype from the float64 numbers of the state."""
    if dtype.startswith("complex"):
        return np.ascontiguousarray(array).view(np.complex128)[..., 0].astype(dtype)
    return array.astype("float64" if dtype == "float32" and master == "float64" else dtype)


def _wide(array: Any) -> Any:
    """Return narrow numbers as float32, because PyTorch does not take bfloat16 of the host."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
