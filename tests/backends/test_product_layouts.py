"""Products are made of as few calls and copies as cuBLAS's layouts allow. Needs no device and no driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trio_accel.backends.base.kit.product_layouts import Product, plan_gemm, plan_matmul, vectors

N, T, C = 0, 1, 2


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def matmul(a: np.ndarray, b: np.ndarray) -> Product:
    return plan_matmul((a.shape, b.shape), (a.strides, b.strides), a.itemsize)


def gemm(letters: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Product:
    shapes: Any = a.shape, b.shape, c.shape
    strides = a.strides, b.strides, c.strides
    return plan_gemm(letters, shapes, strides, a.itemsize, is_complex=a.dtype.kind == "c")


def test_a_product_in_c_order_is_that_of_the_transposes() -> None:
    plan = matmul(zeros(3, 5), zeros(5, 4))
    assert plan.is_swapped
    assert plan.call == (N, N, 4, 3, 5, 4, 5, 4)
    assert (plan.packing_a, plan.packing_b, plan.is_single) == (None, None, True)


@pytest.mark.parametrize(
    ("a", "b", "call"),
    [
        (zeros(5, 3).T, zeros(4, 5).T, (T, T, 4, 3, 5, 5, 3, 4)),
        (zeros(3, 9)[:, :5], zeros(5, 7)[:, 2:6], (N, N, 4, 3, 5, 7, 9, 4)),
        (zeros(10)[::2], zeros(5, 4), (N, T, 4, 1, 5, 4, 2, 4)),
        (zeros(3, 5), zeros(5), (T, N, 3, 1, 5, 5, 5, 3)),
        (zeros(5), zeros(5), (N, N, 1, 1, 5, 5, 5, 1)),
    ],
)
def test_strided_layouts_are_not_copied(a: np.ndarray, b: np.ndarray, call: Any) -> None:
    plan = matmul(a, b)
    assert (plan.packing_a, plan.packing_b, plan.is_single) == (None, None, True)
    if b.ndim > 1:
        assert plan.call == call
    else:
        # A column is the result of a matrix by a vector.
        assert not plan.is_swapped
        assert plan.call[2:5] == call[2:5]


def test_one_right_side_for_all_is_one_product() -> None:
    plan = matmul(zeros(6, 7, 3, 5), zeros(5, 4))
    assert plan.is_single
    assert plan.call[2:5] == (4, 126, 5)


def test_a_batch_is_one_call() -> None:
    plan = matmul(zeros(6, 7, 3, 5), zeros(7, 5, 4)[:1])
    assert plan.is_single
    plan = matmul(zeros(3, 5), zeros(6, 7, 5, 4))
    assert (plan.batches, plan.steps, len(plan.groups)) == (42, (20, 0, 12), 1)
    plan = matmul(zeros(6, 1, 3, 5), zeros(7, 5, 4))
    assert (plan.batches, plan.steps) == (7, (20, 0, 12))
    assert [group.a for group in plan.groups] == [4 * 15 * place for place in range(6)]
    assert [group.c for group in plan.groups] == [4 * 84 * place for place in range(6)]


def test_a_batch_that_repeats_one_matrix_is_not_copied() -> None:
    one = zeros(3, 5)
    plan = matmul(np.broadcast_to(one, (6, 3, 5)), zeros(6, 5, 4))
    assert (plan.packing_a, plan.packing_b, plan.is_single) == (None, None, False)
    assert (plan.batches, plan.steps) == (6, (20, 0, 12))


def test_thousands_of_calls_are_replaced_by_a_full_copy() -> None:
    plan = matmul(zeros(2000, 1, 2, 2), zeros(2000, 2, 2))
    assert plan.is_in_full
    assert (plan.batches, len(plan.groups)) == (4_000_000, 1)


@pytest.mark.parametrize(
    ("a", "b", "packed"),
    [
        (zeros(3, 10)[:, ::2], zeros(5, 4), ("plain", None)),
        (zeros(3, 5)[::-1], zeros(5, 4), ("plain", None)),
        (zeros(3, 5), zeros(5)[::-1], (None, "plain")),
        (np.broadcast_to(zeros(5), (3, 5)), zeros(5, 4), ("plain", None)),
        (zeros(4, 3, 5)[::-1], zeros(4, 5, 2), ("plain", None)),
    ],
)
def test_other_layouts_are_copied(a: np.ndarray, b: np.ndarray, packed: Any) -> None:
    plan = matmul(a, b)
    assert (plan.packing_a, plan.packing_b) == packed


def test_letters() -> None:
    a, b, c = (zeros(4, 4, dtype="complex64") for _ in range(3))
    assert gemm("NC", a, b, c).call[:2] == (C, N)
    assert gemm("TN", a, b, c).call[:2] == (N, T)
    # A result in Fortran's order is cuBLAS's own.
    plan = gemm("NT", a, b.T, c.T)
    assert not plan.is_swapped
    assert plan.call[:2] == (T, T)
    plan = gemm("CC", a, b.T, c.T)
    assert (plan.call[:2], plan.packing_a, plan.packing_b) == ((N, C), "conjugate", None)
    plan = gemm("CN", a.T, b, c)
    assert (plan.call[:2], plan.packing_a) == ((N, C), "plain")
    real = zeros(4, 4)
    assert gemm("CN", real.T, real, real).packing_a is None
    assert gemm("NN", a, b, zeros(4, 8, dtype="complex64")[:, ::2]).is_c_packed


def test_vectors() -> None:
    x = zeros(4, 6)
    assert vectors((24,), 4, (4,)) == [(0, 1)]
    assert vectors(x.shape, 4, x.strides, x.strides) == [(0, 1), (0, 1)]
    assert vectors(x.T.shape, 4, x.T.strides, x.T.strides) == [(0, 1), (0, 1)]
    assert vectors(x.T.shape, 4, x.T.strides, zeros(6, 4).strides) is None
    assert vectors((3,), 4, (-8,), (-4,)) == [(-16, 2), (-8, 1)]
    assert vectors((3,), 4, (-8,), (4,)) is None
    assert vectors((3,), 4, (0,), (4,)) is None
    assert vectors((3,), 8, (12,)) is None
    assert vectors((), 4, (), ()) == [(0, 1), (0, 1)]
    assert vectors((1, 1), 4, (-40, 3), (0, 0)) == [(0, 1), (0, 1)]
