"""Adapters (LoRA) of the model: their files, and their swap in a running service.

A swap puts a second set of weights on the device, and does not change the weights in use. So running
sequences end with the weights of their first step. A set is released when its last sequence has ended.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio
from errors import ApiError, shown
from generation import Generation
from llama import Config, weights_of
from model import Model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from text import InputError

import trio_accel as ta
from trio_accel import train

__all__ = ["Adapter", "Adapters", "admin_route", "open_adapters", "read_adapter"]

_logger = logging.getLogger("generate")
# The layer names of `examples/finetune` are the names of `weights_of` with this prefix.
_PREFIX = "layers."
_PARTS = (".lora_A.weight", ".lora_B.weight")
_LEADS_OUT = "it is a link that leads out of the folder of adapters"
OFF = "is off here: start the service with --admin-key FILE and --adapters FOLDER"
BUSY = ApiError("another swap is in progress: try again later", None, "swap_under_way", 409)
ENDING = ApiError("the service is shutting down, so it does not swap adapters", None, "ending", 503)
UNDER_FAULTS = ApiError("with --faults, all texts must have the initial weights", None, "faults", 409)
FULL = ApiError(
    "the device lacks memory for a second set of weights: try again when streams have ended",
    None,
    "out_of_memory",
    503,
)


@attrs.frozen(eq=False)
class Adapter:
    """An adapter of a model, in the memory of the host.

    Attributes:
        name: The name of its file.
        lora: Its rank and scale.
        arrays: The matrices A and B of each weight, by the names of `weights_of`.
    """

    name: str
    lora: train.Lora
    arrays: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]

    def added(self, name: str, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a weight plus the adapter's change, which may overflow to infinity."""
        if name not in self.arrays:
            return weight
        layer = f"{_PREFIX}{name}"
        parts = {layer + part: array for part, array in zip(_PARTS, self.arrays[name], strict=True)}
        with np.errstate(over="ignore", invalid="ignore"):
            [change] = self.lora.changes(parts).values()
            made: npt.NDArray[np.float32] = weight + change
        return made


async def read_adapter(
    device: ta.Device,
    path: Path,
    config: Config,
    weights: Mapping[str, npt.NDArray[np.float32]],
    folder: Path | None = None,
) -> Adapter:
    """Read an adapter from a file of `train.Lora.save`.

    Args:
        device: The device for reading its arrays.
        path: The file.
        config: The model that it must fit.
        weights: Its weights, by the names of `weights_of`.
        folder: The folder that must contain the file, even if `path` is a link; None for any.

    Raises:
        FileNotFoundError: The file does not exist.
        AdapterError: The file is outside of `folder`, damaged, not an adapter, or belongs to another model.
            The message does not name the folder, and has no bytes of a file in another format.
    """
    try:
        file = await trio.to_thread.run_sync(_open_file, path, folder)
        try:
            return await _read(device, file, path.name, weights_of(config), weights)
        except ta.weights.WeightsError:
            # Its reason may quote the first bytes of a secret.
            size = os.fstat(file).st_size
            what = f"{path.name} has {size} bytes, and is not a complete safetensors file"
            raise train.AdapterError(what) from None
        finally:
            os.close(file)
    except FileNotFoundError:
        raise
    except (train.AdapterError, ta.NotSupportedError, OSError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise train.AdapterError(f"the adapter {path.name} cannot be used: {said:.300}") from None


def _open_file(path: Path, folder: Path | None) -> int:
    """Return the descriptor of a file, which must be in a folder after all links are followed. Blocking."""
    root = None if folder is None else folder.resolve()
    # Look first, so that errors reveal nothing about files elsewhere.
    found = Path(os.path.realpath(path))
    if root is not None and not found.is_relative_to(root):
        raise train.AdapterError(_LEADS_OUT)
    # Follow no link that has replaced the file since, because opening a pipe or a terminal elsewhere has
    # effects there. Opening a pipe here must not wait for its writer.
    file = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    try:
        _check_file(file, path, root)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_file(file: int, path: Path, root: Path | None) -> None:
    # A folder may have become a link since, but the descriptor stays with its file.
    if root is not None and not _path_of(file, path).is_relative_to(root):
        raise train.AdapterError(_LEADS_OUT)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise train.AdapterError("it is not a regular file")


def _path_of(file: int, path: Path) -> Path:
    """Return the current path of an open file, without links."""
    link = f"/proc/self/fd/{file}"
    return Path(os.readlink(link)) if os.path.lexists(link) else path.resolve()


async def _read(
    device: ta.Device,
    file: int,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, npt.NDArray[np.float32]],
) -> Adapter:
    # The file may be untrusted, so inspect it before memory is allocated.
    path = f"/dev/fd/{file}"
    contents = await ta.weights.inspect(path)
    if contents.nbytes > sum(array.nbytes for array in weights.values()):
        raise train.AdapterError("it is larger than the model")
    lora, base = _settings(contents.metadata)
    pairs = _pairs({name: one.shape for name, one in contents.tensors.items()}, lora.rank, shapes)
    placed = await ta.weights.load(device, path, dtype="float32")
    found = {name: np.asarray(await array.to_host(), np.float32) for name, array in placed.items()}
    if contents != await ta.weights.inspect(path):
        raise train.AdapterError("the file changed while it was read")
    if not all(np.isfinite(array).all() for array in found.values()):
        raise train.AdapterError("it contains NaN or infinity")
    if base and not await trio.to_thread.run_sync(_is_base, base, weights):
        raise train.AdapterError("it belongs to another model: the adapted weights differ")
    return Adapter(name, lora, {name: (found[one], found[two]) for name, (one, two) in pairs.items()})


def _settings(metadata: Mapping[str, str]) -> tuple[train.Lora, int]:
    """Return the rank and scale of an adapter, and the checksum of its model."""
    try:
        about: Any = json.loads(metadata["lora"])
        lora = train.Lora(about["targets"], rank=about["rank"], alpha=about["alpha"])
        return lora, int(about["base"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise train.AdapterError("its rank and scale are missing: write it with train.Lora.save") from None


def _pairs(
    found: Mapping[str, tuple[int, ...]], rank: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """Return the names of A and B for each adapted weight."""
    pairs = dict[str, tuple[str, str]]()
    for name in found:
        layer = next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), "")
        weight = layer.removeprefix(_PREFIX)
        shape = shapes.get(weight, ()) if layer.startswith(_PREFIX) else ()
        if len(shape) != 2:
            raise train.AdapterError(f"it belongs to another model: it adapts {shown(name)}")
        one, two = (layer + part for part in _PARTS)
        for part, wanted in ((one, (rank, shape[1])), (two, (shape[0], rank))):
            if found.get(part) != wanted:
                what = f"it belongs to another model or rank: {shown(part)} has the shape {found.get(part)}"
                raise train.AdapterError(f"{what}, but must have {wanted}")
        pairs[weight] = one, two
    if not pairs:
        raise train.AdapterError("it does not contain arrays")
    return pairs


def _is_base(base: int, weights: Mapping[str, npt.NDArray[np.float32]]) -> bool:
    """Return whether these weights have the checksum of the trained model. Blocking."""

    def named(dtype: str) -> dict[str, npt.NDArray[Any]]:
        return {
            f"{_PREFIX * name[0].isdigit()}{name}.weight": array.astype(dtype, copy=False)
            for name, array in weights.items()
        }

    # The training may have used either dtype.
    return any(train.Lora.base_of(named(dtype)) == base for dtype in ("float32", "float64"))


@asynccontextmanager
async def open_adapted(
    model: Model, weights: Mapping[str, npt.NDArray[np.float32]], adapter: Adapter
) -> AsyncGenerator[Model]:
    """Open the model with an adapter: a second set of the weights that it adapts, over the same cache.

    Raises:
        AdapterError: An adapted weight overflows in the dtype of the weights.
        OutOfMemoryError: The device lacks memory for them.
    """
    first = next(iter(model.weights.values()))
    placed = dict[str, ta.AccelRef]()

    def changed(name: str) -> npt.NDArray[Any]:
        made: npt.NDArray[Any] = adapter.added(name, weights[name]).astype(first.dtype.dtype, copy=False)
        if not np.isfinite(made.astype(np.float32, copy=False)).all():
            raise train.AdapterError(f"the adapter {adapter.name} cannot be used: {name!r} overflows")
        return made

    try:
        # Adapt one weight at a time, so that the host does not need memory for a second set.
        for name in adapter.arrays:
            placed[name] = await first.device.put(await trio.to_thread.run_sync(changed, name))
        async with model.with_weights(placed) as adapted:
            yield adapted
    finally:
        for array in placed.values():
            array.release()


@attrs.define(eq=False)
class Adapters:
    """The current adapter of a service, and its swap. `open_adapters` opens it.

    Attributes:
        generation: The generation of answers.
        key: The administration key; None if the paths are off.
        folder: The folder of the adapters; None if the paths are off.
        has_faults: Whether streams are compared with an undisturbed run, so that nothing is swapped.
        is_ending: Whether the service is ending, so that nothing is swapped.
    """

    generation: Generation
    key: str | None
    folder: Path | None
    _base: Model
    _nursery: trio.Nursery
    has_faults: bool = attrs.field(default=False, init=False)
    is_ending: bool = attrs.field(default=False, init=False)
    _adapters: dict[Model, Adapter] = attrs.field(factory=dict[Model, Adapter], init=False)
    _is_swapping: bool = attrs.field(default=False, init=False)

    def check(self, request: Request) -> None:
        """Raise an error for a request without the administration key."""
        if self.key is None or self.folder is None:
            raise ApiError(f"{request.url.path} {OFF}", None, "admin_disabled", 403)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            what = f"{request.url.path} needs the administration key: send Authorization: Bearer KEY"
            raise ApiError(what, code="invalid_api_key", status=401)

    async def swap_to(self, name: object) -> None:
        """Swap to an adapter of the folder.

        Raises:
            ApiError: The swap failed, for the reason in the message. Nothing has changed.
        """
        if self.folder is None or not isinstance(name, str) or not name.isprintable():
            raise ApiError(f"adapter must be the name of a file, got {shown(name)}", "adapter")
        # Access nothing outside of the folder, so that errors reveal nothing about other files.
        if name in {"", ".", ".."} or "/" in name or "\\" in name or len(name.encode()) > 255:
            what = "adapter must be the name of a file in the folder of adapters, without a path"
            raise ApiError(f"{what}, got {shown(name)}", "adapter")
        await self.swap(self.folder / name, self.folder)

    async def swap(self, path: Path | None, folder: Path | None = None) -> None:
        """Use an adapter, or none, for sequences that begin from now on.

        If this fails or is cancelled, nothing has changed.

        Args:
            path: The file of the adapter; None for none.
            folder: See `read_adapter`.

        Raises:
            ApiError: The swap failed, for the reason in the message.
        """
        self._check_ending()
        if self.has_faults:
            raise UNDER_FAULTS
        if self._is_swapping:
            raise BUSY
        if path is None:
            return self.generation.use(self._base)
        self._is_swapping = True
        try:
            await self._begin_with(path, folder)
        finally:
            self._is_swapping = False

    def _check_ending(self) -> None:
        if self.is_ending:
            raise ENDING

    async def _begin_with(self, path: Path, folder: Path | None) -> None:
        loaded, device = self.generation.loaded, self._base.caches[0].device
        try:
            adapter = await read_adapter(device, path, loaded.config, loaded.weights, folder)
            await self._nursery.start(self._hold, adapter)
        except FileNotFoundError:
            what = f"there is no adapter {shown(path.name)} in the folder of adapters"
            raise ApiError(what, "adapter", "adapter_not_found", 404) from None
        except train.AdapterError as error:
            raise ApiError(str(error), "adapter", "unusable_adapter") from None
        except ta.OutOfMemoryError:
            raise FULL from None

    async def _hold(self, adapter: Adapter, *, task_status: trio.TaskStatus[None]) -> None:
        """Swap to an adapter, and keep its weights on the device while sequences need them."""
        is_open = False
        try:
            async with open_adapted(self._base, self.generation.loaded.weights, adapter) as model:
                self._check_ending()
                self._adapters[model], is_open = adapter, True
                self.generation.use(model)
                task_status.started()
                await self.generation.wait_unused(model)
                del self._adapters[model]
        except (ta.AccelError, ta.ActorError, ValueError):
            if not is_open:
                raise
            # The other sequences continue.
            _logger.exception("the weights of %s may still take memory", adapter.name)

    def weights(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return the host's copy of the weights for sequences that begin from now on. Blocking."""
        adapter, weights = self._adapters.get(self.generation.model), self.generation.loaded.weights
        return (
            weights if adapter is None else {name: adapter.added(name, one) for name, one in weights.items()}
        )

    def state(self) -> dict[str, Any]:
        """Return the answer of the paths: the adapter, and the number of running streams with each."""
        names = {self._base: None, **{model: one.name for model, one in self._adapters.items()}}
        streams = [
            {"adapter": name, "streams": self.generation.count(model)}
            for model, name in names.items()
            if model is self.generation.model or self.generation.count(model)
        ]
        return {"object": "adapter", "adapter": names[self.generation.model], "in_use": streams}


def admin_route(adapters: Adapters, fields_of: Callable[[bytes], dict[str, Any]]) -> Route:
    """Return the administration's route, which swaps to an adapter or to none, and answers with the state."""

    async def answer(request: Request) -> Response:
        adapters.check(request)
        if request.method == "POST":
            await adapters.swap_to(fields_of(await request.body()).get("adapter"))
        elif request.method == "DELETE":
            await adapters.swap(None)
        return JSONResponse(adapters.state())

    return Route("/admin/adapter", answer, methods=["GET", "POST", "DELETE"])


@asynccontextmanager
async def open_adapters(
    generation: Generation,
    *,
    key: str | None = None,
    folder: Path | None = None,
    path: Path | None = None,
    has_faults: bool = False,
) -> AsyncGenerator[Adapters]:
    """Open the adapters of a service.

    Args:
        generation: The generation of answers.
        key: See `Adapters.key`.
        folder: See `Adapters.folder`.
        path: The file of the initial adapter; None for none.
        has_faults: See `Adapters.has_faults`.

    Raises:
        InputError: The first adapter cannot be used.
    """
    async with trio.open_nursery() as nursery:
        made = Adapters(generation, key, folder, generation.model, nursery)
        if path is not None:
            try:
                await made.swap(path)
            except ApiError as error:
                raise InputError(error.message) from None
        made.has_faults = has_faults
        yield made
        nursery.cancel_scope.cancel(reason="the service ends")
