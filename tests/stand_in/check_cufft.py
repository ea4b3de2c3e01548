"""Checks the stand-in cuFFT by nvmath's bindings, against NumPy in double precision."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from checking import call, main, make_stream, open_device, read
from cuda.bindings import driver
from nvmath.bindings import cufft

Array = npt.NDArray[Any]
Status = cufft.Result

FORWARD, INVERSE = -1, 1
ERRORS = {"single": 2e-6, "double": 1e-13}
LENGTHS = [1, 2, 3, 8, 60, 97, 128]


class Rig:
    """Plans on a stream, and arrays in the device's memory."""

    def __init__(self) -> None:
        open_device()
        self.stream = make_stream()
        self.area = int(call(driver.cuMemAlloc, 1 << 20))
        self.rng = np.random.default_rng(5)

    def numbers(self, shape: tuple[int, ...], dtype: Any) -> Array:
        values = self.rng.uniform(-1, 1, shape) + 1j * self.rng.uniform(-1, 1, shape)
        return (values if np.dtype(dtype).kind == "c" else values.real).astype(dtype)

    def plan(self, lengths: tuple[int, ...], kind: Any, batch: int = 1, **layout: Any) -> int:
        """A plan for packed arrays, unless a layout is given; its tables have arrived."""
        plan = self.plan_only(lengths, kind, batch, **layout)
        call(driver.cuStreamSynchronize, driver.CU_STREAM_LEGACY)
        return plan

    def plan_only(self, lengths: tuple[int, ...], kind: Any, batch: int = 1, **layout: Any) -> int:
        half = (*lengths[:-1], lengths[-1] // 2 + 1)
        sides = half if kind in (C2R, Z2D) else lengths, half if kind in (R2C, D2Z) else lengths
        given = {
            "inembed": sides[0],
            "istride": 1,
            "idist": int(np.prod(sides[0])),
            "onembed": sides[1],
            "ostride": 1,
            "odist": int(np.prod(sides[1])),
            **layout,
        }
        plan: int = cufft.create()
        cufft.set_auto_allocation(plan, 0)
        cufft.make_plan_many64(plan, len(lengths), lengths, *given.values(), kind, batch)
        cufft.set_work_area(plan, self.area)
        cufft.set_stream(plan, int(self.stream))
        return plan

    def put(self, array: Array) -> int:
        address = int(call(driver.cuMemAlloc, max(array.nbytes, 16)))
        call(driver.cuMemcpyHtoD, address, array.ctypes.data, array.nbytes)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> Array:
        call(driver.cuStreamSynchronize, self.stream)
        return read(address, int(np.prod(shape)), dtype).reshape(shape)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> int:
        return self.put(np.full(shape, 7, dtype))


C2C, R2C, C2R = cufft.Type.C2C, cufft.Type.R2C, cufft.Type.C2R
Z2Z, D2Z, Z2D = cufft.Type.Z2Z, cufft.Type.D2Z, cufft.Type.Z2D


def close(actual: Array, expected: Array, precision: str) -> None:
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max()
    assert error <= ERRORS[precision] * max(1.0, np.abs(expected).max()), error


def status_of(function: Any, *arguments: object) -> Status:
    try:
        function(*arguments)
    except cufft.cuFFTError as error:
        return Status(error.status)
    return Status.SUCCESS


def check_complex() -> None:
    rig = Rig()
    cases = [(C2C, cufft.exec_c2c, np.complex64, "single"), (Z2Z, cufft.exec_z2z, np.complex128, "double")]
    for (kind, function, dtype, precision), n in itertools.product(cases, LENGTHS):
        for lengths in [(n,), (3, n), (4, 2, n)]:
            source = rig.numbers((2, *lengths), dtype)
            at, out = rig.put(source), rig.empty(source.shape, dtype)
            plan = rig.plan(lengths, kind, 2)
            axes = tuple(range(1, source.ndim))
            function(plan, at, out, FORWARD)
            close(rig.get(out, source.shape, dtype), np.fft.fftn(source, axes=axes), precision)
            np.testing.assert_array_equal(rig.get(at, source.shape, dtype), source)
            function(plan, at, at, INVERSE)  # in place
            close(
                rig.get(at, source.shape, dtype), np.fft.ifftn(source, axes=axes, norm="forward"), precision
            )


def check_real() -> None:
    rig = Rig()
    cases = [
        (R2C, cufft.exec_r2c, C2R, cufft.exec_c2r, np.float32, np.complex64, "single"),
        (D2Z, cufft.exec_d2z, Z2D, cufft.exec_z2d, np.float64, np.complex128, "double"),
    ]
    for (there, forward, back, inverse, real, dtype, precision), n in itertools.product(cases, LENGTHS):
        for lengths in [(n,), (3, n), (2, 3, n)]:
            source = rig.numbers((2, *lengths), real)
            axes = tuple(range(1, source.ndim))
            expected = np.fft.rfftn(source, axes=axes)
            out = rig.empty(expected.shape, dtype)
            forward(rig.plan(lengths, there, 2), rig.put(source), out)
            close(rig.get(out, expected.shape, dtype), expected, precision)
            # A half spectrum without real numbers: parts without a meaning are left out.
            half = rig.numbers(expected.shape, dtype)
            at, out = rig.put(half), rig.empty(source.shape, real)
            inverse(rig.plan(lengths, back, 2), at, out)
            expected = np.fft.irfftn(half, lengths, axes, norm="forward")
            close(rig.get(out, source.shape, real), expected, precision)
            assert np.isnan(rig.get(at, half.shape, dtype)).all(), "it destroys its input"


def check_layouts() -> None:
    """Elements chosen by `inembed`, strides and distances: compared with NumPy's own views."""
    rig = Rig()
    # Every second row, and every second of three batches of elements in each; the result has the batch last.
    whole = rig.numbers((8, 5, 3, 2), np.complex128)
    layout = {
        "inembed": (4, 10),
        "istride": 6,
        "idist": 2,
        "onembed": (4, 5),
        "ostride": 3,
        "odist": 1,
    }
    out = rig.empty((4, 5, 3), np.complex128)
    cufft.exec_z2z(rig.plan((4, 5), Z2Z, 3, **layout), rig.put(whole), out, FORWARD)
    expected = np.fft.fftn(whole[::2, :, :, 0], axes=(0, 1))
    close(rig.get(out, (4, 5, 3), np.complex128), expected, "double")


def check_gaps_are_unchanged() -> None:
    rig = Rig()
    source = rig.numbers((6, 4), np.float32)
    out = rig.empty((2 * 6, 3, 2), np.complex64)
    layout = {"onembed": (3,), "ostride": 2, "odist": 12}
    cufft.exec_r2c(rig.plan((4,), R2C, 6, **layout), rig.put(source), out)
    found = rig.get(out, (6, 2, 3, 2), np.complex64)
    close(found[:, 0, :, 0], np.fft.rfft(source), "single")
    assert (found[:, 1] == 7).all()
    assert (found[:, 0, :, 1] == 7).all()


def check_the_order_of_calls() -> None:
    rig = Rig()
    array = rig.empty((97,), np.complex64)
    plan = cufft.create()
    assert status_of(cufft.exec_c2c, plan, array, array, FORWARD) == Status.INVALID_PLAN
    layout = ((97,), (97,), 1, 97, (97,), 1, 97, C2C, 1)
    cufft.set_auto_allocation(plan, 0)
    assert cufft.make_plan_many64(plan, 1, *layout) > 0
    assert status_of(cufft.set_auto_allocation, plan, 0) == Status.INVALID_PLAN
    assert status_of(cufft.make_plan_many64, plan, 1, *layout) == Status.INVALID_PLAN
    assert status_of(cufft.exec_c2c, plan, array, array, FORWARD) == Status.NO_WORKSPACE
    call(driver.cuStreamSynchronize, driver.CU_STREAM_LEGACY)
    cufft.set_work_area(plan, rig.area)
    assert status_of(cufft.exec_r2c, plan, array, array) == Status.INVALID_TYPE
    assert status_of(cufft.exec_c2c, plan, array, array, 2) == Status.INVALID_VALUE
    assert status_of(cufft.exec_c2c, plan, array + 4, array, FORWARD) == Status.INVALID_VALUE
    cufft.exec_c2c(plan, array, array, FORWARD)
    cufft.destroy(plan)
    assert status_of(cufft.destroy, plan) == Status.INVALID_PLAN
    assert status_of(cufft.exec_c2c, plan, array, array, FORWARD) == Status.INVALID_PLAN


def check_invalid_plans() -> None:
    open_device()
    side = ((4,), 1, 4)
    cases = [
        ((1, (0,), *side, *side, C2C, 1), Status.INVALID_SIZE),
        ((1, (4,), *side, *side, C2C, 0), Status.INVALID_SIZE),
        ((1, (4,), *side, *side, 5, 1), Status.INVALID_TYPE),
        ((1, (4,), (4,), 0, 4, *side, C2C, 1), Status.INVALID_VALUE),
        ((2, (4, 4), (4, 3), 1, 16, (4, 4), 1, 16, C2C, 1), Status.INVALID_SIZE),
    ]
    for arguments, status in cases:
        assert status_of(cufft.make_plan_many64, cufft.create(), *arguments) == status, arguments
    assert status_of(cufft.make_plan_many64, 99_999, 1, (4,), *side, *side, C2C, 1) == Status.INVALID_PLAN


def check_a_million_points() -> None:
    rig = Rig()
    source = rig.numbers((1_000_000,), np.complex128)
    area = int(call(driver.cuMemAlloc, 16_000_000))
    plan, out = rig.plan(source.shape, Z2Z), rig.empty(source.shape, np.complex128)
    cufft.set_work_area(plan, area)
    cufft.exec_z2z(plan, rig.put(source), out, FORWARD)
    close(rig.get(out, source.shape, np.complex128), np.fft.fft(source), "double")


def check_without_a_context() -> None:
    call(driver.cuInit, 0)
    assert status_of(cufft.create) == Status.SETUP_FAILED


def check_tables_in_flight() -> None:
    """The default stream brings them: nobody else waits for that, and nobody else is waited for."""
    rig = Rig()
    held = make_stream()
    word = call(driver.cuMemAlloc, 16)
    call(driver.cuMemcpyHtoD, word, np.zeros(4, np.uint32).ctypes.data, 16)
    plan, array = rig.plan_only((4,), C2C), rig.put(np.ones(4, np.complex64))
    call(driver.cuStreamWaitValue32, held, word, 1, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    call(driver.cuStreamSynchronize, driver.CU_STREAM_LEGACY)
    assert driver.cuStreamQuery(held)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
    cufft.exec_c2c(plan, array, array, FORWARD)
    assert rig.get(array, (4,), np.complex64).tolist() == [4, 0, 0, 0]
    other = cufft.create()
    cufft.set_auto_allocation(other, 0)
    call(driver.cuStreamWriteValue32, rig.stream, word, 1, 0)
    cufft.make_plan_many64(other, 1, (4,), (4,), 1, 4, (4,), 1, 4, C2C, 1)
    cufft.set_stream(other, int(rig.stream))
    cufft.exec_c2c(other, array, array, FORWARD)
    code = driver.cuStreamSynchronize(rig.stream)[0]
    assert code == driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def check_a_lost_context() -> None:
    rig = Rig()
    plan, array = rig.plan((4,), C2C), rig.empty((4,), np.complex64)
    library = ctypes.CDLL("libcuda.so.1")
    assert library.stand_in_fail(ctypes.c_void_p(int(rig.stream)), 700) == 0
    driver.cuStreamSynchronize(rig.stream)
    assert status_of(cufft.exec_c2c, plan, array, array, FORWARD) == Status.EXEC_FAILED


if __name__ == "__main__":
    main(globals().items())
