"""Convolutions: windows are copied to the columns of a matrix, which is multiplied by the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...base.contract.dtypes import DType
from ...base.contract.ops import ConvolutionInputGradSpec, ConvolutionSpec, ConvolutionWeightGradSpec
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray, convert, to_float32

__all__ = ["batched", "convolution", "convolution_input_grad", "convolution_weight_grad", "widened"]

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
# Elements of the columns that are made at a time.
_PIECE = 1 << 21


def widened(array: HostArray) -> HostArray:
    """Return an array in the type that it is computed in."""
    return to_float32(array) if DType.of(array.dtype).is_half else array


def batched(array: HostArray, axes: int) -> HostArray:
    """Return a view with so many axes, the first of which may be missing."""
    return array if array.ndim == axes else array[None]


class _Windows:
    """The windows of a convolution over images.

    Attributes:
        spatial: Extents of the images.
        window: Extents of the windows, and of the weights.
        counts: How many windows there are along each axis.
        padding: Zeros before the first element.
    """

    def __init__(
        self,
        spec: ConvolutionSpec | ConvolutionInputGradSpec | ConvolutionWeightGradSpec,
        images: HostArray,
        weight: HostArray,
        windows: HostArray,
    ) -> None:
        self.spatial = images.shape[2:]
        self.window = weight.shape[2:]
        self.counts = windows.shape[2:]
        self.padding = spec.padding
        self._stride = spec.stride
        self._dilation = spec.dilation
        self._count = len(images)
        # Elements of the columns of windows that differ along the first axis alone.
        self._line = max(1, images.shape[1] * math.prod(self.window) * math.prod(self.counts[1:]))
        self._most = max(1, weight.size)

    def images(self) -> Iterator[slice]:
        """Cut the images into pieces."""
        step = max(1, _PIECE // max(self._line * self.counts[0], self._most))
        for first in range(0, self._count, step):
            yield slice(first, min(first + step, self._count))

    def lines(self) -> Iterator[slice]:
        """Cut the windows along the first axis into pieces: one, where there may be several images."""
        step = max(1, _PIECE // self._line)
        for first in range(0, self.counts[0], step):
            yield slice(first, min(first + step, self.counts[0]))

    def padded(self, images: HostArray) -> HostArray:
        """Copy images into zeros, which hold all windows."""
        buffer = self.zeros(len(images), images.shape[1], images.dtype)
        np.copyto(self.inner(buffer), images)
        return buffer

    def zeros(self, count: int, channels: int, dtype: np.dtype[Any]) -> HostArray:
        """Make zeros for so many images."""
        extents = [
            max(before + extent, (count - 1) * stride + dilation * (width - 1) + 1)
            for before, extent, count, stride, dilation, width in zip(
                self.padding,
                self.spatial,
                self.counts,
                self._stride,
                self._dilation,
                self.window,
                strict=True,
            )
        ]
        return np.zeros((count, channels, *extents), dtype)

    def inner(self, buffer: HostArray) -> HostArray:
        """Return the view of the images within their zeros."""
        places = [slice(one, one + extent) for one, extent in zip(self.padding, self.spatial, strict=True)]
        return buffer[(slice(None), slice(None), *places)]

    def of(self, buffer: HostArray, lines: slice) -> HostArray:
        """Return the view of windows: image, channel, place in the window, window."""
        steps = buffer.strides[2:]
        taps = [step * dilation for step, dilation in zip(steps, self._dilation, strict=True)]
        strides = [step * stride for step, stride in zip(steps, self._stride, strict=True)]
        view = as_strided(
            buffer,
            (*buffer.shape[:2], *self.window, *self.counts),
            (*buffer.strides[:2], *taps, *strides),
        )
        return view[(*(slice(None),) * (2 + len(steps)), lines)]


@kernel(ConvolutionSpec, backend="cpu", dtypes={"x": FLOATS})
def convolution(spec: ConvolutionSpec, call: HostCall) -> None:
    """Multiply weights by columns of windows, of each group by itself."""
    axes, groups = len(spec.stride) + 2, spec.groups
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    weight = widened(call.array(spec.weight))
    windows = _Windows(spec, x, weight, out)
    factors, bias = _by_groups(weight, groups), _bias(spec, call)
    for images in windows.images():
        buffer = windows.padded(widened(x[images]))
        for lines in windows.lines():
            here = out[images, :, lines]
            made = np.matmul(
                factors, _matrices(windows.of(buffer, lines), groups, factors.shape[-1], axes - 2)
            )
            made = made.reshape(here.shape)
            convert(made if bias is None else np.add(made, bias, out=made), here)


@kernel(ConvolutionInputGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def convolution_input_grad(spec: ConvolutionInputGradSpec, call: HostCall) -> None:
    """Multiply transposed weights by windows, and add the columns up where they were taken."""
    axes, groups = len(spec.stride) + 2, spec.groups
    grad, out = batched(call.array(spec.grad), axes), batched(call.array(spec.out), axes)
    weight = widened(call.array(spec.weight))
    windows = _Windows(spec, out, weight, grad)
    factors, bias = _by_groups(weight, groups).swapaxes(-1, -2), _bias(spec, call)
    for images in windows.images():
        buffer = windows.zeros(len(out[images]), out.shape[1], weight.dtype)
        for lines in windows.lines():
            here = _matrices(widened(grad[images, :, lines]), groups, factors.shape[-1], axes - 2)
            view = windows.of(buffer, lines)
            columns = np.matmul(factors, here).reshape(view.shape)
            for place in np.ndindex(windows.window):
                # The windows of one place share no element.
                view[(slice(None), slice(None), *place)] += columns[(slice(None), slice(None), *place)]
        made = windows.inner(buffer)
        convert(made if bias is None else made + bias, out[images])


@kernel(ConvolutionWeightGradSpec, backend="cpu", dtypes={"x": FLOATS})
def convolution_weight_grad(spec: ConvolutionWeightGradSpec, call: HostCall) -> None:
    """Multiply gradients by transposed columns of windows, and add up the images."""
    axes, groups = len(spec.stride) + 2, spec.groups
    x, grad = batched(call.array(spec.x), axes), batched(call.array(spec.grad), axes)
    out = call.array(spec.out)
    windows = _Windows(spec, x, out, grad)
    rows, columns = len(out) // groups, math.prod(out.shape[1:])
    total: HostArray = np.zeros((groups, rows, columns), widened(out[:0]).dtype)
    for images in windows.images():
        buffer = windows.padded(widened(x[images]))
        for lines in windows.lines():
            here = _matrices(widened(grad[images, :, lines]), groups, rows, axes - 2)
            taken = _matrices(windows.of(buffer, lines), groups, columns, axes - 2)
            total += np.matmul(here, taken.swapaxes(-1, -2)).sum(0)
    convert(total.reshape(out.shape), out)


def _by_groups(weight: HostArray, groups: int) -> HostArray:
    """Return the weights as a matrix for each group."""
    return np.ascontiguousarray(weight).reshape(groups, len(weight) // groups, math.prod(weight.shape[1:]))


def _matrices(array: HostArray, groups: int, rows: int, axes: int) -> HostArray:
    """Return matrices of images, with the last axes as their columns; a copy where that is needed."""
    return array.reshape(len(array), groups, rows, math.prod(array.shape[array.ndim - axes :]))


def _bias(spec: ConvolutionSpec | ConvolutionInputGradSpec, call: HostCall) -> HostArray | None:
    """Return the bias as it is added to images."""
    return None if spec.bias is None else widened(call.array(spec.bias)).reshape(-1, *(1,) * len(spec.stride))
