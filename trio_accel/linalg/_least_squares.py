"""Least squares."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..backends.base import DType
from ..devices import AccelRef, Operand, device_of
from ._products import gemm, matmul
from ._results import LstsqResult, SVDResult
from ._spectra import Svd
from ._vectors import axpy

__all__ = ["lstsq"]


async def lstsq(a: Operand, b: Operand, rcond: float | None = None) -> LstsqResult:
    """The x of least length that makes ``|b - a @ x|`` least, as `numpy.linalg.lstsq`; by `svd`.

    The singular values cross to the host, which finds the rank, and with full rank the differences do.

    Args:
        a: Matrix of shape (m, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (m,), or matrix of shape (m, k), of the same dtype.
        rcond: Singular values up to `rcond` times the largest one count as zero. None: as many roundings of
            the dtype as the longer side of `a` has elements. Not between 0 and 1: one rounding, as in LAPACK.

    Returns:
        x of shape (n,) or (n, k); the sums of the squared differences of each column, of shape (1,) or (k,)
        and the real dtype, without elements if the rank is less than n or m is not above n; the rank, an int;
        and the singular values of `a`.

    Raises:
        LinAlgError: The matrix holds a NaN or an infinity, or its iteration did not converge.
        numpy.linalg.LinAlgError: Shapes that do not fit. Stacks are refused, as by NumPy.
        TypeError: Neither is on a device, or another dtype, or two of them.

    A cancelled call leaves nothing behind. See `Device.ask` for the errors that any operation can end with.
    """
    device = device_of("lstsq", a, b)
    _check(a, b)
    m, n = a.shape
    u, s, vh = cast(SVDResult, await device.ask(Svd(a, full_matrices=False)))
    values: npt.NDArray[Any] = await s.to_host()
    epsilon = float(np.finfo(values.dtype).eps)
    least = epsilon * max(m, n) if rcond is None else rcond if 0 < rcond < 1 else epsilon
    kept = values[values > least * values.max(initial=0)]
    rank, dtype = len(kept), u.dtype.dtype
    columns = b if len(b.shape) == 2 else b[:, None]
    parts = await gemm(1.0, u[:, :rank], columns, trans_a="C")
    parts = await matmul(np.diag((1 / kept).astype(dtype)), parts)
    x = await gemm(1.0, vh[:rank], parts, trans_a="C")
    residuals = np.empty(0, values.dtype)
    if rank == n < m:
        off = await axpy(-1.0, columns, await gemm(1.0, a, x))
        residuals = np.square(np.abs(await off.to_host())).sum(0)
    return LstsqResult(x if columns is b else x[:, 0], await device.put(residuals), rank, s)


def _check(a: Operand, b: Operand) -> None:
    """Refuse shapes and dtypes before anything is launched."""
    if len(a.shape) != 2 or len(b.shape) not in (1, 2) or a.shape[0] != b.shape[0]:
        raise np.linalg.LinAlgError(
            "lstsq: Incompatible dimensions: a must have shape (m, n) and b shape (m,) or (m, k), "
            f"got a of shape {a.shape} and b of shape {b.shape}"
        )
    types = [one.dtype if isinstance(one, AccelRef) else DType.of(one.dtype) for one in (a, b)]
    if types[0] is not types[1]:
        raise TypeError(f"lstsq: operands must have one dtype, got a {types[0]}, b {types[1]}; use cast()")
