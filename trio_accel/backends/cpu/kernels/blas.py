"""Dense linear algebra: matrix products here, vectors in their own module."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...base import DType
from ...base.ops import AxpySpec, DotSpec, MatmulSpec, Nrm2Spec, ScalSpec
from .._memory import CpuMemory, HostArray
from .._stream import Work
from ._checks import INEXACT, LOW_PRECISION, check_dtype, check_same_dtype
from ._pieces import convert, to_float32
from ._vectors import axpy, dot, nrm2, scal

__all__ = ["KERNELS"]

_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))


def matmul(spec: MatmulSpec, memory: CpuMemory) -> Work:
    """Prepare a product by `numpy.matmul`; integers wrap around as they do there."""
    dtype = check_same_dtype("matmul", spec.a, spec.b, spec.out)
    check_dtype("matmul", dtype, (*INEXACT, *_INTEGERS))
    a, b, out = memory.view(spec.a), memory.view(spec.b), memory.view(spec.out)
    if dtype in LOW_PRECISION:
        return partial(_matmul_float32, a, b, out)
    return partial(np.matmul, a, b, out=out)


def _matmul_float32(a: HostArray, b: HostArray, out: HostArray) -> None:
    # Also for float16, which NumPy multiplies itself, but without BLAS: 180 times slower at 512.
    convert(np.matmul(to_float32(a), to_float32(b)), out)


KERNELS = {MatmulSpec: matmul, AxpySpec: axpy, ScalSpec: scal, DotSpec: dot, Nrm2Spec: nrm2}
