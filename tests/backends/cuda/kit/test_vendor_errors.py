"""The meanings of vendor libraries' codes, if a library of ours calls several of them."""

from __future__ import annotations

from typing import Any

import pytest

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base import kernel

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]


def library(rig: Any, error: Exception) -> Any:
    """A library of two vendors', with one operation, which fails."""
    from nvmath.bindings import cublas, cufft

    from trio_accel.backends.cuda.kit._library import CudaLibrary

    class Two(CudaLibrary):
        name = "two"
        errors = {cublas.cuBLASError: cublas.Status, cufft.cuFFTError: cufft.Result}  # noqa: RUF012  # as there
        refused = frozenset({"INVALID_VALUE", "INVALID_SIZE"})

        @kernel(linalg.scal.spec, backend="cuda")
        def _fail(self, spec: linalg.scal.spec, call: Any) -> None:
            raise error

    return Two(rig.device)


def test_each_code_is_read_by_its_vendor(rig: Any) -> None:
    from nvmath.bindings import cublas, cufft

    cases = [
        (cublas.cuBLASError(int(cublas.Status.INVALID_VALUE)), ta.LibraryError, "INVALID_VALUE"),
        (cufft.cuFFTError(int(cufft.Result.INVALID_SIZE)), ta.LibraryError, "INVALID_SIZE"),
        (cublas.cuBLASError(int(cublas.Status.ALLOC_FAILED)), ta.OutOfMemoryError, None),
        (cufft.cuFFTError(int(cufft.Result.NOT_SUPPORTED)), ta.NotSupportedError, None),
    ]
    x = rig.put([1.0])
    for error, told, code in cases:
        with pytest.raises(told) as caught:
            library(rig, error).enqueue(linalg.scal.spec(1.0, x), rig.stream)
        assert getattr(caught.value, "code", None) == code


def test_errors_unknown_to_all_vendors_are_left_unchanged(rig: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        library(rig, ZeroDivisionError()).enqueue(linalg.scal.spec(1.0, rig.put([1.0])), rig.stream)


def test_a_function_that_the_installed_library_has_not(rig: Any) -> None:
    from nvmath.bindings._internal.utils import FunctionNotFoundError

    lacking = library(rig, FunctionNotFoundError("function cublasNew is not found"))
    with pytest.raises(ta.NotSupportedError, match=r"two: function cublasNew is not found; .* too old"):
        lacking.enqueue(linalg.scal.spec(1.0, rig.put([1.0])), rig.stream)


def test_an_error_of_a_kernel_in_a_lost_context_is_the_loss(backend: Any, rig: Any) -> None:
    """A kernel that calls the driver on its own may be the first to meet it, and raises what it likes."""
    own = type(rig)(device := backend.open_device(0, memory_limit=None), device.open_stream("main"))
    spec = linalg.scal.spec(1.0, own.put([1.0]))
    own.stream.synchronize()

    lost = library(own, ZeroDivisionError())
    own.device.poison("a stray write")
    own.device.context.is_lost = False  # nobody has asked yet
    with pytest.raises(ta.ContextPoisonedError, match="stray write") as caught:
        lost.enqueue(spec, own.stream)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert device.close(10)
