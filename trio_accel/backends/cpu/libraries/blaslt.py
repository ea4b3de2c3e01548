"""Fused products by NumPy's BLAS: all of one in float32 at least, and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base import DType, HostArray, HostCall, Ints, kernel
from ...base.contract.ops import SCALED_BLOCK, FusedMatmulSpec, fused_dtypes
from ..runtime._memory import convert
from ..runtime.blas_threads import matrix_product

# Hendrycks and Gimpel, Gaussian Error Linear Units (2016): sqrt(2 / pi), and the factor of the cube.
_ROOT, _CUBE = 0.7978845608028654, 0.044715

_MAX_FINITE = {DType.float8_e4m3fn: 448.0, DType.float8_e5m2: 57344.0}


@kernel(FusedMatmulSpec, backend="cpu")
def fused_matmul(spec: FusedMatmulSpec, call: HostCall) -> None:
    """Multiply by `numpy.matmul`, which needs no precision below that of the type."""
    wide = fused_dtypes("blaslt", spec.a.dtype, spec.b.dtype, spec.out.dtype).compute.dtype

    def read(array: Any) -> HostArray:
        values: HostArray = call.array(array)
        return values if values.dtype == wide else _widened(values, wide)

    a, b = read(spec.a), read(spec.b)
    # Infinities and NaN are results like others.
    with np.errstate(all="ignore"):
        x = _multiplied(
            spec, a, b, [None if scale is None else read(scale) for scale in (spec.scale_a, spec.scale_b)]
        )
        if spec.alpha != 1:
            x *= wide.type(spec.alpha)
        if spec.c is not None and spec.beta:
            x += wide.type(spec.beta) * read(spec.c)
        if spec.bias is not None:
            bias = read(spec.bias)
            x += bias if bias.ndim == 1 else bias[..., None, :]
        if spec.saved is not None:
            _save(x, spec.epilogue, call.array(spec.saved))
        x = _applied(x, spec, None if spec.aux is None else call.array(spec.aux))
        if spec.sums is not None:
            of = {"sum_a": (a, -1), "sum_b": (b, -2)}.get(spec.epilogue, (x, -2))
            convert(np.broadcast_to(of[0].sum(of[1]), spec.sums.shape), call.array(spec.sums))
        if spec.scale_out is not None:
            x *= read(spec.scale_out)
        _round(x, call.array(spec.out))


def _multiplied(
    spec: FusedMatmulSpec, a: HostArray, b: HostArray, scales: list[HostArray | None]
) -> HostArray:
    """Multiply, with the scales of both."""
    if {"vectors", "blocks"}.intersection(spec.scale_kinds):
        a, b = (
            matrix * _spread(scale, matrix.shape)
            for matrix, scale in zip((a, b), scales, strict=True)
            if scale is not None
        )
        scales = []
    x: HostArray = matrix_product(a, b)
    for factor in scales:
        if factor is not None:
            x *= factor
    return x


def _spread(scale: HostArray, shape: Ints) -> HostArray:
    """Repeat each block's scale for all of its elements."""
    for axis in (-2, -1):
        if scale.shape[axis] != shape[axis]:
            scale = np.repeat(scale, SCALED_BLOCK, axis)
    return scale[..., : shape[-2], : shape[-1]]


def _widened(array: HostArray, wide: np.dtype[Any]) -> HostArray:
    out: HostArray = np.empty_like(array, wide)
    convert(array, out)
    return out


def _save(x: HostArray, epilogue: str, saved: HostArray) -> None:
    """Save the values for the gradient of an activation, followed by zeros in each row."""
    values = np.packbits(~(x <= 0), axis=-1, bitorder="little") if epilogue == "relu" else x
    columns = values.shape[-1]
    convert(values, saved[..., :columns])
    saved[..., columns:] = 0


def _applied(x: HostArray, spec: FusedMatmulSpec, aux: HostArray | None) -> HostArray:
    """Apply an activation, or the derivative of one by the values that it has saved in `aux`."""
    if spec.epilogue == "relu":
        return np.maximum(x, 0, out=x)
    if spec.epilogue == "gelu":
        x *= 0.5 * (1 + np.tanh(_ROOT * (x + _CUBE * x * x * x)))
    elif aux is not None and spec.epilogue == "relu_grad":
        bits = np.unpackbits(aux, axis=-1, count=x.shape[-1], bitorder="little")
        return np.where(bits.astype(bool), x, x.dtype.type(0))
    elif aux is not None and spec.epilogue == "gelu_grad":
        z = _widened(aux[..., : x.shape[-1]], x.dtype)
        t = np.tanh(_ROOT * (z + _CUBE * z * z * z))
        x *= 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * z * z)
    return x


def _round(x: HostArray, out: HostArray) -> None:
    """Write to the result: float8 and int8 are saturated, int32 wraps around."""
    dtype = DType.of(out.dtype)
    if dtype is DType.int8:
        np.clip(np.rint(x, out=x), -128, 127, out=x)
    elif dtype is DType.int32:
        # A sum may be longer; it wraps around as sums of int32 do.
        x = x.astype(np.int64)
    elif dtype.itemsize == 1:
        np.clip(x, -_MAX_FINITE[dtype], _MAX_FINITE[dtype], out=x)
    convert(x, out)
