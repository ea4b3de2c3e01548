"""The handle of cuBLAS: its workspace, its streams, the meanings of its statuses, and its caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trio_accel import linalg
from trio_accel.backends.base import ContextPoisonedError, LibraryError, NotSupportedError, OutOfMemoryError
from trio_accel.backends.base.contract.ops import MatmulSpec

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]


def product(rig: Any, n: int = 4, dtype: str = "float64") -> MatmulSpec:
    a = rig.put(np.arange(n * n).reshape(n, n).astype(dtype))
    return MatmulSpec(a, a, rig.empty((n, n), dtype))


def check(rig: Any, spec: MatmulSpec) -> None:
    n = spec.a.shape[0]
    a = np.arange(n * n).reshape(n, n)
    np.testing.assert_array_equal(rig.get(spec.out), a @ a)


def test_every_product_has_a_workspace_of_ours(rig: Any) -> None:
    """A change of the stream takes it away."""
    library = ctypes.CDLL("libcublas.so.13")
    if not hasattr(library, "stand_in_cublas_without_workspace"):
        pytest.skip("the real library does not tell")
    library.stand_in_cublas_without_workspace.restype = ctypes.c_ulong
    before = library.stand_in_cublas_without_workspace()
    other = rig.device.open_stream("other")
    specs = [product(rig) for _ in range(6)]
    rig.finish(rig.stream)
    for number, spec in enumerate(specs):
        rig.enqueue("blas", spec, other if number % 3 else rig.stream)
    rig.finish(other)
    rig.finish(rig.stream)
    for spec in specs:
        check(rig, spec)
    assert library.stand_in_cublas_without_workspace() == before


def test_operands_packed_on_two_streams_at_once_have_separate_buffers(rig: Any) -> None:
    other = rig.device.open_stream("other")
    operands = [np.full((30, 60), number, "float32")[:, ::2] for number in (1.0, 2.0)]
    pairs = [(rig.put_as_laid_out(host), rig.empty((30, 30), "float32")) for host in operands]
    # The library waits for every stream when it is opened, and loads a kernel.
    rig.apply("blas", MatmulSpec(pairs[0][0], pairs[0][0], pairs[0][1]))
    rig.finish(rig.stream)
    holds = [rig.stream.hold(), other.hold()]
    for stream, (array, out) in zip((rig.stream, other), pairs, strict=True):
        rig.enqueue("blas", MatmulSpec(array, array, out), stream)
    for hold in holds:
        hold.release()
    rig.finish(other)
    for number, (_, out) in zip((1.0, 2.0), pairs, strict=True):
        assert (rig.get(out) == 30 * number**2).all()


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (7, LibraryError, "blas refused: .*INVALID_VALUE"),
        (15, NotSupportedError, "blas: .*NOT_SUPPORTED"),
        (3, OutOfMemoryError, "bytes requested"),
    ],
)
def test_meanings_of_statuses(
    rig: Any, monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception], text: str
) -> None:
    x = rig.put(np.ones(3))
    rig.library("blas")
    fail(monkeypatch, status)
    with pytest.raises(error, match=text) as caught:
        rig.enqueue("blas", linalg.scal.spec(2.0, x))
    assert getattr(caught.value, "code", "INVALID_VALUE") == "INVALID_VALUE"
    monkeypatch.undo()
    rig.apply("blas", linalg.scal.spec(2.0, x))
    assert rig.get(x).tolist() == [2.0] * 3


def test_a_library_that_fails_otherwise_is_not_trusted(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvmath.bindings import cublas

    rig.library("blas")
    fail(monkeypatch, 14)
    with pytest.raises(cublas.cuBLASError, match=r"INTERNAL_ERROR|UNKNOWN"):
        rig.enqueue("blas", linalg.scal.spec(2.0, rig.put(np.ones(3))))


def test_a_preparation_in_a_lost_context_reports_the_loss(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = rig.library("blas").prepare(product(rig))
    fail(monkeypatch, 13, "gemm_ex_64")
    rig.device.poison("a stray write")
    with pytest.raises(ContextPoisonedError, match="a stray write"):
        make()


def fail(monkeypatch: pytest.MonkeyPatch, status: int, function: str = "scal_ex_64") -> None:
    from nvmath.bindings import cublas

    def raises(*_: object) -> None:
        raise cublas.cuBLASError(status)

    monkeypatch.setattr(cublas, function, raises)


def test_the_kernel_for_whole_numbers_is_made_once_before_it_is_needed(rig: Any) -> None:
    library = rig.library("blas")
    assert library.prepare(product(rig, dtype="float32")) is None
    spec = product(rig, dtype="int32")
    make: Callable[[], None] = library.prepare(spec)
    make()
    assert library.prepare(spec) is None
    rig.apply("blas", spec)
    check(rig, spec)


def test_libraries_for_products_of_a_type_are_loaded_before_the_first(rig: Any) -> None:
    library = rig.library("blas")
    before = product(rig, dtype="float32")
    rig.enqueue("blas", before)
    for dtype in ("float64", "complex64", "bfloat16"):
        spec = product(rig, dtype=dtype)
        load: Callable[[], None] = library.prepare(spec)
        load()
        assert library.prepare(spec) is None
        # The handle is set to the stream again, in the required mode.
        rig.apply("blas", spec)
        check(rig, spec)
        rig.apply("blas", linalg.scal.spec(2.0, spec.out))
    check(rig, before)


def test_the_caches_stay_within_bounds(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_accel.backends.cuda.libraries.blas import BlasLibrary

    monkeypatch.setattr(BlasLibrary, "most_plans", 4)
    for n in (1, 2, 3, 4, 5, 6, 1, 6):
        spec = product(rig, n)
        rig.apply("blas", spec)
        check(rig, spec)
    assert len(rig.library("blas")._plans) == 4


def test_memory_is_given_back_with_the_handle(rig: Any) -> None:
    library = rig.device.open_library("blas")
    spec = product(rig)
    library.enqueue(spec, rig.stream)
    rig.finish(rig.stream)
    assert library._blas._workspace._areas
    library.close()
    assert not library._blas._workspace._areas
    check(rig, spec)
