"""The docstring of `trio_accel.linalg` names the errors with which all its functions refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import linalg

# Of each function its operands, and a call with them: matrices (m), vectors (v), in capitals what is changed.
CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "asum": ("v", linalg.asum),
    "axpy": ("vV", lambda x, y: linalg.axpy(1.0, x, y)),
    "cho_solve": ("mm", lambda c, b: linalg.cho_solve((c, True), b)),
    "cholesky": ("m", linalg.cholesky),
    "cond": ("m", linalg.cond),
    "cross": ("vv", linalg.cross),
    "det": ("m", linalg.det),
    "diagonal": ("m", linalg.diagonal),
    "dot": ("vv", linalg.dot),
    "eig": ("m", linalg.eig),
    "eigh": ("mm", lambda a, b: linalg.eigh(a, b=b)),
    "eigvals": ("m", linalg.eigvals),
    "eigvalsh": ("mm", lambda a, b: linalg.eigvalsh(a, b=b)),
    "einsum": ("mm", lambda a, b: linalg.einsum("ij,jk", a, b)),
    "expm": ("m", linalg.expm),
    "fused_matmul": ("mmM", lambda a, b, out: linalg.fused_matmul(a, b, out=out)),
    "fused_matmul_grad": ("mm", lambda a, b: linalg.fused_matmul_grad(a, b, np.zeros((3, 8)), "gelu")),
    "fused_matmul_sums": ("mm", lambda a, b: linalg.fused_matmul_sums(a, b, "b")),
    "gemm": ("mmM", lambda a, b, c: linalg.gemm(1.0, a, b, 1.0, c)),
    "gemv": ("mvV", lambda a, x, y: linalg.gemv(1.0, a, x, 1.0, y)),
    "ger": ("vvM", lambda x, y, a: linalg.ger(1.0, x, y, a)),
    "hessenberg": ("m", linalg.hessenberg),
    "iamax": ("v", linalg.iamax),
    "inv": ("m", linalg.inv),
    "kron": ("mm", linalg.kron),
    "ldl": ("m", linalg.ldl),
    "lstsq": ("mm", linalg.lstsq),
    "lu": ("m", linalg.lu),
    "lu_solve": ("mm", lambda lu, b: linalg.lu_solve((lu, np.zeros(3, np.int32)), b)),
    "matmul": ("mmM", lambda a, b, out: linalg.matmul(a, b, out=out)),
    "matrix_norm": ("m", linalg.matrix_norm),
    "matrix_power": ("m", lambda x: linalg.matrix_power(x, 2)),
    "matrix_rank": ("m", linalg.matrix_rank),
    "matrix_transpose": ("m", linalg.matrix_transpose),
    "multi_dot": ("mm", lambda a, b: linalg.multi_dot([a, b])),
    "nrm2": ("v", linalg.nrm2),
    "null_space": ("m", linalg.null_space),
    "orth": ("m", linalg.orth),
    "outer": ("vv", linalg.outer),
    "pinv": ("m", linalg.pinv),
    "polar": ("m", linalg.polar),
    "qr": ("m", linalg.qr),
    "rot": ("VV", lambda x, y: linalg.rot(x, y, 0.6, 0.8)),
    "scal": ("V", lambda x: linalg.scal(2.0, x)),
    "schur": ("m", linalg.schur),
    "slogdet": ("m", linalg.slogdet),
    "solve": ("mm", linalg.solve),
    "solve_banded": ("mm", lambda ab, b: linalg.solve_banded((1, 1), ab, b)),
    "solve_toeplitz": ("vv", linalg.solve_toeplitz),
    "solve_triangular": ("mm", linalg.solve_triangular),
    "solve_tridiagonal": ("vvvv", linalg.solve_tridiagonal),
    "solveh_banded": ("mm", linalg.solveh_banded),
    "sqrtm": ("m", linalg.sqrtm),
    "svd": ("m", linalg.svd),
    "svdvals": ("m", linalg.svdvals),
    "swap": ("VV", linalg.swap),
    "symm": ("mmM", lambda a, b, c: linalg.symm(1.0, a, b, 1.0, c)),
    "symv": ("mvV", lambda a, x, y: linalg.symv(1.0, a, x, 1.0, y)),
    "syr": ("vM", lambda x, a: linalg.syr(1.0, x, a)),
    "syr2": ("vvM", lambda x, y, a: linalg.syr2(1.0, x, y, a)),
    "syr2k": ("mmM", lambda a, b, c: linalg.syr2k(1.0, a, b, 1.0, c)),
    "syrk": ("mM", lambda a, c: linalg.syrk(1.0, a, 1.0, c)),
    "tensordot": ("mm", lambda a, b: linalg.tensordot(a, b, axes=1)),
    "trace": ("m", linalg.trace),
    "trmm": ("mmM", lambda a, b, out: linalg.trmm(1.0, a, b, out=out)),
    "trmv": ("mvV", lambda a, x, out: linalg.trmv(a, x, out=out)),
    "trsm": ("mmM", lambda a, b, out: linalg.trsm(1.0, a, b, out=out)),
    "trsv": ("mvV", lambda a, x, out: linalg.trsv(a, x, out=out)),
    "vecdot": ("vv", linalg.vecdot),
    "vector_norm": ("v", linalg.vector_norm),
}
# Arrays of any shape, or vectors of any length, are as good.
OF_ANY_SHAPE = {"kron", "outer", "scal", "vector_norm"}


def host(letter: str, *, size: int = 3, dtype: str = "float64") -> Any:
    """An operand of a call."""
    return np.ones((size,) * (2 if letter in "mM" else 1), dtype) + np.eye(size, dtype=dtype)[0]


async def put(device: ta.Device, operands: str) -> list[ta.AccelRef]:
    """All operands of a call."""
    return [await device.put(host(letter)) for letter in operands]


def test_every_function_is_there() -> None:
    functions = {name for name in linalg.__all__ if inspect.isfunction(getattr(linalg, name))}
    assert set(CALLS) == functions


@pytest.mark.parametrize("name", CALLS)
async def test_no_operand_on_a_device(name: str) -> None:
    operands, call = CALLS[name]
    with pytest.raises(TypeError, match="no operand is on a device"):
        await call(*map(host, operands))


@pytest.mark.parametrize("name", [name for name, (operands, _) in CALLS.items() if len(operands) > 1])
async def test_dtypes_that_differ(device: ta.Device, name: str) -> None:
    operands, call = CALLS[name]
    arrays = await put(device, operands)
    for place, letter in enumerate(operands[1:], 1):
        wrong = arrays.copy()
        wrong[place] = await device.put(host(letter, dtype="float32"))
        # An output may be compared with the result, with its shape.
        expected = (TypeError, ValueError) if letter.isupper() else (TypeError,)
        with pytest.raises(expected, match="dtype"):
            await call(*wrong)


@pytest.mark.parametrize("name", sorted(set(CALLS) - OF_ANY_SHAPE))
async def test_shapes_that_do_not_fit(device: ta.Device, name: str) -> None:
    operands, call = CALLS[name]
    wrong = await put(device, operands)
    if len(operands) > 1:
        wrong[-1] = await device.put(host(operands[-1], size=4))
    else:
        wrong[0] = await device.put(host("v" if operands == "m" else "m"))
    with pytest.raises(ValueError, match=r"shape|dimension|axes|axis"):
        await call(*wrong)
