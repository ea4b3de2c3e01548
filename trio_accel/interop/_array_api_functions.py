"""Functions of the array API standard that the packages have not with its signature, made of theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import arrays, linalg
from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Device

__all__ = ["FftFunctions", "Functions", "LinalgFunctions", "run"]

# Names are looked up when they are called: what is not there is not there by that name.
_arrays: Any = arrays
_linalg: Any = linalg


async def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and wait for its result if it is an async one: those of views are not."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class _Of:
    """Functions on a device.

    Args:
        device: Where arrays are made, unless another one is given.
    """

    def __init__(self, device: Device) -> None:
        self._device = device


class Functions(_Of):
    """Those of the namespace itself."""

    async def empty(
        self, shape: int | Sequence[int], *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array to be written."""
        return await (device or self._device).empty(shape, dtype or DType.float64)

    async def zeros(
        self, shape: int | Sequence[int], *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array of zeros."""
        return await (device or self._device).zeros(shape, dtype or DType.float64)

    async def ones(
        self, shape: int | Sequence[int], *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array of ones."""
        return await (device or self._device).full(shape, 1, dtype or DType.float64)

    async def full(
        self,
        shape: int | Sequence[int],
        fill_value: complex | AccelRef,
        *,
        dtype: DTypeLike | None = None,
        device: Device | None = None,
    ) -> AccelRef:
        """Make an array of one value."""
        value = await fill_value.item() if isinstance(fill_value, AccelRef) else fill_value
        chosen = getattr(fill_value, "dtype", np.asarray(value).dtype) if dtype is None else dtype
        return await (device or self._device).full(shape, value, chosen)

    async def empty_like(
        self, x: AccelRef, /, *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array to be written, of the shape of another."""
        return await self.empty(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    async def zeros_like(
        self, x: AccelRef, /, *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array of zeros, of the shape of another."""
        return await self.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    async def ones_like(
        self, x: AccelRef, /, *, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Make an array of ones, of the shape of another."""
        return await self.ones(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    async def full_like(
        self,
        x: AccelRef,
        /,
        fill_value: complex | AccelRef,
        *,
        dtype: DTypeLike | None = None,
        device: Device | None = None,
    ) -> AccelRef:
        """Make an array of one value, of the shape of another."""
        return await self.full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)

    async def astype(
        self, x: AccelRef, dtype: DTypeLike, /, *, copy: bool = True, device: Device | None = None
    ) -> AccelRef:
        """Convert the elements; a copy unless nothing is to be converted and `copy` is False."""
        if device not in (None, x.device):
            x, copy = await x.copy_to(device), False
        return x if not copy and DType.of(dtype) is x.dtype else await x.cast(dtype)

    async def reshape(self, x: AccelRef, /, shape: Sequence[int], *, copy: bool | None = None) -> AccelRef:
        """Give the elements another shape: as a view where there is one, unless `copy` says otherwise."""
        if copy:
            return (await x.copy()).reshape(shape)
        try:
            return x.reshape(shape)
        except ValueError:
            if copy is False:
                raise
        return (await x.copy()).reshape(shape)

    async def broadcast_arrays(self, *arrays: AccelRef) -> tuple[AccelRef, ...]:
        """Return views of arrays with the shape that they broadcast to."""
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        return tuple([await run(_arrays.broadcast_to, array, shape) for array in arrays])


class LinalgFunctions(_Of):
    """Those of the extension for linear algebra."""


class FftFunctions(_Of):
    """Those of the extension for Fourier transforms."""

    async def fftfreq(
        self, n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Return the frequencies of the results of `fft`."""
        chosen = _floating("fftfreq", dtype)
        return await (device or self._device).put(np.fft.fftfreq(n, d).astype(chosen.dtype))

    async def rfftfreq(
        self, n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: Device | None = None
    ) -> AccelRef:
        """Return the frequencies of the results of `rfft`."""
        chosen = _floating("rfftfreq", dtype)
        return await (device or self._device).put(np.fft.rfftfreq(n, d).astype(chosen.dtype))

    async def fftshift(self, x: AccelRef, /, *, axes: int | Sequence[int] | None = None) -> AccelRef:
        """Move the frequency 0 to the middle."""
        return await _shifted(x, axes, 1)

    async def ifftshift(self, x: AccelRef, /, *, axes: int | Sequence[int] | None = None) -> AccelRef:
        """Move the frequency 0 from the middle to the begin."""
        return await _shifted(x, axes, -1)


async def _shifted(x: AccelRef, axes: int | Sequence[int] | None, sign: int) -> AccelRef:
    chosen = range(x.ndim) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    # Towards the end the half is rounded down, and back the same.
    moved: AccelRef = await _arrays.roll(
        x, tuple(sign * (x.shape[axis] // 2) for axis in chosen), axis=tuple(chosen)
    )
    return moved


def _floating(name: str, dtype: DTypeLike | None) -> DType:
    chosen = DType.float64 if dtype is None else DType.of(dtype)
    if chosen.kind != "float":
        raise TypeError(f"{name}: dtype must be a real floating one, got {chosen}")
    return chosen
