"""Collectives of GPUs in workers on one host, by NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ...base import DType, InThread, LibraryError, NotSupportedError, kernel, ops
from ...base.kit.communicators import Communicators
from ...base.kit.ranks import Collective, Memory, Move
from ..kit._library import CudaLibrary, KernelCall

_NAME = "nccl"
OPEN: Communicators = Communicators(_NAME)
"""The communicators of this process, which has one device."""

_IN_PROGRESS = 7

# ncclDataType_t, and numbers for each element.
_ORDER = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
TYPES: dict[DType, tuple[int, int]] = {
    **{DType(name): (code, 1) for code, name in enumerate(_ORDER.split())},
    DType.bool: (1, 1),
    DType.complex64: (7, 2),
    DType.complex128: (8, 2),
}
BYTES = 1
# ncclRedOp_t. The sum of truth values is the larger one, and the product the smaller one.
REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
_OF_BOOLS = {"sum": 2, "prod": 3, "max": 2, "min": 3}


def _bindings() -> Any:
    """Import nccl4py's bindings.

    Raises:
        NotSupportedError: They, or NCCL itself, are not installed.
    """
    try:
        bindings = importlib.import_module("nccl.bindings.nccl")
        bindings.get_version()
    except (ImportError, RuntimeError) as error:
        raise NotSupportedError(
            f"collectives by NCCL need nccl4py and NCCL, which cannot be loaded ({error}); the extras cuda13 "
            "and cuda12 have both",
            backend="cuda",
        ) from error
    return bindings


@attrs.define(eq=False)
class _NcclHandle:
    """A communicator that does not block: calls return at once, and its state shows when they are done."""

    nccl: Any
    comm: Any

    def poll(self) -> bool:
        """See `Handle.poll`."""
        code = int(self.nccl.comm_get_async_error(self.comm))
        if code == _IN_PROGRESS:
            return False
        if code:
            raise _error(self.nccl.Result(code).name, str(self.nccl.get_last_error(self.comm)).strip())
        return True

    def abort(self) -> None:
        """See `Handle.abort`."""
        self.nccl.comm_abort(self.comm)


def _error(code: str, text: str) -> LibraryError:
    detail = f": {text}" if text else ""
    return LibraryError(f"NCCL has failed with {code}{detail}", library=_NAME, code=code)


class NcclLibrary(CudaLibrary):
    """Ranks of communicators.

    Every call of NCCL returns at once. A wait for other ranks happens in a thread, which polls the state of
    the communicator, or on the stream. `CloseCommunicatorSpec` ends both from another thread: it is an
    operation of another actor, and no memory orders it after the others.
    """

    name = "communicators"
    is_captured: ClassVar[bool] = False

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        # The bindings are loaded here, because the libraries of a spare worker are opened in advance, and
        # loading takes half a second.
        self._nccl = _bindings()

    def prepare(self, spec: ops.OperationSpec) -> Callable[[], None] | None:
        """Have a collective called in a thread, unless all is connected for it; see `KernelLibrary`."""
        if type(spec) is ops.CollectiveSpec and spec.is_known:
            return InThread(is_short=True)
        return super().prepare(spec)

    def _as_backend_error(self, error: Exception) -> Exception:
        if type(error).__name__ == "NCCLError":
            # NCCL may have met what only the driver can name.
            self._context.detect_loss()
            return self._context.failure() or _error("a refused call", str(error))
        return super()._as_backend_error(error)

    @kernel(ops.CommunicatorIdSpec, backend="cuda", is_blocking=True)
    def _make_id(self, spec: ops.CommunicatorIdSpec, call: KernelCall) -> None:
        identifier = np.frombuffer(bytes(self._nccl.get_unique_id()), np.int32)
        spec.words[: identifier.size] = identifier

    @kernel(ops.OpenCommunicatorSpec, backend="cuda", is_blocking=True)
    def _open(self, spec: ops.OpenCommunicatorSpec, call: KernelCall) -> None:
        nccl = self._nccl

        def make() -> _NcclHandle:
            config = nccl.Config()
            config.blocking = 0
            name = bytearray(spec.name)
            return _NcclHandle(nccl, nccl.comm_init_rank_scalable(spec.size, spec.rank, 1, name, config.ptr))

        communicator = OPEN.new(spec.number)
        with communicator.calling(spec.waiting):
            communicator.begin(make)
            communicator.settle()

    @kernel(ops.CloseCommunicatorSpec, backend="cuda")
    def _close(self, spec: ops.CloseCommunicatorSpec, call: KernelCall) -> None:
        OPEN.close(spec.number)

    @kernel(ops.CollectiveSpec, backend="cuda", is_blocking=True)
    def _meet(self, spec: ops.CollectiveSpec, call: KernelCall) -> None:
        communicator, waiting = OPEN.find(spec.number), spec.waiting
        source, out = spec.source, spec.out
        send_buffer = None if source is None else Memory(call.packed(source), source.dtype, source.size)
        recv_buffer = None if out is None else Memory(call.address_of(out), out.dtype, out.size)
        waiting.came, waiting.ran = call.stream.record(), None
        with communicator.calling(waiting):
            communicator.call(lambda handle: _meet(handle, spec, send_buffer, recv_buffer, call.handle))
            communicator.settle(is_short=spec.is_known)
        waiting.ran = call.stream.record()


def _meet(
    handle: _NcclHandle,
    spec: ops.CollectiveSpec,
    send_buffer: Memory | None,
    recv_buffer: Memory | None,
    stream: int,
) -> None:
    """Call NCCL for a specification."""
    # A rank that gives or gets none has its other array in place of it, which is not written.
    arrays: list[Any] = [send_buffer or recv_buffer, recv_buffer or send_buffer]
    if spec.kind != "exchange":
        enqueue(handle, Collective(spec.kind, arrays[0], arrays[1], spec.reduction, spec.root), stream)
        return
    pieces = ("send", arrays[0], spec.sends), ("recv", arrays[1], spec.receives)
    moves = [
        (name, memory.part(*piece), peer) for name, memory, entries in pieces for peer, *piece in entries
    ]
    exchange(handle, moves, stream)


def enqueue(handle: Any, asked: Collective, stream: int) -> None:
    """Call NCCL's function of the same name."""
    # If two arrays have different sizes, the smaller one is a rank's part of the other.
    size, dtype = min(asked.source.size, asked.target.size), asked.source.dtype
    if not size:
        return
    code, numbers, how = BYTES, dtype.itemsize, list[int | None]()
    if asked.reduction:
        code, numbers = TYPES[dtype]
        how.append((_OF_BOOLS if dtype is DType.bool else REDUCTIONS)[asked.reduction])
    if asked.kind in ("broadcast", "reduce"):
        how.append(asked.root)
    function = getattr(handle.nccl, asked.kind)
    function(asked.source.address, asked.target.address, size * numbers, code, *how, handle.comm, stream)


def exchange(handle: Any, moves: Sequence[Move], stream: int) -> None:
    """Send and receive in one group, so that no two ranks wait for each other."""
    handle.nccl.group_start()
    try:
        for name, memory, peer in moves:
            getattr(handle.nccl, name)(memory.address, memory.nbytes, BYTES, peer, handle.comm, stream)
    finally:
        handle.nccl.group_end()
