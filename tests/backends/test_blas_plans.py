"""The translation of operations on matrices to a BLAS: the routine, and the copies for it."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest

from trio_accel import linalg
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    contiguous_strides,
)
from trio_accel.backends.base.kit.blas import BlasPlan, plan_routine

FLAGS = (False, True)
LETTERS = ("N", "T", "C")
REAL, COMPLEX = DType.float64, DType.complex128


def array(rows: int, columns: int, dtype: DType = COMPLEX, *, by_rows: bool = True) -> ArraySpec:
    shape, size = (rows, columns), dtype.itemsize
    return ArraySpec(0, 0, dtype, shape, contiguous_strides(shape, size) if by_rows else (size, rows * size))


def gemm(a: ArraySpec, b: ArraySpec, c: ArraySpec, trans_a: Any = "N", trans_b: Any = "N") -> BlasPlan:
    return plan_routine(linalg.gemm.spec(1.0, a, b, 0.0, trans_a, trans_b, c))


def name_of(plan: BlasPlan) -> str:
    assert plan.routine is not None
    return plan.routine.name


@pytest.mark.parametrize("by_rows", FLAGS)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_layouts_along_one_axis_are_never_copied(by_rows: bool, dtype: DType) -> None:
    def make(rows: int, columns: int) -> ArraySpec:
        return array(rows, columns, dtype, by_rows=by_rows)

    for trans_a, trans_b in itertools.product(LETTERS, LETTERS):
        a, b = make(*((3, 4) if trans_a == "N" else (4, 3))), make(*((4, 5) if trans_b == "N" else (5, 4)))
        assert not gemm(a, b, make(3, 5), trans_a, trans_b).copies
        # Also vectors with gaps: as one column they are row-major, whatever the matrix is.
        gaps = ArraySpec(0, 0, dtype, (4, 1), (3 * dtype.itemsize, dtype.itemsize))
        assert not gemm(a, gaps, make(3, 1), trans_a).copies or (trans_a == "C" and not by_rows)
    for side, lower, flag, trans in itertools.product(("L", "R"), FLAGS, FLAGS, LETTERS):
        a = make(3, 3) if side == "L" else make(5, 5)
        b, c = make(3, 5), make(3, 5)
        assert not plan_routine(linalg.symm.spec(1.0, a, b, 0.0, side, lower, flag, c)).copies
        for solve, rows in itertools.product((linalg.trmm.spec, linalg.trsm.spec), (3, 1)):
            a, b = make(rows, rows) if side == "L" else make(5, 5), make(rows, 5)
            plan = plan_routine(solve(1.0, a, b, side, trans, lower, flag, b))
            assert not plan.copies
    for trans, lower, hermitian in itertools.product(("N", "C"), FLAGS, FLAGS):
        letter = "T" if trans == "C" and not hermitian else trans
        a = make(3, 4) if trans == "N" else make(4, 3)
        c, letters = make(3, 3), (letter, lower, hermitian)
        assert not plan_routine(linalg.syrk.spec(1.0, a, 0.0, c, *letters)).copies
        assert not plan_routine(linalg.syr2k.spec(1.0, a, a, 0.0, c, *letters)).copies


def test_other_layouts_are_copied_only_if_no_letter_helps() -> None:
    a, across, b = array(4, 4), array(4, 4, by_rows=False), array(4, 4)
    for trans in LETTERS:
        assert gemm(across, b, array(4, 4), trans).copies == ({"a": "C"} if trans == "C" else {})
        spec = linalg.trsm.spec(1.0, across, b, "L", trans, True, False, b)
        assert plan_routine(spec).copies == ({"a": "C"} if trans == "C" else {})
    for hermitian in FLAGS:
        spec = linalg.symm.spec(1.0, across, b, 0.0, "L", True, hermitian, array(4, 4))
        assert plan_routine(spec).copies == ({"a": "C"} if hermitian else {})
        update = linalg.syrk.spec(1.0, across, 0.0, array(4, 4), "N", True, hermitian)
        assert plan_routine(update).copies == ({"a": "C"} if hermitian else {})
    gaps = attrs.evolve(a, strides=(128, 32))
    assert gemm(gaps, b, array(4, 4)).copies == {"a": "C"}
    assert gemm(a, b, gaps).copies == {"c": "C"}
    backwards = attrs.evolve(a, strides=(-64, 16))
    assert gemm(a, backwards, array(4, 4)).copies == {"b": "C"}


def test_vectors_get_the_routines_of_the_second_level() -> None:
    a, x = array(4, 4), array(4, 1)
    assert name_of(gemm(a, x, array(4, 1))) == "gemv"
    assert name_of(gemm(array(1, 4), a, array(1, 4))) == "gemv"
    # A matrix by rows, conjugated, is read as a conjugated one by columns: only products of matrices do that.
    assert name_of(gemm(a, x, array(4, 1), "C")) == "gemm"
    assert name_of(gemm(array(4, 4, by_rows=False), x, array(4, 1), "C")) == "gemv"
    assert name_of(gemm(array(4, 0), array(0, 1), array(4, 1))) == "gemm"
    for hermitian, name in ((False, "symv"), (True, "hemm")):
        symm = linalg.symm.spec(1.0, a, x, 0.0, "L", True, hermitian, array(4, 1))
        assert name_of(plan_routine(symm)) == name
    spec = linalg.trsm.spec(1.0, a, x, "L", "N", True, False, x)
    plan = plan_routine(spec)
    for alpha, name in ((1.0, "trsv"), (2.0, "trsm")):
        routine = plan.routine_for(attrs.evolve(spec, alpha=alpha))  # type: ignore[misc]
        assert routine is not None
        assert routine.name == name


def test_nothing_is_called_for_an_empty_result() -> None:
    assert gemm(array(0, 4), array(4, 4), array(0, 4)).routine is None
    assert gemm(array(4, 0), array(0, 4), array(4, 4)).routine is not None
