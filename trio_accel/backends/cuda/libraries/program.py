"""Programs on CUDA: methods get arrays that GPU libraries take without a copy, and enqueue on a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import numpy as np
from cuda.bindings import driver

from ...base import AccelError, DeviceArray, HostArray, InThread, Ints, Refused, kernel, ops
from ...base.kit.lent import Lent
from ...base.kit.programs import ProgramHost
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice
from ..runtime._current_streams import CurrentStreams, loaded
from ..runtime._foreign import ProgramArray, described, foreign_array
from ..runtime._signals import StatusWords
from ..runtime._stream import CudaStream
from ._nccl_ranks import Marks, NcclRank

# A call that takes longer holds up the loop: the next one is made in the thread.
_MAX_INLINE_SECONDS = 0.002
_SHORT_CALL = InThread(is_short=True)
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


class CudaProgramLibrary(CudaLibrary):
    """One program of an open device; blocks while its module is imported and its constructor runs.

    Constructor and `warm_up` run on a stream of their own, which is waited for. A call runs on the stream of
    its operation: it only has to enqueue. It runs in the thread of that stream, unless its method declares
    that it enqueues, and its last call was short. The first one may compile kernels.

    Args:
        device: The device; its context is current.
        argument: Text of the program's definition.
    """

    name = "program"

    def __init__(self, device: LibraryDevice, argument: str) -> None:
        super().__init__(device)
        self._streams = CurrentStreams(device.info.index)
        self._arrays = _CudaProgramArrays(device, self._streams)
        # Whether the last call of a method was short. The thread writes it, and the loop reads it.
        self._is_short: dict[str, bool] = {}
        check = self._context.check
        # Kept: PyTorch has memory for it as long as the program lives.
        self._first = int(check(driver.cuStreamCreate(_NON_BLOCKING)))
        try:
            # The module is imported before: it may be what imports PyTorch.
            self._host = ProgramHost(argument, self._arrays, partial(self._streams.current, self._first))
            self.import_seconds: float = self._host.import_seconds
            check(driver.cuStreamSynchronize(self._first))
        except BaseException as error:
            converted = self._as_backend_error(error) if isinstance(error, Exception) else error
            if not self._context.is_dead:
                driver.cuStreamDestroy(self._first)
            if converted is error:
                raise
            raise converted from error  # noqa: ASYNC104  # only of an Exception

    def _destroy(self) -> None:
        self._host.close()
        driver.cuStreamDestroy(self._first)
        if self._arrays.marks is not None:
            self._arrays.marks.words.close()

    def prepare(self, spec: ops.OperationSpec) -> Callable[[], None] | None:
        """Return where to call an operation; see `KernelLibrary.prepare`."""
        # Only the loop calls this.
        self._streams.note_loop()
        if isinstance(spec, ops.ProgramCall) and self._is_short.get(spec.method, False):
            return _SHORT_CALL
        return super().prepare(spec)

    @kernel(ops.ProgramCall, backend="cuda", is_blocking=True)
    @kernel(ops.ProgramReturn, backend="cuda", is_blocking=True)
    @kernel(ops.ProgramNext, backend="cuda", is_blocking=True)
    def _call(self, spec: ops.ProgramCall, call: KernelCall) -> None:
        began = time.perf_counter()
        with self._arrays.of(call), self._streams.of_call(call.handle):
            self._host.call(spec)
        if spec.arguments and self._host.enqueues(spec.method):
            self._is_short[spec.method] = time.perf_counter() - began < _MAX_INLINE_SECONDS

    # D111: blocking, so that it runs in the stream's thread, after a call that is being enqueued there.
    @kernel(ops.ProgramResult, backend="cuda", is_blocking=True)
    def _tell(self, spec: ops.ProgramResult, call: KernelCall) -> None:
        self._host.tell(spec)

    @kernel(ops.ProgramFetch, backend="cuda", is_blocking=True)
    def _fetch(self, spec: ops.ProgramFetch, call: KernelCall) -> None:
        with self._arrays.of(call):
            self._host.fetch(spec)

    def _as_backend_error(self, error: Exception) -> Exception:
        """Convert a failure, which may be the end of CUDA, to an error of backends."""
        # A declared refusal may wrap an error in which the program's library reports the end of CUDA (D137).
        raised = error.__cause__ or error if isinstance(error, Refused) else error
        if not isinstance(error, AccelError) or isinstance(error, Refused):
            self._context.detect_loss()
            failure = self._context.failure()
            if failure is not None:
                return failure
            if isinstance(raised, MemoryError) or type(raised).__name__ == "OutOfMemoryError":
                # CuPy's error is a MemoryError, PyTorch's is not.
                return self._device.exhausted(0)
        return super()._as_backend_error(error)


class _KeptArray:
    """A copy of a method's result, until it is fetched. Made and released with the context current.

    Args:
        device: The device.
        stream: The stream of the copy; its memory is freed after the work that the stream has by then.
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


class _CudaProgramArrays:
    """See `ProgramArrays`."""

    def __init__(self, device: LibraryDevice, streams: CurrentStreams) -> None:
        self._device = device
        self._streams = streams
        self._call: KernelCall | None = None
        # There when ranks have met.
        self.marks: Marks | None = None
        # Arguments of the call.
        self._lent: list[DeviceArray] = []

    @contextmanager
    def of(self, call: KernelCall) -> Generator[None]:
        """Make arrays belong to a call, until the end."""
        self._call = call
        try:
            yield
        finally:
            self._call = None
            self._lent.clear()

    def rank(self, meeting: Mapping[str, Any], asker: ops.Asker) -> NcclRank:
        if self.marks is None:
            self.marks = Marks(StatusWords(self._device.context))
        self.marks.stream, asker.waits_on_stream = self._in_call().handle, self.marks.wait_for_others
        return NcclRank(meeting, self.marks)

    def view(self, array: ops.ArraySpec, *, write: bool) -> ProgramArray:
        device = self._device
        stream = None if self._call is None else self._call.stream
        device_array = device.device_array(array)
        if self._call is not None:
            self._lent.append(device_array)
        return ProgramArray(device_array, device.info, device.context, stream, is_read_only=not write)

    def dtype_and_shape(self, value: object) -> tuple[str, Ints] | None:
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
        result = _KeptArray(self._device, call.stream, source)
        call.convert(source, result.array)
        return result

    def copy(self, source: object, out: object) -> None:
        self._in_call().convert(self._source(source), cast("ProgramArray", out).array)

    def protect(self, views: Sequence[object], *, write: bool) -> None:
        for view in cast("Sequence[ProgramArray]", views):
            view.mark(is_read_only=not write)

    def end(self, views: Sequence[object]) -> Sequence[Lent]:
        arrays = cast("Sequence[ProgramArray]", views)
        for view in arrays:
            view.end()
        # Other libraries keep this object as the owner of arrays that they make from an array.
        return [ref(view) for view in arrays]

    def when_done(self, check: Callable[[], None]) -> None:
        # JAX keeps its inputs until it has computed, which is not waited for.
        self._in_call().stream.after(check)

    def _in_call(self) -> KernelCall:
        assert self._call is not None
        return self._call

    def _source(self, value: Any) -> DeviceArray:
        """Place of a returned array, which is kept until it is copied."""
        if isinstance(value, (ProgramArray, _KeptArray)):
            return value.array
        call = self._in_call()
        dtype, shape = described(value)
        if not math.prod(shape):
            return DeviceArray.packed(0, dtype, shape)
        if isinstance(value, np.ndarray):
            return self._uploaded(cast("HostArray", value), call)
        torch, index = loaded("torch", "Tensor"), self._device.info.index
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().resolve_conj().resolve_neg()
        layout = _place_of(value, index) if self._streams.are_current(call.handle) else None
        if layout is not None:
            # The work that computes it is on the stream already.
            address, strides = layout
            return self._kept_until_done(DeviceArray(address, dtype, shape, strides), value)
        foreign = foreign_array(value, call.stream, index)
        if foreign is None:
            return self._uploaded(np.from_dlpack(value), call)
        return self._kept_until_done(*foreign)

    def _kept_until_done(self, array: DeviceArray, owner: object) -> DeviceArray:
        """Keep what has an array's memory. That of an argument is there, and would look as if it was kept."""
        if not any(_covers(lent, array.address) for lent in self._lent):
            self._in_call().stream.after(partial(_let_go, owner))
        return array

    def _uploaded(self, host: HostArray, call: KernelCall) -> DeviceArray:
        dtype, shape = described(host)
        room = call.workspace_array(dtype, shape)
        self._device.transfers.to_device(
            call.stream, host.astype(dtype.dtype, copy=False), None, room.address
        )
        return room


def _place_of(value: Any, index: int) -> tuple[int, Ints] | None:
    """Return address and byte strides of a PyTorch or CuPy array; None for other types and other devices.

    DLPack has the same facts, but takes longer than a copy.
    """
    torch = loaded("torch", "Tensor")
    if torch is not None and isinstance(value, torch.Tensor):
        if not value.is_cuda or value.get_device() != index or value.layout is not torch.strided:
            return None
        size = value.element_size()
        return int(value.data_ptr()), tuple([step * size for step in value.stride()])
    cupy = loaded("cupy", "ndarray")
    if cupy is not None and isinstance(value, cupy.ndarray) and value.data.device_id == index:
        return int(value.data.ptr), tuple(value.strides)
    return None


def _covers(array: DeviceArray, address: int) -> bool:
    """Return whether an address is among an array's elements."""
    steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    first = array.address + sum(step for step in steps if step < 0)
    return array.size > 0 and first <= address <= first + sum(map(abs, steps))


def _let_go(owner: object) -> None:
    """Drop an object that is no longer in use."""
