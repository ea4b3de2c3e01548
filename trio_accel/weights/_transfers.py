"""Transfers from files to a device's arrays by name, and back; piece by piece."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import IO, Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import apart, named_arguments
from ..backends.base import (
    ContextLostError,
    DType,
    DTypeLike,
    HostArray,
    OutOfMemoryError,
    QueueFullError,
    StaleRefError,
    by_way_of_int64,
)
from ..backends.base.kit.code_cache import remove_stale
from ..devices import (
    AccelRef,
    Device,
    Operation,
    Pending,
    ProgressReport,
    PutFirst,
    PutPart,
    check_device,
    track_progress,
    what_to_do,
)
from ._files import OpenFile, OpenFiles, StrPath, TensorInfo, WeightsError, encode_header, paths_of

__all__ = ["LoadedArrays", "load", "save"]

_CHUNK_BYTES = 4 << 20
# One piece is in flight to the device while the next is read.
_BUFFERS = 2
# The alignment in bytes of arrays in one block, equal to the alignment of separate blocks.
_ALIGNMENT = 256
# The maximum elements of a conversion, which may hold the interpreter for less than a millisecond.
_AT_ONCE = 1 << 17

Progress: TypeAlias = Callable[[int, int], object]
# A block of memory: its dtype, and the name of its tensor, or an empty name for several tensors.
_Block: TypeAlias = tuple[str, str]


@named_arguments
@apart
@enable_ki_protection
async def load(
    device: Device,
    path: StrPath | Iterable[StrPath],
    *,
    names: Iterable[str] | None = None,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    progress: Progress | None = None,
) -> LoadedArrays:
    """Read safetensors files into arrays of a device.

    The files are read in a thread, in pieces of 4 MiB. While one is in flight to the device, the next is
    read, so the host memory is limited to a few pieces, whatever the size of the files.

    If the context is lost meanwhile, the files are read again from the beginning, at most as often as the
    device's `DeviceOptions.retry`.

    Args:
        device: The device of the arrays.
        path: A safetensors file; the index (``model.safetensors.index.json``) of a model with several files,
            in the same folder; or several of these.
        names: The tensors to load; by default all.
        dtype: The floating dtype to which floating and complex tensors are converted, as
            `numpy.ndarray.astype` does. Integers and booleans stay unchanged.
        packed: Whether all arrays with the same dtype share a block of memory, which is released with the
            last of them, or when one is released. A program that takes them all then depends on one block
            instead of hundreds, which makes its calls faster.
        progress: Called in the loop's thread, with the bytes of the files that are on the device, and of all.
            An error in it ends the loading.

    Returns:
        The arrays by name, C-contiguous. If the call fails or is cancelled, all of them are released.

    Raises:
        WeightsError: A file is cut off, damaged, not a safetensors file, or was changed meanwhile.
        OSError: A file cannot be opened or read.
        ValueError: The files lack a tensor with a wanted name.
        TypeError: `dtype` is not a floating or complex type, or would drop imaginary parts.
        NotSupportedError: A tensor has an element type that devices do not support.
        OutOfMemoryError: The device lacks memory; as far as that is known in advance, nothing was allocated.
        ContextLostError, StaleRefError: The context was lost too often meanwhile.
        DeviceLostError: The device is closed, or gave up.
    """
    check_device("load", device)
    target_dtype = None if dtype is None else _check_dtype(DType.of(dtype))
    paths = paths_of(path)
    chosen = None if names is None else _check_names(names)
    losses = 0
    with (
        await trio.to_thread.run_sync(OpenFiles, paths) as files,
        track_progress("load weights", unit="B") as report,
    ):
        tensors = _choose(files, chosen, target_dtype)
        while True:
            try:
                return await _Loading(
                    device, files, tensors, packed=packed, report=report, progress=progress
                ).run()
            except (ContextLostError, StaleRefError):
                losses += 1
                if losses > device.options.retry:
                    raise


@attrs.frozen
class _Tensor:
    """A tensor to load, its file, and the dtype to convert it to."""

    file: OpenFile
    info: TensorInfo
    dtype: DType


@attrs.define(eq=False)
class _Buffer:
    """Host memory of one piece, and the operation that copies it to the device."""

    memory: npt.NDArray[np.uint8]
    pending: Pending[AccelRef] | None = None
    nbytes: int = 0


@attrs.define(eq=False)
class _Loading:
    """One attempt to load tensors."""

    _device: Device
    _files: OpenFiles
    _tensors: list[_Tensor]
    _packed: bool = attrs.field(kw_only=True, alias="packed")
    _report: ProgressReport = attrs.field(kw_only=True, alias="report")
    _progress: Progress | None = attrs.field(kw_only=True, alias="progress")
    _total: int = attrs.field(init=False)
    _done: int = 0
    # Blocks of memory as 1-d arrays; and for each tensor its block and its first element.
    _sizes: dict[_Block, int] = attrs.field(factory=dict[_Block, int])
    _positions: dict[str, tuple[_Block, int]] = attrs.field(init=False)
    _blocks: dict[_Block, AccelRef] = attrs.field(factory=dict[_Block, AccelRef])
    # A piece of a tensor before its conversion, as it is in the file.
    _raw: npt.NDArray[np.uint8] = attrs.field(factory=lambda: np.empty(0, np.uint8), init=False)

    def __attrs_post_init__(self) -> None:
        self._total = sum(tensor.info.nbytes for tensor in self._tensors)
        self._positions = {tensor.info.name: self._position_of(tensor) for tensor in self._tensors}

    async def run(self) -> LoadedArrays:
        """Load all tensors, or release everything."""
        await self._check_memory()
        try:
            await self._load_all()
        except BaseException:
            for block in self._blocks.values():
                block.release()
            # A kept error would keep the memory.
            self._blocks.clear()
            raise
        return LoadedArrays(
            {tensor.info.name: self._array(tensor.info) for tensor in self._tensors}, self._files.metadata
        )

    def _position_of(self, tensor: _Tensor) -> tuple[_Block, int]:
        """Return a tensor's place: in a separate block, or after the earlier tensors of its dtype."""
        block = (tensor.dtype.value, "" if self._packed else tensor.info.name)
        step = _ALIGNMENT // tensor.dtype.itemsize
        start = -(-self._sizes.get(block, 0) // step) * step
        self._sizes[block] = start + tensor.info.size
        return block, start

    def _array(self, info: TensorInfo) -> AccelRef:
        block, start = self._positions[info.name]
        return self._blocks[block][start : start + info.size].reshape(info.shape)

    async def _check_memory(self) -> None:
        """Refuse to load more than the device can hold, before anything is allocated."""
        required = sum(count * DType(dtype).itemsize for (dtype, _), count in self._sizes.items())
        memory = (await self._device.statistics()).memory
        if required > memory.limit - memory.used:
            # Some memory may be released but not freed yet.
            await self._device.synchronize()
            memory = (await self._device.statistics()).memory
        free = max(memory.limit - memory.used, 0)
        if required > free:
            raise OutOfMemoryError(
                f"the weights take {required} bytes, {free} are free of {memory.limit}: release arrays, or "
                "load fewer (names=) or smaller ones (dtype=)",
                requested=required,
                free=free,
                total=memory.limit,
                device=self._device.name,
                operation="weights.load",
            )

    async def _load_all(self) -> None:
        size = min(
            _CHUNK_BYTES, max((_bytes_of(tensor, tensor.info.size) for tensor in self._tensors), default=0)
        )
        buffers = [_Buffer(self._device.host_empty(size, "uint8")) for _ in range(_BUFFERS)]
        if any(tensor.dtype is not tensor.info.dtype for tensor in self._tensors):
            self._raw = np.empty(size, np.uint8)
        if self._packed:
            # Filled, since there are gaps.
            for block, count in self._sizes.items():
                self._blocks[block] = await self._device.zeros(count, block[0])
        for number, (tensor, start, stop) in enumerate(_pieces(self._tensors)):
            buffer = buffers[number % _BUFFERS]
            await self._settle(buffer)
            host = await trio.to_thread.run_sync(self._read, tensor, start, stop, buffer.memory)
            try:
                await self._put(tensor, host, start, buffer)
            except StaleRefError:
                # An earlier piece has failed, or the context was lost, and the caller should get that error.
                for pending_buffer in buffers:
                    await self._settle(pending_buffer)  # noqa: ASYNC120  # who cancels it needs no error
                raise
        for buffer in buffers:
            await self._settle(buffer)
        await trio.to_thread.run_sync(self._files.check_unchanged)
        for (dtype, name), array in self._blocks.items():
            array.block.check(f"load: {name or dtype}")

    async def _settle(self, buffer: _Buffer) -> None:
        """Wait until a buffer may be filled again."""
        if buffer.pending is None:
            return
        pending, buffer.pending = buffer.pending, None
        await pending.wait()
        self._count(buffer.nbytes)

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    async def _put(self, tensor: _Tensor, host: HostArray, start: int, buffer: _Buffer) -> None:
        """Submit a piece to the device."""
        block, first = self._positions[tensor.info.name]
        part = (slice(first + start, first + start + host.size),)
        array = self._blocks.get(block)
        operation: Operation[Any, AccelRef] = (
            PutFirst(host, (tensor.info.size,), part) if array is None else PutPart(host, array, part)
        )
        nbytes = host.size * tensor.info.dtype.itemsize
        try:
            pending = self._device.submit(operation)
        except QueueFullError:
            # Others have filled the queue, or the context is being rebuilt: then it is waited for.
            out = await self._device.ask(operation)
            self._count(nbytes)
        else:
            out, buffer.pending, buffer.nbytes = pending.value, pending, nbytes
        self._blocks[block] = out

    def _read(self, tensor: _Tensor, start: int, stop: int, memory: npt.NDArray[np.uint8]) -> HostArray:
        """Read elements from the file, converted. Runs in a thread."""
        stored, target = tensor.info.dtype, tensor.dtype
        count = stop - start
        raw = (memory if stored is target else self._raw)[: count * stored.itemsize]
        tensor.file.read(raw, tensor.info.offset + start * stored.itemsize)
        if stored is DType.bool and raw.size and int(raw.max()) > 1:
            raise WeightsError(f"{tensor.file.path}: {tensor.info.name!r} has bytes that are not booleans")
        elements: HostArray = raw.view(stored.dtype)
        if stored is target:
            return elements
        converted: HostArray = memory[: count * target.itemsize].view(target.dtype)
        with np.errstate(all="ignore"):
            for first in range(0, count, _AT_ONCE):
                those = slice(first, first + _AT_ONCE)
                piece = by_way_of_int64(elements[those], converted.dtype)
                np.copyto(converted[those], piece, casting="unsafe")
        return converted


def _pieces(tensors: Iterable[_Tensor]) -> Iterator[tuple[_Tensor, int, int]]:
    """Yield the elements of each tensor in pieces; an empty tensor also has one piece."""
    for tensor in tensors:
        step = max(1, _CHUNK_BYTES // _bytes_of(tensor, 1))
        for start in range(0, max(1, tensor.info.size), step):
            yield tensor, start, min(start + step, tensor.info.size)


def _bytes_of(tensor: _Tensor, count: int) -> int:
    """Return the bytes of `count` elements, in the file or on the device, whichever is larger."""
    return count * max(tensor.info.dtype.itemsize, tensor.dtype.itemsize)


def _choose(files: OpenFiles, names: list[str] | None, target_dtype: DType | None) -> list[_Tensor]:
    unknown = [name for name in names or () if name not in files.tensors]
    if unknown:
        paths = ", ".join(file.path for file in files.files)
        raise ValueError(f"load: names has {unknown[0]!r}, which {paths} does not hold")
    chosen = None if names is None else set(names)
    tensors: list[_Tensor] = []
    for name, (file, info) in files.tensors.items():
        if chosen is not None and name not in chosen:
            continue
        stored = info.dtype
        if target_dtype is None or not stored.is_inexact:
            tensors.append(_Tensor(file, info, stored))
            continue
        if stored.kind == "complex" and target_dtype.kind != "complex":
            raise TypeError(
                f"load: {name!r} is {stored}: as {target_dtype} it would lose its imaginary parts"
            )
        tensors.append(_Tensor(file, info, target_dtype))
    return tensors


def _check_dtype(dtype: DType) -> DType:
    if not dtype.is_inexact:
        raise TypeError(f"load: dtype must be a floating or complex type, got {dtype}")
    return dtype


def _check_names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"load: names must be several names, got the text {names!r}; give [{names!r}]")
    return list(names)


class LoadedArrays(Mapping[str, AccelRef]):
    """Arrays of a device by their names, in the order of their files, with the files' text.

    Args:
        arrays: The arrays.
        metadata: Text by name.
    """

    def __init__(self, arrays: Mapping[str, AccelRef], metadata: Mapping[str, str]) -> None:
        self._arrays = dict(arrays)
        self._metadata = MappingProxyType(dict(metadata))

    def __repr__(self) -> str:
        return f"<LoadedArrays: {len(self)} arrays, {self.nbytes} bytes>"

    def __getitem__(self, name: str) -> AccelRef:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts by name, added by the writer of the file; the first of several files takes precedence."""
        return self._metadata

    @property
    def nbytes(self) -> int:
        """The total bytes of the arrays on the device."""
        return sum(array.nbytes for array in self._arrays.values())

    def release(self) -> None:
        """Release the memory of all arrays now; see `AccelRef.release`."""
        for array in self._arrays.values():
            array.release()


@named_arguments
@apart
@enable_ki_protection
async def save(
    path: StrPath,
    arrays: Mapping[str, AccelRef],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write arrays of a device to a safetensors file, in pieces of 4 MiB.

    The file appears under its name when it is complete, and replaces an existing file. If the call fails or
    is cancelled, nothing has changed.

    A replaced file keeps its mode; a new one gets the mode of the process's umask. A symbolic link stays, and
    its target is written. Other hard links keep the old file. An existing path other than a regular file,
    such as a pipe, is refused.

    Args:
        path: The file to write.
        arrays: The arrays by name. An array that is not C-contiguous is copied on its device first.
        metadata: Texts by name to store with them.
        progress: Called with the bytes of written arrays, and the total bytes.

    Raises:
        NotSupportedError: The format lacks an element type: complex128.
        TypeError, ValueError: A name, an array or a text has another type, or is invalid.
        WeightsError: The path belongs to a pipe or a device.
        OSError: The file cannot be written.
        StaleRefError: An array is no longer usable.
        ContextLostError, DeviceLostError: The device was lost meanwhile.
    """
    [target] = paths_of(path)
    _check(arrays, metadata or {})
    # Like the format's own library, write the largest elements first, so that all are aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header = encode_header(
        ((name, array.dtype, array.shape, array.nbytes) for name, array in ordered), metadata or {}
    )
    target = await trio.to_thread.run_sync(os.path.realpath, target)
    file = await trio.to_thread.run_sync(_make, target, header)
    try:
        with track_progress("save weights", unit="B") as report:
            await _write_all(file, dict(ordered), report, progress)
        await trio.to_thread.run_sync(_finish, file, target)
    finally:
        _discard(file)


async def _write_all(
    file: IO[bytes], arrays: Mapping[str, AccelRef], report: ProgressReport, progress: Progress | None
) -> None:
    total, done = sum(array.nbytes for array in arrays.values()), 0
    for array in arrays.values():
        flat = (array if array.spec.is_contiguous else await array.copy()).reshape(-1)
        step = max(1, _CHUNK_BYTES // flat.dtype.itemsize)
        host = flat.device.host_empty(min(step, flat.size), flat.dtype)
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            piece = await part.to_host(out=host[: part.size])
            await trio.to_thread.run_sync(_write, file, piece.view(np.uint8).data)
            done += part.nbytes
            report(done, total)
            if progress is not None:
                progress(done, total)


def _check(arrays: Mapping[str, object], metadata: Mapping[str, object]) -> None:
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"save: arrays must have names of text, got {name!r}")
        if not isinstance(array, AccelRef):
            got = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"save: arrays[{name!r}] must be an AccelRef, got {got}")
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"save: metadata must be text by name, got {name!r}: {text!r}")


def _make(target: str, header: bytes) -> IO[bytes]:
    """Make a file next to the target, with a new name, and remove the files of killed processes."""
    folder, base_name = os.path.split(target)
    remove_stale(folder or ".", rf"\.{re.escape(base_name)}\.[0-9a-f]{{16}}")
    name = os.path.join(folder, f".{base_name}.{secrets.token_hex(8)}")
    mode = _mode_of(target)
    # From the start, only readers of the old file may read it; the umask removes further bits.
    file = open(  # noqa: SIM115  # closed by who asked
        name,
        "xb",
        buffering=0,
        opener=lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode),
    )
    try:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        _write(file, memoryview(header))
    except BaseException:
        _discard(file)
        raise
    return file


def _mode_of(target: str) -> int | None:
    """Return the permissions of the file to replace; None without one."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"save: {target} is a folder")
    if not stat.S_ISREG(mode):
        raise WeightsError(f"save: {target} is there and no regular file, so it is not replaced")
    return mode & 0o777


def _discard(file: IO[bytes]) -> None:
    file.close()
    # After success, it has already been renamed.
    with suppress(FileNotFoundError):
        os.unlink(file.name)


def _write(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _finish(file: IO[bytes], target: str) -> None:
    os.fsync(file.fileno())
    os.replace(file.name, target)
