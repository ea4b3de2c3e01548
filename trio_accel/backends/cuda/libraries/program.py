"""Programs on CUDA: methods get arrays that GPU libraries take without a copy, and enqueue on a stream."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from ...base import AccelError, Refused
from ...base.device_array import DeviceArray
from ...base.kernels import kernel
from ...base.ops import ArraySpec, ProgramCall, ProgramFetch, ProgramResult, ProgramReturn
from ...base.programs import ProgramHost
from ..kit._device import LibraryDevice
from ..kit._library import Call, CudaLibrary
from ..runtime._export import ProgramArray
from ..runtime._foreign import described, foreign_array
from ..runtime._stream import CudaStream

__all__ = ["ProgramLibrary"]

_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


class ProgramLibrary(CudaLibrary):
    """One program of an open device; blocks while its module is imported and its constructor runs.

    Constructor and `warm_up` run on a stream of their own, which is waited for. A call runs in a thread, on
    the stream of its operation: it only has to enqueue.

    Args:
        device: The device; its context is current.
        argument: Text of the program's definition.
    """

    name = "program"

    def __init__(self, device: LibraryDevice, argument: str) -> None:
        super().__init__(device)
        self._arrays = _Arrays(device)
        self._streams = _CurrentStreams(device.info.index)
        check = self._context.check
        # Kept: PyTorch has memory for it as long as the program lives.
        self._first = int(check(driver.cuStreamCreate(_NON_BLOCKING)))
        try:
            # The module is imported before: it may be what imports PyTorch.
            self._host = ProgramHost(argument, self._arrays, partial(self._streams.current, self._first))
            self.import_seconds: float = self._host.import_seconds
            check(driver.cuStreamSynchronize(self._first))
        except BaseException as error:
            told = self._told(error) if isinstance(error, Exception) else error
            if not self._context.is_dead:
                driver.cuStreamDestroy(self._first)
            if told is error:
                raise
            raise told from error  # noqa: ASYNC104  # only of an Exception

    def _destroy(self) -> None:
        self._host.close()
        driver.cuStreamDestroy(self._first)

    @kernel(ProgramCall, backend="cuda", is_blocking=True)
    @kernel(ProgramReturn, backend="cuda", is_blocking=True)
    def _call(self, spec: ProgramCall, call: Call) -> None:
        arrays = self._arrays
        with arrays.of(call), self._streams.current(call.handle):
            inputs = [arrays.view(array, write=False) for array in spec.read]
            updated = [arrays.view(array, write=True) for array in spec.updated]
            outputs = [arrays.view(array, write=True) for array in spec.written]
            self._host.call(spec, inputs, updated, outputs)

    @kernel(ProgramResult, backend="cuda")
    def _tell(self, spec: ProgramResult, call: Call) -> None:
        self._host.tell(spec)

    @kernel(ProgramFetch, backend="cuda")
    def _fetch(self, spec: ProgramFetch, call: Call) -> None:
        with self._arrays.of(call):
            self._host.fetch(spec, [self._arrays.view(array, write=True) for array in spec.written])

    def _told(self, error: Exception) -> Exception:
        """What failed, in the errors of backends: what the program's libraries met may be the end of CUDA."""
        # A declared refusal may be how the program's library tells of the end of CUDA.
        raised = error.__cause__ or error if isinstance(error, Refused) else error
        if not isinstance(error, AccelError) or isinstance(error, Refused):
            self._context.look()
            failure = self._context.failure()
            if failure is not None:
                return failure
            if isinstance(raised, MemoryError) or type(raised).__name__ == "OutOfMemoryError":
                # CuPy's is a MemoryError, PyTorch's is not.
                return self._exhausted()
        return super()._told(error)


class _KeptArray:
    """A copy of what a method has returned, until it is fetched. Made and let go with the context current.

    Args:
        device: The device.
        stream: Where it is made; its memory is given back behind what the stream has been given by then.
        dtype: Element type.
        shape: Elements along each axis.
    """

    __slots__ = ("_device", "_stream", "array")

    def __init__(self, device: LibraryDevice, stream: CudaStream, like: DeviceArray) -> None:
        self._device = device
        self._stream = stream
        self.array: DeviceArray = DeviceArray.packed(0, like.dtype, like.shape)
        if like.nbytes:
            self.array.address = device.arena.take(stream, like.nbytes)

    def __del__(self) -> None:
        if self.array.address:
            with self._device.context:
                self._device.arena.free(self._stream, self.array.address, self.array.nbytes)


class _Arrays:
    """See `ProgramArrays`."""

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._call: Call | None = None

    @contextmanager
    def of(self, call: Call) -> Generator[None, None, None]:
        """Arrays are those of a call, until the end."""
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def view(self, array: ArraySpec, *, write: bool) -> ProgramArray:
        device = self._device
        stream = None if self._call is None else self._call.stream
        return ProgramArray(device.at(array), device.info, device.context, stream, is_read_only=not write)

    def found(self, value: object) -> tuple[str, tuple[int, ...]] | None:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("a masked array; fill it first: array.filled(value)")
        is_array = isinstance(value, np.ndarray) or any(
            hasattr(type(value), name) for name in ("__dlpack__", "__cuda_array_interface__")
        )
        if not is_array:
            return None
        dtype, shape = described(value)
        return dtype.value, shape

    def keep(self, value: object) -> _KeptArray:
        call = self._in_call()
        source = self._source(value)
        kept = _KeptArray(self._device, call.stream, source)
        call.convert(source, kept.array)
        return kept

    def copy(self, source: object, out: object) -> None:
        self._in_call().convert(self._source(source), cast("ProgramArray", out).array)

    def end(self, views: Sequence[object]) -> None:
        for view in cast("Sequence[ProgramArray]", views):
            view.end()

    def _in_call(self) -> Call:
        assert self._call is not None
        return self._call

    def _source(self, value: Any) -> DeviceArray:
        """Where a returned array lies; it is kept until it is copied."""
        if isinstance(value, (ProgramArray, _KeptArray)):
            return value.array
        call = self._in_call()
        dtype, shape = described(value)
        if not math.prod(shape):
            return DeviceArray.packed(0, dtype, shape)
        if isinstance(value, np.ndarray):
            return self._uploaded(cast("npt.NDArray[Any]", value), call)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().resolve_conj().resolve_neg()
        found = foreign_array(value, call.stream, self._device.info.index)
        if found is None:
            return self._uploaded(np.from_dlpack(value), call)
        array, owner = found
        call.stream.after(partial(_let_go, owner))
        return array

    def _uploaded(self, host: npt.NDArray[Any], call: Call) -> DeviceArray:
        dtype, shape = described(host)
        room = call.workspace_array(dtype, shape)
        self._device.transfers.to_device(
            call.stream, host.astype(dtype.dtype, copy=False), None, room.address
        )
        return room


class _CurrentStreams:
    """Makes a stream the current one of PyTorch and CuPy, where this process has imported them.

    Args:
        index: Number of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    @contextmanager
    def current(self, handle: int) -> Generator[None, None, None]:
        """Make it so for a block, in this thread."""
        with ExitStack() as stack:
            # Another thread may be importing one: then there is not all of it.
            torch: Any = getattr(sys.modules.get("torch"), "cuda", None)
            if torch is not None and _has_cuda():
                stack.enter_context(torch.stream(torch.ExternalStream(handle, device=self._index)))
            cupy: Any = getattr(sys.modules.get("cupy"), "cuda", None)
            stream = self._of_cupy(cupy, handle)
            if stream is not None:
                stack.enter_context(cupy.Device(self._index))
                stack.enter_context(stream)
            yield

    def _of_cupy(self, cupy: Any, handle: int) -> Any:
        """A stream of CuPy that does not end ours; None where it is not imported."""
        if hasattr(getattr(cupy, "Stream", None), "from_external"):
            return cupy.Stream.from_external(_Handle(handle))
        if hasattr(cupy, "ExternalStream"):
            # Before CuPy 14.
            return cupy.ExternalStream(handle, self._index)
        return None


@attrs.frozen
class _Handle:
    """A stream, by the protocol for those of other libraries."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _has_cuda() -> bool:
    """Whether PyTorch was built with CUDA, and is imported."""
    version: Any = getattr(sys.modules.get("torch"), "version", None)
    return bool(getattr(version, "cuda", None))


def _let_go(owner: object) -> None:
    """Nothing uses it any more."""
