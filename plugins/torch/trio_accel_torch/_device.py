"""Open devices: memory as tensors of bytes, streams, and libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from trio_accel.backends.base import (
    AccelStream,
    ArraySpec,
    BlockMemory,
    ChunkKeeper,
    DeviceInfo,
    DriverError,
    DType,
    HostArray,
    NotSupportedError,
    Poison,
    Strs,
    as_bits,
)
from trio_accel.backends.base.contract.ops import CopyFromHostSpec, CopyToHostSpec, HostUse, OperationSpec
from trio_accel.backends.base.kit.chunks import ALIGNMENT
from trio_accel.backends.base.kit.device import BlockDevice
from trio_accel.backends.base.kit.host import available_bytes, make_shared, map_shared
from trio_accel.backends.base.kit.kernels import kernels_of, load_module_kernels
from trio_accel.backends.base.kit.library import ComputingCall, ComputingLibrary

from ._exported import DriverMemory
from ._streams import TorchContext, TorchHold, TorchStream
from ._views import View
from .manifest import BACKEND, LIBRARIES, MISSING


class TorchDevice(BlockDevice[TorchStream, torch.Tensor, torch.Tensor]):
    """A device of PyTorch's.

    Args:
        info: Description of the device.
        memory_limit: The most bytes that its blocks may take.
        keeper: Gets the chunks; the processor's alone.
        where: Name of the device in PyTorch.
        is_worker: Whether the process serves this device and nothing else, so that it may be lost.

    Attributes:
        where: The device in PyTorch.
        libraries: Names of the libraries, sorted.
    """

    def __init__(
        self,
        info: DeviceInfo,
        memory_limit: int,
        keeper: ChunkKeeper | None,
        where: str,
        *,
        is_worker: bool = False,
    ) -> None:
        self.where = torch.device("cpu" if where.startswith("cpu") else where)
        if self.where.type != "cpu":
            _check_that_it_answers(info.name, self.where)
        if self.where.type == "cuda":
            # Halves are added in float32, as the other backends do.
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        super().__init__(
            info,
            BlockMemory(info.name, memory_limit, _Chunks(self.where, is_kept=keeper is not None), keeper),
        )
        self.libraries: Strs = tuple(sorted(LIBRARIES))
        self._context = TorchContext(info.name)
        self._is_worker = is_worker

    def view(self, array: ArraySpec, dtype: torch.dtype | None = None) -> View:
        """Return an array in memory, in the type of its elements or in another one of the same size.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        return View.of(self.blocks.block(array.block)[0], array, dtype)

    def host_view(self, array: ArraySpec, /, *, write: bool = True) -> HostArray:
        """Return an array of the processor as NumPy's."""
        self._check_host()
        memory = self.blocks.block(array.block)[0].numpy()
        data = memory.data if write else memory.data.toreadonly()
        return np.ndarray(
            array.shape, array.dtype.dtype, np.frombuffer(data, np.uint8), array.offset, array.strides
        )

    def _check_host(self) -> None:
        if self.where.type != "cpu":
            raise NotSupportedError("the host cannot address the memory of a card", backend=BACKEND)

    def open_stream(self, name: str, priority: int = 0) -> TorchStream:
        """Make a stream."""
        self.check_open()
        return self.add_stream(TorchStream(name, self._context, self.where, priority))

    def open_library(self, name: str) -> TorchLibrary:
        """Load a library; blocks while its module is imported."""
        self.check_open()
        key, separator, argument = name.partition("?")
        if key in MISSING:
            raise NotSupportedError(
                f"the plug-in of PyTorch has no library {key!r}; it has {', '.join(self.libraries)}",
                backend=BACKEND,
                device=self.info.name,
            )
        if key not in LIBRARIES:
            return TorchLibrary(
                name, self, load_module_kernels(name, BACKEND, self.libraries, self.info.name)
            )
        entry = LIBRARIES[key]
        module = entry.load(None)
        cls = getattr(module, entry.cls) if entry.cls else TorchLibrary
        kernels = kernels_of(vars(module), BACKEND)
        library: TorchLibrary = cls(key, self, kernels, *([argument] if separator else []))
        return library

    @contextlib.contextmanager
    def waited_for(self) -> Generator[None]:
        """Let this thread launch on the device, and wait for what it has launched."""
        if self.where.type not in ("cuda", "xpu"):
            yield
            return
        module: Any = getattr(torch, self.where.type)
        with module.device(self.where):
            yield
            self.wait_for_current_stream()

    def wait_for_current_stream(self) -> None:
        """Wait for what this thread has launched on its current stream."""
        if self.where.type == "mps":
            torch.mps.synchronize()
        elif self.where.type != "cpu":
            module: Any = getattr(torch, self.where.type)
            module.current_stream(self.where).synchronize()

    def spin(self, stream: AccelStream, block: int | None = None) -> TorchHold:
        """Hold a stream back by work that does not end by itself."""
        if not isinstance(stream, TorchStream):
            raise TypeError(f"stream: the backend has its own streams, not {stream!r}")
        hold = TorchHold(memory=None if block is None else self.blocks.block(block)[0])
        stream.enqueue(hold)
        return hold

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Count the context as lost, once a stream gets there."""

        def fail() -> None:
            if self._is_worker and self.where.type != "cpu":
                # A kernel fails an assertion, which ends PyTorch's use of the card in this process.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.where)[torch.full((1,), 1 << 40, device=self.where)].cpu()
            self._context.reason = reason

        if isinstance(stream, TorchStream):
            stream.enqueue(fail)
        else:
            fail()

    def give_up(self, reason: str) -> None:
        """Count the context as lost."""
        self._context.reason = self._context.reason or reason

    def reaches(self, peer: DeviceInfo) -> bool:
        """Whether both are the processor."""
        return not self.info.is_accelerator and not peer.is_accelerator

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> HostLease:
        """Lend the program an array of the processor as NumPy's."""
        self._check_host()
        if stream is not None:
            raise NotSupportedError("lease: stream: the processor has none of others", backend=BACKEND)
        return HostLease(self.host_view(array, write=write))

    def end(self, *, is_idle: bool) -> None:
        """Free everything that nothing uses any more."""
        super().end(is_idle=is_idle)
        if not is_idle:
            self.give_up("the device was closed")
        elif self.where.type != "cpu":
            module: Any = getattr(torch, self.where.type)
            # PyTorch keeps freed memory. After a loss it can do nothing more.
            with contextlib.suppress(RuntimeError):
                module.empty_cache()


def _check_that_it_answers(name: str, where: torch.device) -> None:
    """Compute on a card: it may have gone since the devices were found.

    Raises:
        DriverError: It has gone, or PyTorch can use it no longer.
    """
    try:
        torch.zeros(1, device=where).item()
    # PyTorch asserts that it was made for such devices.
    except (AssertionError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        raise DriverError(
            f"PyTorch cannot use {where}: {told}", code=type(error).__name__, device=name
        ) from error


class HostLease:
    """A NumPy array that the program has; its work with it is done when it gives it back."""

    def __init__(self, array: HostArray) -> None:
        self.array = array

    def take_back(self) -> None:
        """Make the array read-only."""
        self.array.flags.writeable = False


class _Chunks:
    """Chunks of memory: on the processor tensors over mapped files, which outlive their process."""

    first = 64 << 20
    keep = 256 << 20

    def __init__(self, where: torch.device, *, is_kept: bool) -> None:
        self._where = where
        self._driver = DriverMemory(where) if is_kept and where.type == "cuda" else None

    def make(self, nbytes: int) -> tuple[torch.Tensor, int]:
        if self._where.type != "cpu":
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=self._where), nbytes
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
        # The system gives pages when they are written to.
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return torch.from_numpy(whole[start : start + nbytes]), nbytes

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> tuple[torch.Tensor, int]:
        if self._driver is not None:
            made, size, descriptor = self._driver.make(nbytes)
            try:
                keeper.keep(chunk, size, descriptor)
            finally:
                os.close(descriptor)
            return made, size
        available = available_bytes()
        if nbytes > available:
            raise MemoryError(f"a chunk of {nbytes} bytes, {available} available")
        try:
            memory, descriptor = make_shared(nbytes)
        except OSError as error:
            raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error
        try:
            keeper.keep(chunk, memory.nbytes, descriptor)
        finally:
            os.close(descriptor)
        return torch.from_numpy(memory), memory.nbytes

    def map(self, nbytes: int, descriptor: int, *, write: bool) -> torch.Tensor:
        if self._driver is not None:
            return self._driver.map(nbytes, descriptor, write=write)
        return _tensor(map_shared(descriptor, nbytes, write=write))

    def share(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk

    def drop(self, chunk: torch.Tensor) -> None:
        """Do nothing: the memory goes with the last tensor over it."""

    def block(self, chunk: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        return chunk[offset : offset + nbytes]

    def available(self) -> int:
        if self._where.type in ("cuda", "xpu"):
            module: Any = getattr(torch, self._where.type)
            return int(module.mem_get_info(self._where)[0])
        return available_bytes()


def _tensor(memory: HostArray) -> torch.Tensor:
    """Return a tensor over memory, which may be for reading alone: libraries refuse to write there."""
    return torch.from_numpy(memory if memory.flags.writeable else np.asarray(_Address(memory)))


class _Address:
    """Memory by its address alone, because PyTorch warns of read-only arrays."""

    def __init__(self, memory: HostArray) -> None:
        self.memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, False)}


class TorchLibrary(ComputingLibrary):
    """A library of an open device."""

    backend: ClassVar[str] = BACKEND
    streams: ClassVar[type[Any]] = TorchStream

    def call_of(self, spec: OperationSpec, stream: AccelStream) -> ComputingCall:
        """Make a launch; a refusal of PyTorch's becomes one of the backend's."""
        if self._device.where.type == "mps":
            _check_width(spec, self._device.info.name)
        kernel = self._kernel_of(spec)
        plan = self._plan_of(spec, kernel) if kernel.plan is not None or kernel.dtypes else None
        return TorchCall(kernel.function, spec, plan, self._device, stream)


def _check_width(spec: OperationSpec, device: str) -> None:
    """Refuse elements of 64 bits in floating point before anything is enqueued: Metal has none."""
    for array in spec.descriptor().arrays(spec):
        if array.dtype in (DType.float64, DType.complex128):
            raise NotSupportedError(
                f"{spec.operation}: Apple's devices have no {array.dtype}; use float32 or complex64",
                backend=BACKEND,
                device=device,
            )


class TorchCall(ComputingCall):
    """A launch, whose errors are the backend's."""

    def __call__(self) -> None:
        """Run the kernel."""
        try:
            super().__call__()
        except torch.OutOfMemoryError as error:
            raise self.device.exhausted(0) from error
        except (NotImplementedError, TypeError, RuntimeError) as error:
            if reason := _refusal(error):
                raise NotSupportedError(
                    f"{self._spec.operation}: PyTorch refuses: {reason}",
                    backend=BACKEND,
                    device=self.device.info.name,
                ) from error
            if "not enough memory" in str(error):
                raise self.device.exhausted(0) from error
            raise

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._spec.operation


_REFUSALS = (
    "not implemented for",
    "not supported",
    "doesn't support",
    "does not support",
    "not yet supported",
)


def _refusal(error: Exception) -> str:
    """Return PyTorch's reason for an operation that it does not have; empty for other errors."""
    text = str(error).partition("\n")[0]
    is_refusal = isinstance(error, NotImplementedError) or any(each in text for each in _REFUSALS)
    return text if is_refusal else ""


def refuse(what: str) -> NoReturn:
    """Refuse what PyTorch does not have."""
    raise NotSupportedError(f"PyTorch has no {what}", backend=BACKEND)


def use_of(spec: CopyFromHostSpec | CopyToHostSpec) -> HostUse:
    """Return the use of a host array, noted before its kernel runs so that it can be withdrawn until then."""
    assert spec.use is not None
    return spec.use


class NotingLibrary(TorchLibrary):
    """Notes the use of host arrays by copies."""

    def call_of(self, spec: OperationSpec, stream: AccelStream) -> ComputingCall:
        """Make a launch."""
        if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)):
            spec.note_use(HostUse(as_bits(spec.host)))
        return super().call_of(spec, stream)
