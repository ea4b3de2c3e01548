"""Declarations with an operand of several arrays, and their contradictions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta
from trio_accel import sparse
from trio_accel.backends.base.contract.ops import parse_shapes
from trio_accel.devices import AccelRef, Operand, operation


async def taken(matrix: sparse.CsrMatrix, x: Operand) -> AccelRef:
    raise NotImplementedError


async def no_matrix(x: Operand) -> AccelRef:
    raise NotImplementedError


WRONG: dict[str, tuple[Callable[..., Coroutine[Any, Any, AccelRef]], str, str]] = {
    "no field": (taken, "matrix(m, n), matrix.values(e), x(n) -> out(m)", r"the shapes name 'matrix\.val"),
    "no shape": (taken, "matrix.data(e), x(n) -> out(e)", "parameter 'matrix' is an array, and not in the"),
    "no operand": (
        no_matrix,
        "matrix(m, n), x(n) -> out(m)",
        "the shapes name 'matrix', which is not a parameter",
    ),
    "an array of no operand": (
        no_matrix,
        "x.data(m) -> out(m)",
        r"the shapes name 'x\.data', which is not a parameter",
    ),
    "one more than what": (no_matrix, "x(m+1) -> out(m)", r"'m\+1' of x stands before 'm'"),
    "one more on the right": (
        no_matrix,
        "x(m) -> out(n+1)",
        r"letter 'n\+1' of out does not occur on the left",
    ),
}


@pytest.mark.parametrize(("function", "shapes", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_declaration_that_contradicts_its_function(
    function: Callable[..., Coroutine[Any, Any, AccelRef]], shapes: str, message: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{__file__}:\d+: operation \w+: .*{message}"):
        operation(shapes, actor=sparse.SparseActor)(function)


def test_the_axis_of_a_result_may_be_longer_by_one() -> None:
    outputs, _, _ = parse_shapes("a(m) -> out(m+1, m)").fit("name", ((4,),))
    assert outputs == ((5, 4),)


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no products of matrices")
async def test_a_product_in_place_of_the_values(device: ta.Device) -> None:
    arrays = [await device.put(np.array(values)) for values in ([0, 1, 2], [1, 0], [9.0, 9.0])]
    matrix = sparse.CsrMatrix((2, 2), *arrays)
    a, b = np.array([[1.0], [2.0]]), np.array([[3.0, 4.0]])
    assert await sparse.sddmm(matrix, a, b, out=matrix.data) is matrix.data
    assert (await (await sparse.to_dense(matrix)).to_host()).tolist() == [[0.0, 4.0], [6.0, 0.0]]
