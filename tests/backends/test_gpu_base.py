"""The half of a GPU backend that no vendor is named in, on a kind of GPU that does not exist.

Its memory is the host's, its streams do everything at once, and its kernels are NumPy's. The tests hold that
a backend has to write the protocols of `backends/base/gpu/driver.py`, and that the rest works then.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import trio_accel as ta
from trio_accel.backends.base import (
    AccelEvent,
    BlockMemory,
    ChunkKeeper,
    DeviceInfo,
    DType,
    Waker,
    kernel,
    ops,
)
from trio_accel.backends.base.contract.protocols import KernelLibrary
from trio_accel.backends.base.gpu.device import AddressDevice
from trio_accel.backends.base.gpu.driver import Kernels, Launch
from trio_accel.backends.base.gpu.kernels import TransferLibrary
from trio_accel.backends.base.gpu.library import EnqueuingCall, EnqueuingLibrary
from trio_accel.backends.base.kit.chunks import ALIGNMENT

Array = npt.NDArray[Any]
DTYPES = list(DType)


def memory_at(address: int, nbytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def strided(address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """An array with strides that may lead before its address."""
    before = -sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True) if step < 0)
    after = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True) if step > 0)
    whole = memory_at(address - before, before + after + dtype.itemsize)
    return np.ndarray(shape, dtype.dtype, whole.data, before, strides)


class Context:
    """Never lost; `depth` counts the blocks in which it is current."""

    is_lost = is_dead = False

    def __init__(self) -> None:
        self.depth = 0
        self.host: dict[int, Array] = {}

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def make_current(self) -> bool:
        self.depth += 1
        return True

    def restore(self) -> None:
        self.depth -= 1

    def detect_loss(self) -> None: ...

    def failure(self) -> None:
        return None

    def take_host(self, nbytes: int) -> int:
        room = np.full(nbytes, 0xAA, np.uint8)
        self.host[room.ctypes.data] = room
        return int(room.ctypes.data)

    def free_host(self, address: int) -> None:
        del self.host[address]

    def register_host(self, address: int, nbytes: int) -> None: ...

    def unregister_host(self, address: int) -> None: ...


class Stream:
    """Does everything at once; `end` does the work on the host."""

    name, handle, launched = "stream", 7, 0
    is_closed = is_destroyed = has_ended = False
    failure = None

    def __init__(self, context: Context) -> None:
        self.context = context
        self.rooms: dict[int, Array] = {}
        self.finishers: list[Callable[[], None]] = []

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        assert self.context.depth
        ctypes.memmove(target, source, nbytes)

    copy_in = copy_out = copy = _copy

    def set_bytes(self, target: int, byte: int, count: int) -> None:
        assert self.context.depth
        ctypes.memset(target, byte, count)

    def set_words(self, target: int, word: int, count: int) -> None:
        memory_at(target, 4 * count).view(np.uint32)[:] = word

    def take_memory(self, nbytes: int) -> int:
        room = np.full(nbytes, 0xAA, np.uint8)
        self.rooms[room.ctypes.data] = room
        return int(room.ctypes.data)

    def free_memory(self, address: int) -> None:
        del self.rooms[address]

    def refresh(self) -> int:
        return 0

    def check(self) -> None: ...

    def in_use(self) -> nullcontext[None]:
        return nullcontext()

    def after(self, finisher: Callable[[], None]) -> None:
        self.finishers.append(finisher)

    def end(self) -> None:
        finishers, self.finishers = self.finishers, []
        for finisher in finishers:
            finisher()

    def record(self) -> Any:
        raise NotImplementedError

    crash = synchronize = close = record

    def wait(self, event: AccelEvent) -> None: ...

    def hold(self, waker: Waker | None = None) -> Any:
        raise NotImplementedError

    def notify(self, event: AccelEvent, waker: Waker) -> None: ...


class Sources(Kernels):
    """The kernels `convert` and `fill` by NumPy, with the structures of arrays.cu."""

    def read(self, source: str) -> str:
        return source

    def compile(self, text: str) -> Any:
        return {"convert": self._convert, "fill": self._fill}

    def find(self, module: Any, name: str, sizes: Sequence[int]) -> Launch:
        assert sum(sizes) > 8

        def launch(blocks: int, threads: int, stream: int, pointer: int) -> None:
            assert blocks * threads > 0
            module[name](int(memory_at(pointer, 8).view(np.uint64)[0]))

        return launch

    def unload(self, module: Any) -> None:
        module.clear()

    def _convert(self, at: int) -> None:
        source, out, size, scale, source_type, out_type, flags, ndim = struct.unpack(
            "<QQqdiiii", memory_at(at, 48).tobytes()
        )
        rows = memory_at(at + 48, 3 * 512).view(np.int64).reshape(3, 64)
        shape, ins, outs = (tuple(map(int, row[:ndim])) for row in rows)
        assert np.prod(shape, dtype=int) == size
        values = strided(source, DTYPES[source_type], shape, ins)
        values = np.conj(values) if flags & 2 else values
        np.copyto(
            strided(out, DTYPES[out_type], shape, outs),
            values * scale if flags & 1 else values,
            casting="unsafe",
        )

    def _fill(self, at: int) -> None:
        out, _, itemsize, ndim = struct.unpack("<Qqii", memory_at(at, 24).tobytes())
        value = memory_at(at + 24, 16)[:itemsize]
        rows = memory_at(at + 40, 2 * 512).view(np.int64).reshape(2, 64)
        shape, strides = (tuple(map(int, row[:ndim])) for row in rows)
        dtype = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint64}[itemsize]
        strided(out, dtype, shape, strides)[...] = value.view(dtype.dtype)[0]


class Chunks:
    first = keep = 1 << 20

    def make(self, nbytes: int) -> tuple[Array, int]:
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return whole[start : start + nbytes], nbytes

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> tuple[Array, int]:
        raise NotImplementedError

    def map(self, nbytes: int, descriptor: int) -> Array:
        raise NotImplementedError

    def drop(self, chunk: Array) -> None: ...

    def block(self, chunk: Array, offset: int, nbytes: int) -> int:
        return int(chunk.ctypes.data) + offset

    def available(self) -> int:
        return 1 << 30


class Device(AddressDevice[Any, Array, Context]):
    """An open device of one stream, with blocks numbered from 1."""

    def __init__(self) -> None:
        info = DeviceInfo(
            backend="fake",
            index=0,
            description="",
            total_memory=1 << 30,
            compute_units=2,
            isolations=("inline",),
        )
        context = Context()
        super().__init__(info, BlockMemory(info.name, 1 << 30, Chunks()), context, Sources(context, 2))
        self.stream = Stream(context)
        self.count = 0

    def new(self, values: Array, strides: tuple[int, ...] | None = None, offset: int = 0) -> ops.ArraySpec:
        """Make an array of some values, with strides of its own if need be."""
        self.count += 1
        self.allocate(self.count, 4096)
        dtype = DType.of(values.dtype)
        spec = ops.ArraySpec(
            self.count, offset, dtype, values.shape, values.strides if strides is None else strides
        )
        self.look(spec)[...] = values
        return spec

    def look(self, array: ops.ArraySpec) -> Array:
        return strided(self.address(array), array.dtype, array.shape, array.strides)


class Memory(TransferLibrary, EnqueuingLibrary[Device, Any]):
    name = "memory"
    backend: ClassVar[str] = "fake"
    streams: ClassVar[type[Any]] = Stream

    kernel(ops.CopyFromHostSpec, backend="fake")(TransferLibrary.copy_from_host)
    kernel(ops.CopyToHostSpec, backend="fake")(TransferLibrary.copy_to_host)
    kernel(ops.CopySpec, backend="fake")(TransferLibrary.copy)
    kernel(ops.FillSpec, backend="fake")(TransferLibrary.fill)
    kernel(ops.JoinSpec, backend="fake")(TransferLibrary.join)


@ops.specification
class Turn(ops.OperationSpec):
    """Transposes column-major matrices, and reports their number."""

    source: ops.ArraySpec = ops.reads()
    out: ops.ArraySpec = ops.writes()
    words: ops.StatusArray = ops.status()

    def check_status(self) -> None:
        if self.words[0] == 13:
            raise ta.LibraryError("thirteen", library="turns", code="thirteen")


class Turns(EnqueuingLibrary[Device, Any]):
    name = "turns"
    backend: ClassVar[str] = "fake"
    streams: ClassVar[type[Any]] = Stream

    @kernel(Turn, backend="fake")
    def _turn(self, spec: Turn, call: EnqueuingCall[Device, Any]) -> None:
        if spec.source.dtype is DType.int8:
            raise ta.LibraryError("no small ones", library=self.name, code="small")
        rows, columns = spec.source.shape
        words = memory_at(call.status(spec.words), 4).view(np.int32)
        assert words[0] == 0
        words[0] = rows
        size = rows * columns
        nbytes = size * spec.source.dtype.itemsize
        source, out = call.packed(spec.source, "F"), call.result(spec.out)
        ctypes.memmove(out, source, nbytes)
        table = call.uploaded(np.arange(3, dtype=np.int64))
        assert list(memory_at(table, 24).view(np.int64)) == [0, 1, 2]


@pytest.fixture
def device() -> Device:
    return Device()


def run(library: KernelLibrary, spec: ops.OperationSpec, device: Device) -> None:
    library.enqueue(spec, device.stream)
    device.stream.end()
    assert device.context.depth == 0


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
LAYOUTS = [((16, 4), 0), ((4, 12), 0), ((-16, 4), 32), ((64, 8), 8), ((-64, -8), 512)]


@pytest.mark.parametrize(("strides", "offset"), LAYOUTS)
def test_arrays_of_any_strides_go_there_and_back(
    device: Device, strides: tuple[int, int], offset: int
) -> None:
    memory, out = Memory(device), device.new(np.zeros((3, 4), np.float32), strides, offset)
    run(memory, ops.CopyFromHostSpec(VALUES, out), device)
    np.testing.assert_array_equal(device.look(out), VALUES)
    back = np.zeros((4, 3), np.float32)
    run(memory, ops.CopyToHostSpec(back.T, out), device)
    np.testing.assert_array_equal(back.T, VALUES)


def test_copies_convert(device: Device) -> None:
    source, out = device.new(VALUES), device.new(np.zeros((3, 4), np.complex128), (16, 48))
    run(Memory(device), ops.CopySpec(source, out), device)
    np.testing.assert_array_equal(device.look(out), VALUES)


@pytest.mark.parametrize("value", [0, 3, 2.5])
@pytest.mark.parametrize("strides", [(16, 4), (32, 8)])
def test_fills_by_bytes_by_words_and_by_the_kernel(
    device: Device, value: float, strides: tuple[int, int]
) -> None:
    out = device.new(np.ones((3, 4), np.float32), strides)
    run(Memory(device), ops.FillSpec(value, out), device)
    np.testing.assert_array_equal(device.look(out), value)


@pytest.mark.parametrize("strides", [(16, 4), (4, 12), (-32, 8)])
def test_a_call_packs_arrays_and_returns_results_to_their_memory(
    device: Device, strides: tuple[int, int]
) -> None:
    source = device.new(VALUES, strides, 64)
    out, words = device.new(np.zeros((4, 3), np.float32), (4, 16)), np.zeros(1, np.int32)
    for _ in range(3):
        run(Turns(device), Turn(source, out, words), device)
        np.testing.assert_array_equal(device.look(out), VALUES.T)
    assert words[0] == 3
    assert device.usage()["turns"].workspace == device.memory().workspace > 0


def test_status_words_are_looked_at_when_the_stream_is_there(device: Device) -> None:
    thirteen = device.new(np.zeros((13, 1)))
    out = device.new(np.zeros((1, 13)))
    Turns(device).enqueue(Turn(thirteen, out, np.zeros(1, np.int32)), device.stream)
    with pytest.raises(ta.LibraryError, match="thirteen"):
        device.stream.end()


def test_refusals_name_the_device_and_leave_no_context_current(device: Device) -> None:
    small = device.new(np.zeros((2, 2), np.int8))
    with pytest.raises(ta.LibraryError, match="no small ones") as caught:
        run(Turns(device), Turn(small, small, np.zeros(1, np.int32)), device)
    assert caught.value.device == "fake:0"
    assert device.context.depth == 0
    with pytest.raises(TypeError, match="the FAKE backend enqueues on its own streams"):
        Turns(device).enqueue(Turn(small, small, np.zeros(1, np.int32)), object())  # type: ignore[arg-type]


def test_an_array_outside_of_its_block_is_refused(device: Device) -> None:
    inside = device.new(np.zeros(4))
    for offset, strides in ((4096, (8,)), (0, (-8,)), (16, (4000,))):
        with pytest.raises(ValueError, match="does not lie within its block of 4096 bytes"):
            device.address(ops.ArraySpec(inside.block, offset, inside.dtype, (4,), strides))
    with pytest.raises(KeyError):
        device.address(ops.ArraySpec(99, 0, inside.dtype, (4,), (8,)))


def test_facts_about_a_block_are_forgotten_with_it(device: Device) -> None:
    block, told = device.new(np.zeros(4)).block, list[int]()
    device.invalidate_with(block, told.append)
    device.renew(block)
    device.free(block)
    assert told == [block]
