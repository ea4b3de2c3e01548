"""A cached plan of a repeated operation holds no longer than it may."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse

from trio_accel.backends.base.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopyToHostSpec,
    FftSpec,
    OperationSpec,
    SpmvCsrSpec,
)

pytestmark = pytest.mark.usefixtures("only_cuda")

Spec = FftSpec | SpmvCsrSpec


@attrs.frozen
class Repeated:
    """An operation that was done four times.

    Attributes:
        library: Whose it is.
        spec: The same one each time.
        expected: What it makes of its arrays, by the host.
    """

    library: str
    spec: Spec
    expected: Callable[[], npt.NDArray[Any]]


def transform(rig: Any) -> Repeated:
    source = rig.put(np.arange(12.0).reshape(3, 4).astype(np.complex64))
    out = rig.empty((3, 4), "complex64")
    spec = FftSpec("c2c", "forward", (4,), (1,), "backward", source, out)
    return Repeated("fft", spec, lambda: np.fft.fft(rig.get(source).astype(np.complex128)))


def product(rig: Any) -> Repeated:
    matrix = scipy.sparse.csr_array(np.array([[1.0, 2, 0], [0, 0, 3]]))
    parts = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32), matrix.data
    indptr, indices, data = map(rig.put, parts)
    x, out = rig.put(np.array([1.0, 10, 100])), rig.empty((2,), "float64")
    spec = SpmvCsrSpec(2, 3, indptr, indices, data, x, out)

    def expected() -> npt.NDArray[Any]:
        values = scipy.sparse.csr_array((rig.get(data), parts[1], parts[0]), shape=(2, 3))
        result: npt.NDArray[Any] = values @ rig.get(x)
        return result

    return Repeated("sparse", spec, expected)


@pytest.fixture(params=[transform, product])
def repeated(rig: Any, request: pytest.FixtureRequest) -> Repeated:
    made: Repeated = request.param(rig)
    for _ in range(4):
        check(rig, made)
    # Each has the plan of its layout, and nothing that knows where it lies.
    assert rig.library(made.library).prepare(made.spec) is None
    return made


def write(rig: Any, array: ArraySpec, values: npt.NDArray[Any]) -> None:
    rig.apply("memory", CopyFromHostSpec(values.astype(array.dtype.dtype), array))


def check(rig: Any, repeated: Repeated, stream: Any = None) -> None:
    write(rig, repeated.spec.out, np.zeros(repeated.spec.out.shape))
    rig.enqueue(repeated.library, repeated.spec, stream or rig.stream)
    rig.finish(stream or rig.stream)
    np.testing.assert_allclose(rig.get(repeated.spec.out), repeated.expected(), rtol=1e-6)


def source_of(spec: OperationSpec) -> ArraySpec:
    return spec.source if isinstance(spec, FftSpec) else spec.x  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("which", ["source", "out"])
def test_when_a_block_is_elsewhere(rig: Any, repeated: Repeated, which: str) -> None:
    """One that was given back is made again under its id, and another lies where it was."""
    array = repeated.spec.out if which == "out" else source_of(repeated.spec)
    rig.device.free(array.block)
    other = rig.put(np.full(array.shape, 7, array.dtype.dtype))
    rig.device.allocate(array.block, array.size * array.dtype.itemsize)
    write(rig, array, np.arange(5.0, 5 + array.size).reshape(array.shape))
    for _ in range(3):
        check(rig, repeated)
    np.testing.assert_array_equal(rig.get(other), np.full(array.shape, 7))


def test_when_what_lies_there_has_changed(rig: Any, repeated: Repeated) -> None:
    array = source_of(repeated.spec)
    write(rig, array, np.arange(20.0, 20 + array.size).reshape(array.shape))
    check(rig, repeated)


def test_on_another_stream(rig: Any, repeated: Repeated) -> None:
    other = rig.device.open_stream("other")
    for _ in range(3):
        write(rig, repeated.spec.out, np.zeros(repeated.spec.out.shape))
        # There it waits, whatever the first stream does.
        hold = other.hold()
        rig.enqueue(repeated.library, repeated.spec, other)
        event = other.record()
        rig.finish(rig.stream)
        assert not event.is_done
        np.testing.assert_array_equal(rig.get(repeated.spec.out), np.zeros(repeated.spec.out.shape))
        hold.release()
        rig.finish(other)
        np.testing.assert_allclose(rig.get(repeated.spec.out), repeated.expected(), rtol=1e-6)
        check(rig, repeated)


def test_with_so_many_others_that_all_are_planned_anew(rig: Any) -> None:
    repeated = product(rig)
    check(rig, repeated)
    others = [attrs.evolve(repeated.spec, out=attrs.evolve(repeated.spec.out)) for _ in range(300)]
    for other in others:
        rig.enqueue(repeated.library, other)
    rig.finish(rig.stream)
    check(rig, repeated)


@pytest.mark.parametrize("name", ["data", "x", "out"])
def test_what_has_to_be_packed_is_packed_each_time(rig: Any, name: str) -> None:
    repeated = product(rig)
    array = getattr(repeated.spec, name)
    whole = rig.put(np.zeros(2 * array.size))
    spec = attrs.evolve(repeated.spec, **{name: attrs.evolve(whole, shape=array.shape, strides=(16,))})
    x, data, structure = np.zeros(3), np.zeros(3), ([0, 1, 2], [0, 2, 3])
    for step in range(1, 5):
        for changed, values in ((spec.x, x), (spec.data, data)):
            values[:] = np.arange(step, step + 3)
            write(rig, changed, values)
        write(rig, spec.out, np.zeros(2))
        rig.apply("sparse", spec)
        expected = scipy.sparse.csr_array((data, *structure), shape=(2, 3)) @ x
        np.testing.assert_array_equal(rig.get(spec.out), expected)


def test_a_matrix_that_is_used_stays_before_others(rig: Any) -> None:
    """Also where nobody looks it up: there are more than are cached."""
    hot = product(rig)
    check(rig, hot)
    (matrix,) = rig.library("sparse")._matrices.values()
    for other in [product(rig) for _ in range(300)]:
        rig.apply("sparse", other.spec)
        rig.apply("sparse", hot.spec)
    assert matrix in rig.library("sparse")._matrices.values()
    check(rig, hot)


@pytest.fixture
def pinned(rig: Any) -> Any:
    """Host memory that the device transfers from and to by itself."""
    host = np.zeros(1 << 12, np.uint8)
    rig.device.register_host(host)
    yield host.view(np.float32)
    rig.device.unregister_host(host)


def round_trip(rig: Any, array: ArraySpec, host: Any, values: Any, back: Any = None) -> None:
    """Copy some values there and back, with specifications that are others each time."""
    host[...] = values
    rig.apply("memory", CopyFromHostSpec(host, array))
    host[...] = -1
    back = host if back is None else back
    rig.apply("memory", CopyToHostSpec(back, array))
    np.testing.assert_array_equal(back, np.broadcast_to(values, back.shape))


def are_cached(rig: Any, array: ArraySpec) -> list[bool]:
    library = rig.library("memory")
    return [cache.find(array, rig.stream) is not None for cache in (library._up, library._down)]


def test_a_repeated_copy_has_the_numbers_of_its_time(rig: Any, pinned: Any) -> None:
    array = rig.empty(pinned.shape, "float32")
    for step in range(4):
        round_trip(rig, array, pinned, step + np.arange(pinned.size))
        assert are_cached(rig, array) == [True, True]


def test_a_copy_to_a_block_that_is_elsewhere_now(rig: Any, pinned: Any) -> None:
    array = rig.empty(pinned.shape, "float32")
    for step in range(2):
        round_trip(rig, array, pinned, step)
    rig.device.free(array.block)
    other = rig.put(np.full(pinned.shape, 7, np.float32))
    rig.device.allocate(array.block, pinned.nbytes)
    for step in range(2):
        round_trip(rig, array, pinned, step)
    np.testing.assert_array_equal(rig.get(other), np.full(pinned.shape, 7))


def test_copies_between_one_array_and_others_of_the_host(rig: Any, pinned: Any) -> None:
    """Also one of an array that is gone, in whose place another is; and ordinary memory in between."""
    array = rig.empty((16,), "float32")
    parts = [pinned[start : start + 16] for start in range(0, 64, 16)]
    ordinary = np.zeros(16, np.float32)
    for step, host in enumerate([*parts, *parts[::-1], ordinary, *parts, ordinary]):
        round_trip(rig, array, host, step, parts[step % 3])
        round_trip(rig, array, pinned[16 * (step % 4) :][:16], 100 + step)


@pytest.mark.filterwarnings("ignore:Setting the (strides|shape):DeprecationWarning")
def test_a_host_array_that_was_changed_in_place(rig: Any, pinned: Any) -> None:
    array = rig.empty((8,), "float32")
    host = pinned[:15][:8]
    for step in range(2):
        round_trip(rig, array, host, step)
    host.strides = (8,)
    for step in range(2):
        pinned[:16] = -5
        round_trip(rig, array, host, np.arange(8) + step)
        assert (pinned[1:15:2] == -5).all()


def test_host_memory_that_the_device_does_not_know_is_copied_each_time(rig: Any) -> None:
    host = np.arange(8.0)
    array = rig.empty(host.shape, "float64")
    for step in range(3):
        round_trip(rig, array, host, step)
    assert are_cached(rig, array) == [False, False]


def test_the_cache_keeps_neither_array_alive(rig: Any, pinned: Any) -> None:
    array, host = rig.empty((4,), "float32"), pinned[:4]
    round_trip(rig, array, host, 3)
    assert are_cached(rig, array) == [True, True]
    gone = weakref.ref(host), weakref.ref(array)
    up = rig.library("memory")._up
    (entry,) = up._entries.values()
    other = attrs.evolve(array)
    del host, array
    assert [each() for each in gone] == [None, None]
    # Another with the identity of one that is gone is not it.
    up._entries = {id(other): entry}
    assert up.find(other, rig.stream) is None
    round_trip(rig, other, pinned[4:8], 5)
