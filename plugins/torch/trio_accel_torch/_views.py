"""Arrays in memory as tensors, and their elements in types that PyTorch computes in.

PyTorch computes little in uint16, uint32 and uint64, so int64 carries them: the first two as their numbers,
the last one as its bits.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import torch

from trio_accel.backends.base import ArraySpec, DType

TYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in DType}

CARRIED = {DType.uint16: 16, DType.uint32: 32, DType.uint64: 64}
"""The types that int64 carries, and their bits."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By the bytes of an element, the type that copies are made in."""

_SIGN = -(1 << 63)
_TWO_63 = 9223372036854775808.0


def carrier(dtype: DType) -> torch.dtype:
    """Return the type that elements are computed in."""
    return torch.int64 if dtype in CARRIED else TYPES[dtype]


@attrs.frozen(eq=False)
class View:
    """An array in memory. PyTorch has no negative strides, so axes are flipped when it is read or written.

    Attributes:
        at: The elements, with the axes in the order of memory.
        flips: The axes that run backwards.
        dtype: The type of the elements where `at` has single bytes in one more axis, because the elements lie
            at no multiple of their size; else None.
    """

    at: torch.Tensor
    flips: tuple[int, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, memory: torch.Tensor, array: ArraySpec, dtype: torch.dtype | None = None) -> View:
        """Find an array in the memory of its block."""
        size, dtype = array.dtype.itemsize, dtype or TYPES[array.dtype]
        if 0 in array.shape:
            return cls(torch.empty(array.shape, dtype=dtype, device=memory.device), ())
        steps = [
            stride if extent > 1 else 0 for stride, extent in zip(array.strides, array.shape, strict=True)
        ]
        flips = tuple([axis for axis, step in enumerate(steps) if step < 0])
        low = array.offset + sum(
            min(0, step) * (extent - 1) for step, extent in zip(steps, array.shape, strict=True)
        )
        high = (
            low
            + sum(abs(step) * (extent - 1) for step, extent in zip(steps, array.shape, strict=True))
            + size
        )
        if low < 0 or high > memory.numel():
            raise ValueError(
                f"an array of {high} bytes is outside of block {array.block}, of {memory.numel()} bytes"
            )
        strides = [abs(step) for step in steps]
        start = memory.storage_offset() + low
        if any(step % size for step in strides) or low % size or int(memory.storage_offset()) % size:
            at = memory.as_strided((*array.shape, size), (*strides, 1), start)
            return cls(at, flips, dtype)
        whole = memory[: memory.numel() // size * size].view(dtype)
        at = whole.as_strided(array.shape, [step // size for step in strides], start // size)
        return cls(at, flips)

    @property
    def is_direct(self) -> bool:
        """Whether `at` has the elements in the order of the array, so that PyTorch may write them there."""
        return not self.flips and self.dtype is None

    def read(self) -> torch.Tensor:
        """Return the elements, which may be the memory itself."""
        at = self.at
        if self.dtype is not None:
            at = at.contiguous().view(self.dtype).reshape(at.shape[:-1])
        return at.flip(self.flips) if self.flips else at

    def write(self, value: torch.Tensor) -> None:
        """Set the elements; the value broadcasts, and does not share the memory."""
        if self.flips:
            value = value.expand(self.at.shape[: self.at.dim() - (self.dtype is not None)]).flip(self.flips)
        if self.dtype is not None:
            shape = self.at.shape[:-1]
            value = value.to(self.dtype).expand(shape).contiguous().unsqueeze(-1).view(torch.uint8)
        at = self.at
        for axis, step in enumerate(at.stride()):
            if step == 0 and at.shape[axis] > 1:
                # All elements along it are one, which is the last.
                value = value.expand(at.shape).narrow(axis, at.shape[axis] - 1, 1)
                at = at.narrow(axis, 0, 1)
        at.copy_(value)


def read(call: Any, array: ArraySpec) -> torch.Tensor:
    """Return the elements of an array in their carrier."""
    bits = CARRIED.get(array.dtype)
    if bits is None:
        value: torch.Tensor = call.device.view(array).read()
        return value
    value = call.device.view(array, BITS[array.dtype.itemsize]).read()
    return value if bits == 64 else value.to(torch.int64) & ((1 << bits) - 1)


def write(call: Any, array: ArraySpec, value: torch.Tensor) -> None:
    """Set the elements of an array to a value in their carrier, which broadcasts."""
    if array.dtype in CARRIED:
        bits = BITS[array.dtype.itemsize]
        call.device.view(array, bits).write(value.to(bits))
    else:
        call.device.view(array).write(value)


def wrapped(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Have a carried number wrap around as its type does."""
    bits = CARRIED.get(dtype, 64)
    return value if bits == 64 else value & ((1 << bits) - 1)


def turned(value: torch.Tensor) -> torch.Tensor:
    """Return numbers with a sign in the order of uint64, or the bits of these again."""
    return value ^ _SIGN


def cast(value: torch.Tensor, source: DType, dtype: DType) -> torch.Tensor:
    """Convert elements between carriers as `numpy.ndarray.astype` does."""
    if source is dtype:
        return value
    if dtype is DType.bool:
        return value != 0
    if value.is_complex() and dtype.kind != "complex":
        value = value.real
    if dtype.is_inexact:
        if source is DType.uint64:
            wide = torch.float32 if dtype is DType.float32 else torch.float64
            # Half of a large number is rounded as the whole is, if its last bit stands for the lost one too.
            half = (value >> 1) & ((1 << 63) - 1) | (value & 1)
            value = torch.where(value < 0, half.to(wide) * 2, value.to(wide))
        return value.to(TYPES[dtype])
    if source.itemsize == 1 and source.kind == "float":
        value = value.to(torch.float32)
    if value.is_floating_point():
        # Beyond int64 NumPy's numbers are undefined but for uint64.
        if dtype is DType.uint64:
            is_high = value >= _TWO_63
            high = (value.double() - _TWO_63).clamp(0, _TWO_63 / 2 - 1).to(torch.int64) ^ _SIGN
            return torch.where(is_high, high, torch.where(is_high, 0, value).to(torch.int64))
        value = value.to(torch.int64)
    if dtype in CARRIED:
        return wrapped(value.to(torch.int64), dtype)
    return value.to(TYPES[dtype])


def number(value: Any, dtype: DType, device: torch.device) -> torch.Tensor:
    """Return one number of NumPy's as a 0-d tensor in its carrier."""
    with np.errstate(all="ignore"):
        found = np.asarray(value).astype(dtype.dtype)
    if dtype in CARRIED:
        whole = int(found)
        return torch.tensor(
            whole - (1 << 64) if whole >= 1 << 63 else whole, dtype=torch.int64, device=device
        )
    raw = np.frombuffer(found.tobytes(), np.uint8).copy()
    return torch.from_numpy(raw).view(TYPES[dtype])[0].to(device)


def part(array: ArraySpec, start: int, count: int) -> ArraySpec:
    """Return some of the items along the first axis."""
    offset = array.offset + start * array.strides[0]
    return ArraySpec(array.block, offset, array.dtype, (count, *array.shape[1:]), array.strides)


def comparable(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return keys of the same order that PyTorch sorts and compares."""
    if dtype is DType.uint64:
        return turned(value)
    return value.to(torch.uint8) if dtype is DType.bool else value


def size_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    return math.prod(shape)
