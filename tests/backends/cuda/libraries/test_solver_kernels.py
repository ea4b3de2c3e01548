"""Kernels around cuSOLVER's routines, which need no cuSOLVER."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(BACKEND != "cuda", reason="kernels of the CUDA backend"),
]
DTYPES = ["float32", "float64", "complex64", "complex128"]


class Workshop:
    """The kernels, on the rig's stream."""

    def __init__(self, rig: Any) -> None:
        from trio_accel.backends.cuda.libraries._cusolver import SolverKernels

        self.rig = rig
        self.kernels = SolverKernels(rig.device.kernels)
        self.stream = rig.stream.handle

    def apply(
        self, name: Any, values: npt.NDArray[Any], status: list[int], triangle: str
    ) -> tuple[npt.NDArray[Any], list[int]]:
        """The matrices and the status words afterwards."""
        array, words = self.rig.put(values), self.rig.put(np.array(status, np.int32))
        with self.rig.device.context:
            self.kernels.apply(
                self.stream,
                name,
                self.rig.device.device_array(array),
                self.rig.device.address(words),
                triangle,
            )
        return self.rig.get(array), self.rig.get(words).tolist()


@pytest.fixture
def workshop(rig: Any) -> Workshop:
    return Workshop(rig)


def matrices(dtype: str) -> npt.NDArray[Any]:
    values = np.arange(1, 37).reshape(4, 3, 3).astype(dtype)
    return values * (1 + 2j) if "complex" in dtype else values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("triangle", "seen"), [("", [-1, -1, -1]), ("L", [-1, -1, 0]), ("U", [-1, 0, -1])])
def test_nan_and_infinity_are_found_in_a_triangle(
    workshop: Workshop, dtype: str, triangle: str, seen: list[int]
) -> None:
    values = matrices(dtype)
    values[0, 1, 1], values[1, 2, 0], values[2, 0, 1] = np.nan, np.inf, -np.inf
    if "complex" in dtype:
        values[0, 1, 1] = complex(1, np.nan)
    _, status = workshop.apply("screen", values, [0] * 4, triangle)
    assert status == [*seen, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_with_a_status_become_zero(workshop: Workshop, dtype: str) -> None:
    values = matrices(dtype)
    made, status = workshop.apply("blank", values, [0, -1, 0, 2], "L")
    assert status == [0, -1, 0, 2]
    expected = values.copy()
    expected[[1, 3]] = 0
    expected[:, [0, 1, 2], [0, 1, 2]] = expected[:, [0, 1, 2], [0, 1, 2]].real
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("triangle", ["L", "U"])
def test_a_triangle_is_cleared_and_the_diagonal_looked_at(
    workshop: Workshop, dtype: str, triangle: str
) -> None:
    values = matrices(dtype)
    values[0, 1, 1] = values[0, 2, 2] = np.nan
    values[1, 0, 0], values[2, 2, 2] = np.inf, np.nan
    values[3, 1, 0] = values[3, 0, 1] = np.nan
    made, status = workshop.apply("finish_triangle", values, [0, 3, 1, 0], triangle)
    assert status == [2, 1, 1, 0]
    np.testing.assert_array_equal(made, np.triu(values) if triangle == "L" else np.tril(values))


def test_the_status_of_a_routine_does_not_hide_an_earlier_finding(workshop: Workshop) -> None:
    rig = workshop.rig
    said, status = rig.put(np.array([0, 5, 7], np.int32)), rig.put(np.array([-1, 0, -1], np.int32))
    with rig.device.context:
        workshop.kernels.merge(workshop.stream, rig.device.address(said), rig.device.address(status), 3)
    assert rig.get(status).tolist() == [-1, 5, -1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_pivot_is_not_zero(workshop: Workshop, dtype: str) -> None:
    rig, values = workshop.rig, matrices(dtype)
    values[1, 0, 0], values[1, 2, 2] = np.nan, 0
    values[2, 1, 1], values[3, 0, 0] = np.nan, 0
    factors, status = rig.put(values), rig.put(np.array([0, 1, 2, 1], np.int32))
    with rig.device.context:
        place = rig.device.address(status)
        workshop.kernels.apply(workshop.stream, "confirm_pivots", rig.device.device_array(factors), place)
    assert rig.get(status).tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize(("source", "out"), [("int32", "int64"), ("int64", "int32"), ("int32", "int32")])
def test_pivots_are_moved_and_invalid_pivots_are_reported(workshop: Workshop, source: str, out: str) -> None:
    rig = workshop.rig
    given = rig.put(np.array([[0, 2, 2], [1, 3, -1], [-5, 1, 2]], source))
    made, status = rig.put(np.zeros((3, 3), out)), rig.put(np.zeros(3, np.int32))
    places = [rig.device.device_array(array) for array in (given, made)]
    with rig.device.context:
        workshop.kernels.move_pivots(workshop.stream, *places, 1, rig.device.address(status))
    assert rig.get(made).tolist() == [[1, 3, 3], [2, 1, 1], [1, 2, 3]]
    assert rig.get(status).tolist() == [0, 2, 1]


def test_matrices_are_listed(workshop: Workshop) -> None:
    listed = workshop.rig.put(np.zeros(3, np.uint64))
    with workshop.rig.device.context:
        place = workshop.rig.device.address(listed)
        workshop.kernels.list_matrices(workshop.stream, 4096, 72, 3, place)
    assert workshop.rig.get(listed).tolist() == [4096, 4168, 4240]
