"""Shared fixtures of the backends' conformance tests: they know only the protocols and specifications."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from trio_accel.backends import list_devices, resolve
from trio_accel.backends.base import (
    AccelBackend,
    AccelDevice,
    AccelEvent,
    AccelStream,
    ChunkKeeper,
    DType,
    KernelLibrary,
    NotSupportedError,
)
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopyToHostSpec,
    OperationSpec,
    contiguous_strides,
)

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

Array: TypeAlias = npt.NDArray[Any]

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
REAL_OF = {"complex128": "float64", "complex64": "float32"}


class Bell:
    """A waker that remembers what was true when it was rung, and can be waited for."""

    def __init__(self, event: AccelEvent | None = None) -> None:
        self.rings: list[bool] = []
        self.thread: str | None = None
        self._event = event
        self._rung = threading.Event()

    def ring(self) -> None:
        self.rings.append(self._event is None or self._event.is_done)
        self.thread = threading.current_thread().name
        self._rung.set()

    def wait(self) -> None:
        assert self._rung.wait(30), "the bell was never rung"


@attrs.define(eq=False)
class Rig:
    """An open device with one stream, and short ways to use it."""

    device: AccelDevice
    stream: AccelStream
    _ids: Iterator[int] = attrs.field(factory=itertools.count)
    _libraries: dict[str, KernelLibrary] = attrs.field(factory=dict)
    _blocks: list[int] = attrs.field(factory=list)

    def library(self, name: str) -> KernelLibrary:
        if name not in self._libraries:
            self._libraries[name] = self.device.open_library(name)
        return self._libraries[name]

    def allocate(self, nbytes: int) -> int:
        block = next(self._ids)
        self.device.allocate(block, nbytes)
        self._blocks.append(block)
        return block

    def close_libraries(self) -> None:
        for library in self._libraries.values():
            library.close()
        self._libraries.clear()

    def free(self, array: ArraySpec) -> None:
        self._blocks.remove(array.block)
        self.device.free(array.block)

    def free_all(self) -> None:
        for block in self._blocks:
            self.device.free(block)
        self._blocks.clear()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> ArraySpec:
        dtype = DType.of(dtype)
        strides = contiguous_strides(shape, dtype.itemsize)
        return ArraySpec(self.allocate(math.prod(shape) * dtype.itemsize), 0, dtype, shape, strides)

    def put(self, host: Any) -> ArraySpec:
        """Copy to a contiguous device array."""
        host = np.asarray(host)
        array = self.empty(host.shape, host.dtype)
        self.enqueue("memory", CopyFromHostSpec(host, array))
        return array

    def put_as_laid_out(self, host: Array) -> ArraySpec:
        """Copy to a device array with the strides, and the offset in its base, of the host array."""
        base = host
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.flags.contiguous or base.size == 0 or base is host
        offset = host.ctypes.data - base.ctypes.data if host.size else 0
        block = self.allocate(base.nbytes)
        array = ArraySpec(block, offset, DType.of(host.dtype), host.shape, host.strides)
        self.enqueue("memory", CopyFromHostSpec(host, array))
        return array

    def get(self, array: ArraySpec) -> Array:
        host = np.empty(array.shape, array.dtype.dtype)
        self.apply("memory", CopyToHostSpec(host, array))
        return host

    def enqueue(self, library: str, spec: OperationSpec, stream: AccelStream | None = None) -> None:
        self.library(library).enqueue(spec, stream or self.stream)

    def apply(self, library: str, spec: OperationSpec) -> None:
        """Run an operation to its end."""
        self.enqueue(library, spec)
        self.finish(self.stream)

    def finish(self, stream: AccelStream) -> None:
        event = stream.record()
        bell = Bell()
        stream.notify(event, bell)
        bell.wait()
        if event.error is not None:
            raise event.error


RigOpener: TypeAlias = Callable[[], AbstractContextManager[Rig]]


def _testable() -> list[str]:
    """The backend that the environment names, or all that can run here."""
    named = os.environ.get("TRIO_ACCEL_BACKEND", "").partition(":")[0]
    return [named] if named else list(dict.fromkeys(info.backend for info in list_devices()))


@pytest.fixture(params=_testable(), scope="session")
def backend(request: pytest.FixtureRequest) -> AccelBackend:
    return resolve(request.param)[0]


@pytest.fixture(scope="session")
def open_rig(backend: AccelBackend) -> RigOpener:
    """For tests that need several devices, or a fresh one for each Hypothesis example."""

    @contextmanager
    def open_() -> Iterator[Rig]:
        device = backend.open_device(0, memory_limit=None)
        rig = Rig(device, device.open_stream("main"))
        try:
            yield rig
        finally:
            rig.stream.synchronize()
            rig.close_libraries()
            rig.free_all()
            statistics = device.memory()
            ended = device.close(30)
        assert ended
        assert (statistics.used, statistics.blocks) == (0, 0)

    return open_


@pytest.fixture(scope="session")
def open_kept(backend: AccelBackend) -> Callable[..., AbstractContextManager[Rig]]:
    """Open a device with kept chunks; its blocks live on in them when it is closed."""

    @contextmanager
    def open_(keeper: ChunkKeeper, memory_limit: int | None = None) -> Iterator[Rig]:
        try:
            device = backend.open_device(0, memory_limit=memory_limit, keeper=keeper)
        except NotSupportedError as error:
            pytest.skip(f"no memory that outlives its process: {error}")
        try:
            yield Rig(device, device.open_stream("main"))
        finally:
            ended = device.close(30)
        assert ended
        assert (device.memory().blocks, device.memory().reserved) == (0, 0)

    return open_


@pytest.fixture
def rig(open_rig: RigOpener) -> Iterator[Rig]:
    with open_rig() as opened:
        yield opened


def _join_compilers() -> None:
    """Wait for background compilations, because code starts one after a number of runs."""
    for thread in threading.enumerate():
        if thread.name == "accel compiler":
            thread.join(30)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    _join_compilers()
    left = set(threading.enumerate()) - before
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = _descriptors()
    yield
    _join_compilers()
    left = _descriptors() - before
    assert not left, f"descriptors left open: {left}"


def _descriptors() -> set[str]:
    """Open files by number and name; none if the system does not list them."""
    folder = Path("/proc/self/fd")
    names = {entry: _target(entry) for entry in folder.iterdir()} if folder.exists() else {}
    return {f"{entry.name} {name}" for entry, name in names.items() if name is not None}


def _target(entry: Path) -> str | None:
    try:
        return str(entry.readlink())
    except FileNotFoundError:  # the descriptor that listed them
        return None


@pytest.fixture(scope="session")
def make_bell() -> Callable[..., Bell]:
    return Bell


@pytest.fixture(scope="session")
def random_array() -> Callable[..., Array]:
    """Numbers of any type, about 1 in size (integers: up to 5)."""

    def make(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
        dtype = DType.of(dtype)
        rng = np.random.default_rng(seed)
        if dtype.kind in ("int", "uint"):
            return rng.integers(0 if dtype.kind == "uint" else -5, 6, shape).astype(dtype.dtype)
        numbers = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        return np.asarray(numbers if dtype.kind == "complex" else numbers.real).astype(dtype.dtype)

    return make


@pytest.fixture(scope="session")
def exact() -> Callable[[Array], Array]:
    """The same numbers in double precision."""

    def make(array: Array) -> Array:
        return array.astype(np.complex128 if DType.of(array.dtype).kind == "complex" else np.float64)

    return make


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    def check(actual: Array, expected: Array, terms: int = 1) -> None:
        """Compare with a reference in double precision: relative to its largest number, or 1."""
        name = str(DType.of(actual.dtype))
        tolerance = TOLERANCES[REAL_OF.get(name, name)] * math.sqrt(max(terms, 1))
        assert actual.shape == expected.shape
        if actual.size:
            wide = actual.astype(np.complex128 if name in REAL_OF else np.float64)
            error = np.abs(wide - expected).max()
            assert error <= tolerance * max(1.0, float(np.abs(expected).max())), (name, error)

    return check
