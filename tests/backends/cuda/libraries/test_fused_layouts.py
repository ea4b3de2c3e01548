"""Descriptions of products for cuBLASLt, against NumPy reading memory as the library does; needs no card."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, FusedMatmulSpec, contiguous_strides

pytestmark = pytest.mark.one_backend

blaslt = pytest.importorskip("trio_accel.backends.cuda.libraries.blaslt")


def spec_of(array: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> ArraySpec:
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return ArraySpec(0, offset, DType.of(array.dtype), array.shape, array.strides)


def multiplied(problem: Any, memory: list[np.ndarray[Any, Any]], size: int) -> np.ndarray[Any, Any]:
    """Multiply as the library does: matrices by columns, each of a stack a stride after the last."""
    op_a, op_b, m, n, k, lda, ldb, ldc = problem.product.call
    out = np.full(size, np.nan)
    for batch in range(problem.product.batches):
        operands: list[Any] = []
        for op, ld, step, elements, sizes in (
            (op_a, lda, problem.product.steps[0], memory[0], (m, k)),
            (op_b, ldb, problem.product.steps[1], memory[1], (k, n)),
        ):
            rows, columns = reversed(sizes) if op else sizes
            strides = elements.itemsize, ld * elements.itemsize
            # Refuses accesses outside the elements.
            part = np.ndarray(
                (rows, columns), elements.dtype, elements, batch * step * elements.itemsize, strides
            )
            operands.append(part.T if op else part)
        place = batch * problem.product.steps[2]
        target = np.lib.stride_tricks.as_strided(out[place:], (m, n), (8, ldc * 8))
        target[...] = operands[0].astype(float) @ operands[1].astype(float)
    assert problem.product.call[0] in (0, 1)
    return out


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], str]:
    dtype = draw(st.sampled_from(["float32", "int8"]))
    by = 4 if dtype == "int8" else 1
    m, n, k = draw(st.integers(1, 5)), by * draw(st.integers(1, 3)), by * draw(st.integers(1, 4))
    stacks = draw(st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1), (1, 3))]))
    arrays, bases = [], []
    for number, (stack, (rows, columns)) in enumerate(zip(stacks, ((m, k), (k, n)), strict=True)):
        way = draw(st.sampled_from(["rows", "columns", "gaps", "padded", "backwards"]))
        shape = (columns, rows) if way == "columns" else (rows, columns)
        pad = {"gaps": 2 * shape[1], "padded": shape[1] + 16}.get(way, shape[1])
        base = np.random.default_rng(number).integers(-9, 9, (*stack, shape[0], pad)).astype(dtype)
        array = base[..., ::2] if way == "gaps" else base[..., : shape[1]]
        array = array[..., ::-1, :] if way == "backwards" else array
        arrays.append(array.swapaxes(-1, -2) if way == "columns" else array)
        bases.append(base)
    return arrays, bases, dtype


@given(made=operands(), sums_of=st.sampled_from([None, "a", "b"]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_calls_read_and_write_the_right_elements(made: Any, sums_of: str | None) -> None:
    (a, b), bases, dtype = made
    expected = np.matmul(a.astype(float), b.astype(float))
    out = ArraySpec(
        1,
        0,
        DType.of("int32" if dtype == "int8" else dtype),
        expected.shape,
        contiguous_strides(expected.shape, 4),
    )
    specs = [spec_of(array, base) for array, base in zip((a, b), bases, strict=True)]
    sums = None
    if dtype == "int8":
        sums_of = None
    if sums_of is not None:
        shape = (*expected.shape[:-2], expected.shape[-2 if sums_of == "a" else -1])
        sums = ArraySpec(2, 0, out.dtype, shape, contiguous_strides(shape, 4))
    spec = FusedMatmulSpec(
        f"sum_{sums_of}" if sums_of else "none",
        "ieee",
        0,
        1.0,
        0.0,
        *specs,
        None,
        None,
        None,
        None,
        None,
        None,
        out,
        None,
        sums,
    )
    problem = blaslt.MatmulProblem.of(spec)
    memory = []
    for array, base, one, order in zip((a, b), bases, specs, problem.orders, strict=True):
        if order is None:
            memory.append(base.reshape(-1)[one.offset // base.itemsize :])
            continue
        full = array if problem.stack is None else np.broadcast_to(array, (*problem.stack, *array.shape[-2:]))
        turned = full if order == "C" else full.swapaxes(-1, -2)
        memory.append(np.ascontiguousarray(turned).reshape(-1))
    # All this memory is taken to try it out, and nothing after it is read.
    limited = [elements[: problem.nbytes // elements.itemsize] for elements in memory]
    found = multiplied(problem, [limited[1], limited[0]], expected.size)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    if sums_of is not None:
        # The library adds across what it reads.
        assert problem.product.call[0] == 0 if sums_of == "b" else problem.product.call[1] == 1
        assert problem.product.batches == math.prod(expected.shape[:-2])
    if dtype == "int8":
        # Both lie along k: the first one transposed, the other one not.
        assert problem.product.call[:2] == (1, 0)
