"""Your own operation, declared once: the matrix exponential, computed by SciPy on the CPU.

`decay.py` uses it.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

import trio_accel as ta
from trio_accel.backends.base import HostCall, kernel
from trio_accel.backends.base.kit.checks import NATIVE
from trio_accel.devices import DeclaredSpec, LibraryActor, Operand, operation


class ExponentialActor(LibraryActor):
    """The actor that runs this module's kernels, on a separate stream."""

    library = "own_operation"


@operation(
    "a(..., n, n) -> out(..., n, n)",
    actor=ExponentialActor,
    dtypes=NATIVE,
    status="holds a NaN or an infinity",
)
async def expm(a: Operand) -> ta.AccelRef:
    """Compute the exponential of matrices, as `scipy.linalg.expm`: ``sum(a**k / k!)``.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The exponentials, of the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix contains NaN or infinity; `LinAlgError.index` is its index.
    """
    ...


@kernel(expm, backend="cpu")
def expm_cpu(spec: DeclaredSpec, call: HostCall) -> None:
    """Compute the exponentials in the stream's thread."""
    a, out = call.array(spec.a), call.array(spec.out)
    spec.info[:] = ~np.isfinite(a).all((-2, -1)).ravel()
    if out.size and not spec.info.any():
        out[:] = scipy.linalg.expm(a)
