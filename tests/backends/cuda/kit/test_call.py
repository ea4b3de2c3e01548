"""A kernel's view of its call: arrays without gaps, workspace, status words."""

from __future__ import annotations

import ctypes
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from own_modules import Every, Moved, install

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from trio_accel.backends.base import DType, LibraryError, OutOfMemoryError
from trio_accel.backends.base.contract.device_array import DeviceArray
from trio_accel.backends.base.contract.ops import ArraySpec, OperationSpec
from trio_accel.backends.base.gpu.workspace import Workspace
from trio_accel.backends.base.kit.kernels import kernel
from trio_accel.backends.cuda.kit._library import KernelCall

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]

Array = npt.NDArray[Any]
Kernel = Callable[[Any, KernelCall], object]
Runner = Callable[..., None]

MEGABYTE = 1 << 20


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs an operation to its end by a kernel, in a library of its own."""

    def run(rig: Any, spec: OperationSpec, function: Kernel) -> None:
        # A function declares its kernels once.
        declared = kernel(type(spec), backend="cuda")(partial(function))
        rig.apply(install(monkeypatch, declared=declared), spec)

    return run


@pytest.fixture
def small(rig: Any, backend: Any) -> Any:
    """A device with one megabyte of memory."""
    device = backend.open_device(0, memory_limit=MEGABYTE)
    small = type(rig)(device, device.open_stream("main"))
    yield small
    small.stream.synchronize()
    small.close_libraries()
    small.free_all()
    assert device.close(30)
    assert device.memory().workspace == 0


def flat(address: int, of: ArraySpec) -> DeviceArray:
    return DeviceArray.packed(address, of.dtype, (of.size,))


def in_order(host: Array, order: str) -> Array:
    """The elements as they lie where the matrices are by rows, or by columns."""
    return (host if order == "C" or host.ndim < 2 else host.swapaxes(-1, -2)).ravel()


def views() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    matrix, stack = rng.standard_normal((6, 8)), rng.standard_normal((3, 4, 5))
    return {
        "by rows": matrix,
        "by columns": matrix.T,
        "every other row": matrix[::2],
        "every other column, backwards": matrix[:, ::-2],
        "backwards": matrix[::-1],
        "part": matrix[1:4, 2:7],
        "vector": matrix[0],
        "vector with gaps": matrix[:, 3],
        "stack": stack,
        "stack by columns": stack.swapaxes(-1, -2),
        "stack with gaps": stack[::2, :, 1:4],
        "stack in another order": stack.transpose(1, 0, 2),
        "one element": matrix[2:3, 3:4],
        "nothing": matrix[:0],
        "complex": matrix[:, ::2] + 1j * matrix[:, 1::2],
        "complex, by columns with gaps": (matrix + 1j)[::3].T,
    }


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", views())
def test_arrays_without_gaps(rig: Any, run: Runner, name: str, order: Any) -> None:
    host = views()[name]
    source, out = rig.put_as_laid_out(host), rig.empty((host.size,), host.dtype)

    def pack(spec: Moved, call: KernelCall) -> None:
        call.convert(flat(call.packed(spec.source, order), spec.source), call.array(spec.out))

    run(rig, Moved(source, out, order), pack)
    np.testing.assert_array_equal(rig.get(out), in_order(host, order))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "name", ["by columns", "complex", "complex, by columns with gaps", "stack with gaps"]
)
def test_a_conjugated_copy(rig: Any, run: Runner, name: str, order: Any) -> None:
    host = views()[name]
    source, out = rig.put_as_laid_out(host), rig.empty((host.size,), host.dtype)

    def copy(spec: Moved, call: KernelCall) -> None:
        packed = call.copy_of(spec.source, order, conjugate=True)
        assert packed.address != call.address_of(spec.source)
        assert packed.shape == (host.shape if order == "C" else host.swapaxes(-1, -2).shape)
        call.convert(flat(packed.address, spec.source), call.array(spec.out))

    run(rig, Moved(source, out, order), copy)
    np.testing.assert_array_equal(rig.get(out), in_order(host.conj(), order))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", views())
def test_results_reach_the_memory_of_the_array(rig: Any, run: Runner, name: str, order: Any) -> None:
    host = views()[name]
    source = rig.put(in_order(host, order).copy())
    out = rig.put_as_laid_out(np.zeros_like(host.base if host.base is not None else host))
    shifted = host.ctypes.data - host.base.ctypes.data if host.base is not None and host.size else 0
    out = attrs.evolve(out, offset=shifted, shape=host.shape, strides=host.strides)

    def unpack(spec: Moved, call: KernelCall) -> None:
        call.convert(call.array(spec.source), flat(call.result(spec.out, order), spec.out))

    run(rig, Moved(source, out, order), unpack)
    np.testing.assert_array_equal(rig.get(out), host)


def test_fitting_layouts_are_not_copied(rig: Any, run: Runner) -> None:
    """Then its own address is given, and no workspace is taken."""
    rows, columns = rig.put(np.ones((3, 4))), attrs.evolve(rig.put(np.ones((3, 4))), strides=(8, 24))

    def look(spec: Moved, call: KernelCall) -> None:
        assert call.packed(rows) == call.result(rows) == call.address_of(rows)
        assert call.packed(columns, "F") == call.result(columns, "F") == call.address_of(columns)

    run(rig, Moved(rows, columns, ""), look)
    assert (rig.device.arena.nbytes, rig.device.memory().workspace) == (0, 0)


class Taking:
    """A kernel that takes a requested amount of workspace."""

    def __init__(self, rig: Any, run: Runner) -> None:
        self._rig = rig
        self._run = run
        self._array = rig.empty((1,), "float64")
        self.during: Callable[[], None] = lambda: None

    def __call__(self, *sizes: int) -> list[int]:
        """Returns the addresses."""
        found: list[int] = []

        def take(spec: Moved, call: KernelCall) -> None:
            try:
                for size in sizes:
                    found.append(call.workspace(size))
                    if size:
                        driver.cuMemsetD8Async(found[-1], 1, size, call.handle)
            finally:
                self.during()

        self._run(self._rig, Moved(self._array, self._array, ""), take)
        return found

    @property
    def nbytes(self) -> int:
        """The bytes counted by the device; the arena has as many."""
        counted: int = self._rig.device.memory().workspace
        assert counted == self._rig.device.arena.nbytes
        return counted


def test_workspace_is_used_again(rig: Any, run: Runner) -> None:
    take = Taking(rig, run)
    assert (take(0), take.nbytes) == ([0], 0)
    (first,) = take(1000)
    assert (first % 256, take.nbytes) == (0, 1024)
    assert take(300, 0, 512) == [first, 0, first + 512]
    assert take(1024) == [first]
    assert take.nbytes == 1024


def test_workspace_that_grows_in_the_middle_of_a_call(rig: Any, run: Runner) -> None:
    take = Taking(rig, run)
    (first,) = take(1000)
    one, two, three = take(512, 4096, 256)
    assert one == first
    assert len({one, two, three}) == 3
    assert not one < two < one + 1024
    # The next call gets it in one piece.
    assert take.nbytes == 512 + 4096 + 256
    one, two, three = take(512, 4096, 256)
    assert (two - one, three - two) == (512, 4096)
    assert take.nbytes == 512 + 4096 + 256


def test_each_stream_has_an_area_of_its_own(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    @kernel(Moved, backend="cuda")
    def take(spec: Moved, call: KernelCall) -> None:
        found.append(call.workspace(1024))

    name, array = install(monkeypatch, take=take), rig.empty((1,), "float64")
    streams = [rig.stream, rig.device.open_stream("other")] * 2
    for stream in streams:
        rig.enqueue(name, Moved(array, array, ""), stream)
        rig.finish(stream)
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert rig.device.memory().workspace == 2048
    # It ends with its stream, because each restart of a library opens another.
    streams[1].close()
    end = time.monotonic() + 30
    while not streams[1].has_ended:
        assert time.monotonic() < end
        time.sleep(0.001)
    rig.device.open_stream("third").close()
    assert rig.device.memory().workspace == 1024


def test_more_workspace_than_the_limit_leaves(small: Any, run: Runner) -> None:
    block = small.empty((MEGABYTE // 4,), "uint8")
    take = Taking(small, run)
    take(MEGABYTE // 4)
    with pytest.raises(OutOfMemoryError) as caught:
        take(MEGABYTE)
    error = caught.value
    free = MEGABYTE // 4 * 3 - 8
    assert (error.requested, error.free, error.total, error.device) == (MEGABYTE, free, MEGABYTE, "cuda:0")
    assert small.stream.failure is None
    # A larger area takes the place of the other one, so both need not fit.
    for size in (MEGABYTE // 4, MEGABYTE // 2):
        take(size)
        assert take.nbytes == size
    small.free(block)


def test_an_operation_keeps_its_memory_when_there_is_no_more(small: Any, run: Runner) -> None:
    take = Taking(small, run)
    quarter = MEGABYTE // 4
    take(quarter)
    seen: list[int] = []
    take.during = lambda: seen.append(small.device.memory().workspace)
    with pytest.raises(OutOfMemoryError):
        take(quarter, MEGABYTE)
    assert seen == [quarter]
    assert take.nbytes == quarter


def test_areas_that_cannot_become_one(rig: Any, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation had what it needs."""
    take = Taking(rig, run)
    take(1024)
    arena = rig.device.arena
    whole = arena.take

    def refuse(stream: Any, nbytes: int) -> int:
        if nbytes == 1024 + 4096:
            raise OutOfMemoryError("no room", requested=nbytes, free=0, total=MEGABYTE)
        return int(whole(stream, nbytes))

    with monkeypatch.context() as patch:
        patch.setattr(arena, "take", refuse)
        take(1024, 4096)
        assert take.nbytes == 0
    take(1024, 4096)
    assert take.nbytes > 0


def test_blocks_go_before_workspace(small: Any, run: Runner) -> None:
    take = Taking(small, run)
    take(MEGABYTE // 2)
    assert take.nbytes == MEGABYTE // 2
    block = small.empty((MEGABYTE // 4 * 3,), "uint8")
    assert take.nbytes == 0
    with pytest.raises(OutOfMemoryError):
        take(MEGABYTE // 2)
    small.free(block)
    take(MEGABYTE // 2)
    assert take.nbytes == MEGABYTE // 2


def test_workspace_in_use_is_not_given_back(small: Any, run: Runner) -> None:
    take = Taking(small, run)
    take(MEGABYTE // 2)
    hold = small.stream.hold()
    event = small.stream.record()
    block = small.empty((MEGABYTE // 4 * 3,), "uint8")
    assert take.nbytes == MEGABYTE // 2
    hold.release()
    small.finish(small.stream)
    assert event.is_done
    small.free(block)


def test_idle_streams_make_way_for_others(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @kernel(Moved, backend="cuda")
    def take(spec: Moved, call: KernelCall) -> None:
        call.workspace(MEGABYTE // 4 * 3)

    name, array = install(monkeypatch, take=take), small.empty((1,), "float64")
    for stream in (small.stream, small.device.open_stream("other")) * 2:
        small.enqueue(name, Moved(array, array, ""), stream)
        small.finish(stream)
        assert small.device.memory().workspace == MEGABYTE // 4 * 3


def test_host_workspace_lives_until_the_stream_is_there(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []

    @kernel(Moved, backend="cuda")
    def take(spec: Moved, call: KernelCall) -> None:
        assert call.host_workspace(0) == 0
        addresses.append(call.host_workspace(MEGABYTE))
        ctypes.memset(addresses[-1], 7, MEGABYTE)

    name, array = install(monkeypatch, take=take), rig.empty((1,), "float64")
    rig.apply(name, Moved(array, array, ""))
    hold = rig.stream.hold()
    tracemalloc.start()
    try:
        rig.enqueue(name, Moved(array, array, ""))
        assert tracemalloc.get_traced_memory()[0] >= MEGABYTE
        assert ctypes.string_at(addresses[-1], MEGABYTE) == bytes([7]) * MEGABYTE
        hold.release()
        rig.finish(rig.stream)
        assert tracemalloc.get_traced_memory()[0] < MEGABYTE
    finally:
        tracemalloc.stop()


@kernel(Every, backend="cuda")
def every(spec: Every, call: KernelCall) -> None:
    """See `Every`."""
    out = call.array(spec.out)
    arrays = [(spec.factor, term) for term in spec.terms]
    if spec.bias is not None:
        arrays.append((1.0, spec.bias))
    for number, (factor, array) in enumerate(arrays):
        row = DeviceArray(out.address + number * out.strides[0], out.dtype, out.shape[1:], out.strides[1:])
        call.convert(call.array(array), row, scale=factor)
    words = call.status(spec.made)
    for number, value in enumerate((len(arrays), spec.fails)):
        call.fill(DeviceArray.packed(words + 4 * number, DType.int32, ()), value)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_role(rig: Any, monkeypatch: pytest.MonkeyPatch, count: int, has_bias: bool) -> None:
    name = install(monkeypatch, every=every)
    rows = count + has_bias
    hosts = [np.arange(4.0) + number for number in range(count)]
    bias = rig.put(np.full(4, -1.0)) if has_bias else None
    out, made = rig.empty((rows, 4), "float64"), np.full(2, 99, np.int32)
    spec = Every(tuple(map(rig.put, hosts)), bias, out, 0, 2.0, made)
    rig.apply(name, spec)
    expected = [2.0 * host for host in hosts] + [np.full(4, -1.0)] * has_bias
    np.testing.assert_array_equal(rig.get(out), np.reshape(expected, (rows, 4)))
    assert made.tolist() == [rows, 0]


def test_status_words_belong_to_their_operation(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, term = install(monkeypatch, every=every), rig.put(np.ones(4))
    fails = (0, 3, 0, 4)
    specs = [
        Every((term,), None, rig.empty((1, 4), "float64"), code, 1.0, np.zeros(2, np.int32)) for code in fails
    ]
    rig.apply(name, specs[0])
    hold, events = rig.stream.hold(), []
    for spec in specs:
        spec.made[:] = 0
        rig.enqueue(name, spec)
        events.append(rig.stream.record())
    assert [spec.made.tolist() for spec in specs] == [[0, 0]] * 4
    hold.release()
    rig.stream.synchronize()
    assert [str(event.error or "").partition(" [")[0] for event in events] == [
        "",
        "row 3 is bad",
        "",
        "row 4 is bad",
    ]
    assert [spec.made.tolist() for spec in specs] == [[1, code] for code in fails]
    assert rig.stream.failure is None


def test_words_of_a_kernels_own(rig: Any, run: Runner) -> None:
    array, seen = rig.empty((1,), "float64"), []

    def refuse(words: Array) -> None:
        seen.append(words.tolist())
        raise LibraryError("refused", library="own", code="own")

    def count(spec: Moved, call: KernelCall) -> None:
        first = call.words(3, lambda words: seen.append(words.tolist()))
        second = call.words(1, refuse)
        call.fill(DeviceArray.packed(first + 4, DType.int32, (2,)), -5)
        call.fill(DeviceArray.packed(second, DType.int32, (1,)), 8)

    for _ in range(2):
        with pytest.raises(LibraryError, match="refused"):
            run(rig, Moved(array, array, ""), count)
    assert seen == [[0, -5, -5], [8]] * 2


def test_a_kernel_that_raises(rig: Any, run: Runner) -> None:
    """Its enqueued work stays, and its workspace is the next one's."""
    array, take = rig.put(np.arange(4.0)), Taking(rig, run)

    def fail(spec: Moved, call: KernelCall) -> None:
        call.workspace(1000)
        call.words(1, lambda words: pytest.fail("nothing was to be looked at"))
        raise error

    for error in (RuntimeError("broken"), LibraryError("refused", library="own", code="own")):
        with pytest.raises(type(error)) as caught:
            run(rig, Moved(array, array, ""), fail)
        assert caught.value is error
    assert getattr(error, "device", None) == "cuda:0"
    before = take.nbytes
    take(256)
    assert take.nbytes == before > 1000
    np.testing.assert_array_equal(rig.get(array), np.arange(4.0))


def test_the_own_memory_of_a_handle_is_counted_and_never_refused(small: Any, run: Runner) -> None:
    device, take = small.device, Taking(small, run)
    own = Workspace(device.blocks, "own")
    with device.context:
        first = own.reserve(small.stream, 2 * MEGABYTE)
        assert own.reserve(small.stream, MEGABYTE) == first
        assert device.memory().workspace == 2 * MEGABYTE
        own.reserve(small.stream, 4 * MEGABYTE)
    assert device.memory().workspace == 4 * MEGABYTE
    # It takes no room from arrays and from other operations.
    take(MEGABYTE // 2)
    assert device.memory().workspace == 4 * MEGABYTE + MEGABYTE // 2
    small.free(small.empty((MEGABYTE // 4,), "uint8"))
    with device.context:
        own.close()
    assert take.nbytes == MEGABYTE // 2
