"""Fused products: all of one in float32 at least, and rounded once."""

from __future__ import annotations

from typing import Any

import torch

from trio_accel.backends.base import DType, kernel
from trio_accel.backends.base.contract.ops import SCALED_BLOCK, ArraySpec, FusedMatmulSpec, fused_dtypes

from .._views import TYPES, read, write
from ..manifest import BACKEND

T = torch.Tensor
# Hendrycks and Gimpel, Gaussian Error Linear Units (2016): sqrt(2 / pi), and the factor of the cube.
_ROOT, _CUBE = 0.7978845608028654, 0.044715
_MOST = {DType.float8_e4m3fn: 448.0, DType.float8_e5m2: 57344.0}


@kernel(FusedMatmulSpec, backend=BACKEND)
def fused_matmul(spec: FusedMatmulSpec, call: Any) -> None:
    """Multiply, scale, add, apply and round."""
    wide = TYPES[fused_dtypes("blaslt", spec.a.dtype, spec.b.dtype, spec.out.dtype).compute]

    def taken(array: ArraySpec) -> T:
        return read(call, array).to(wide)

    a, b = taken(spec.a), taken(spec.b)
    scales = [None if one is None else taken(one) for one in (spec.scale_a, spec.scale_b)]
    x = _multiplied(spec, a, b, scales)
    if spec.alpha != 1:
        x = x * spec.alpha
    if spec.c is not None and spec.beta:
        x = x + spec.beta * taken(spec.c)
    if spec.bias is not None:
        bias = taken(spec.bias)
        x = x + (bias if bias.dim() == 1 else bias[..., None, :])
    if spec.saved is not None:
        _save(x, spec.epilogue, spec.saved, call)
    x = _applied(x, spec, None if spec.aux is None else read(call, spec.aux))
    if spec.sums is not None:
        value, axis = {"sum_a": (a, -1), "sum_b": (b, -2)}.get(spec.epilogue, (x, -2))
        write(call, spec.sums, value.sum(axis).expand(spec.sums.shape))
    if spec.scale_out is not None:
        x = x * taken(spec.scale_out)
    write(call, spec.out, _rounded(x, spec.out.dtype))


def _multiplied(spec: FusedMatmulSpec, a: T, b: T, scales: list[T | None]) -> T:
    if {"vectors", "blocks"}.intersection(spec.scale_kinds):
        a, b = (
            one if scale is None else one * _spread(scale, one.shape)
            for one, scale in zip((a, b), scales, strict=True)
        )
        scales = []
    x = torch.matmul(a, b)
    for factor in scales:
        if factor is not None:
            x = x * factor
    return x


def _spread(scale: T, shape: torch.Size) -> T:
    """Repeat scales of blocks for each of their elements."""
    for axis in (-2, -1):
        if scale.shape[axis] != shape[axis]:
            scale = scale.repeat_interleave(SCALED_BLOCK, axis)
    return scale[..., : shape[-2], : shape[-1]]


def _save(x: T, epilogue: str, saved: ArraySpec, call: Any) -> None:
    """Keep what the gradient of an activation needs, with zeros after it in each row."""
    kept = _packed(~(x <= 0)) if epilogue == "relu" else x
    room = torch.zeros(saved.shape, dtype=kept.dtype, device=kept.device)
    room[..., : kept.shape[-1]] = kept
    write(call, saved, room)


def _packed(bits: T) -> T:
    """Pack truth values into bytes, the first one into the lowest bit."""
    count = bits.shape[-1]
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -count % 8)).reshape(*bits.shape[:-1], -1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def _applied(x: T, spec: FusedMatmulSpec, aux: T | None) -> T:
    """Apply an activation, or the derivative of one by what it has left."""
    if spec.epilogue == "relu":
        return torch.where(x <= 0, torch.zeros_like(x), x)
    if spec.epilogue == "gelu":
        return x * (0.5 * (1 + torch.tanh(_ROOT * (x + _CUBE * x * x * x))))
    if aux is not None and spec.epilogue == "relu_grad":
        bits = aux[..., None] >> torch.arange(8, dtype=torch.uint8, device=aux.device) & 1
        bits = bits.reshape(*aux.shape[:-1], -1)[..., : x.shape[-1]]
        return torch.where(bits != 0, x, torch.zeros_like(x))
    if aux is not None and spec.epilogue == "gelu_grad":
        z = aux[..., : x.shape[-1]].to(x.dtype)
        t = torch.tanh(_ROOT * (z + _CUBE * z * z * z))
        return x * (0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * z * z))
    return x


def _rounded(x: T, dtype: DType) -> T:
    """Round to the type of the result: float8 and int8 are saturated, int32 wraps around."""
    if dtype is DType.int8:
        return torch.round(x).clamp(-128, 127)
    if dtype is DType.int32:
        return x.to(torch.int64).to(torch.int32)
    return x.clamp(-_MOST[dtype], _MOST[dtype]) if dtype in _MOST else x
