"""The functions of nccl4py's bindings that the CUDA backend calls.

Memory of the stand-in driver is the host's. Host functions of the stream do the work of NCCL's kernels: they
wait for the other ranks, and end when the communicator is given up.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import ml_dtypes
import numpy as np
from cuda.bindings import driver
from fake_nccl import Handle, prefix

_DTYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]
_DTYPES += [ml_dtypes.bfloat16]
_STEPS = [np.add, np.multiply, np.maximum, np.minimum, np.add]
_AVG = 4


class NCCLError(Exception):
    pass


class Result(enum.IntEnum):
    Success = 0
    InvalidArgument = 4
    InProgress = 7


class Config:
    blocking = 1
    ptr = 1


@attrs.define(eq=False)
class Comm:
    handle: Handle
    is_open: bool = False
    is_aborted: bool = False
    # Host functions that the driver may still call.
    kept: list[object] = attrs.field(factory=list)


def get_version() -> int:
    return 22809


def get_unique_id() -> bytes:
    return tempfile.mkdtemp(prefix=prefix()).encode().ljust(128)


def comm_init_rank_scalable(size: int, rank: int, names: int, name: bytearray, config: int) -> Comm:
    assert (names, config) == (1, 1)
    handle = Handle(Path(bytes(name).decode().strip()), rank, size)
    others = [other for other in range(size) if other != rank]
    handle.exchange(dict.fromkeys(others), others)
    return Comm(handle)


def comm_get_async_error(comm: Comm) -> int:
    comm.is_open = comm.is_open or comm.handle.poll()
    return Result.Success if comm.is_open else Result.InProgress


def comm_abort(comm: Comm) -> None:
    comm.is_aborted = True
    comm.handle.abort()


def get_last_error(comm: Comm) -> str:
    return ""


def _at(address: int, count: int, code: int) -> Any:
    dtype = np.dtype(_DTYPES[code])
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype)


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _run(comm: Comm, stream: int, begin: Callable[[], None], end: Callable[[dict[int, Any]], None]) -> None:
    """Exchange messages at the stream's turn, and finish when all others have reached theirs."""

    def kernel(_: object) -> None:
        if not comm.is_aborted:
            begin()
        while not comm.is_aborted:
            if comm.handle.poll():
                end(comm.handle.received)
                return
            time.sleep(0.001)

    function = _HOST_FUNCTION(kernel)
    comm.kept.append(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert not driver.cuLaunchHostFunc(stream, driver.CUhostFn(address), 0)[0]


def _collect(comm: Comm, data: Any, stream: int, make: Callable[[list[Any]], None]) -> None:
    ranks = list(range(comm.handle.size))

    def end(received: dict[int, Any]) -> None:
        make([received[rank] for rank in ranks])

    _run(comm, stream, lambda: comm.handle.exchange(dict.fromkeys(ranks, data), ranks), end)


def _reduced(arrays: list[Any], op: int) -> Any:
    made = functools.reduce(_STEPS[op], arrays)
    return (made / len(arrays)).astype(made.dtype) if op == _AVG else made


def all_reduce(send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
    def make(arrays: list[Any]) -> None:
        _at(recv, count, code)[:] = _reduced(arrays, op)

    _collect(comm, _at(send, count, code), stream, make)


def reduce(send: int, recv: int, count: int, code: int, op: int, root: int, comm: Comm, stream: int) -> None:
    def make(arrays: list[Any]) -> None:
        if comm.handle.rank == root:
            _at(recv, count, code)[:] = _reduced(arrays, op)

    _collect(comm, _at(send, count, code), stream, make)


def reduce_scatter(send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
    first = comm.handle.rank * count

    def make(arrays: list[Any]) -> None:
        _at(recv, count, code)[:] = _reduced(arrays, op)[first : first + count]

    _collect(comm, _at(send, count * comm.handle.size, code), stream, make)


def all_gather(send: int, recv: int, count: int, code: int, comm: Comm, stream: int) -> None:
    def make(arrays: list[Any]) -> None:
        _at(recv, count * len(arrays), code)[:] = np.concatenate(arrays)

    _collect(comm, _at(send, count, code), stream, make)


def broadcast(send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
    def make(arrays: list[Any]) -> None:
        _at(recv, count, code)[:] = arrays[root]

    _collect(comm, _at(send, count, code), stream, make)


_group: list[tuple[Any, ...]] = []


def group_start() -> None:
    _group.clear()


def send(address: int, count: int, code: int, peer: int, comm: Comm, stream: int) -> None:
    _group.append((comm, stream, peer, _at(address, count, code), None))


def recv(address: int, count: int, code: int, peer: int, comm: Comm, stream: int) -> None:
    _group.append((comm, stream, peer, None, _at(address, count, code)))


def group_end() -> None:
    if _group:
        comm, stream = _group[0][:2]
        sends = {peer: data for *_, peer, data, _ in _group if data is not None}
        targets = {peer: target for *_, peer, _, target in _group if target is not None}

        def end(received: dict[int, Any]) -> None:
            for peer, target in targets.items():
                target[:] = received[peer]

        _run(comm, stream, lambda: comm.handle.exchange(sends, list(targets)), end)
