"""Pooling by kernels of the backend's own: cuDNN's Python front end has none."""

from __future__ import annotations

import math
from struct import Struct
from typing import Any

from ...base import DType, OutOfRangeError
from ...base.contract.device_array import DeviceArray
from ...base.contract.ops import (
    AvgPoolGradSpec,
    AvgPoolSpec,
    MaxPoolGradSpec,
    MaxPoolSpec,
    OperationSpec,
    StatusArray,
)
from ...base.kit.kernels import kernel
from ..kit._library import KernelCall, LibraryDevice
from ._dnn_base import FLOATS, GRID, KINDS, DnnKernels, grid_of, wide, wide_of, wide_result

__all__ = ["PoolingLibrary", "first_wrong"]

# As in dnn.cu.
_POOL = Struct(f"<3Qq{GRID}3qq4i")
_SPREAD = Struct("<4Q3q2i")


class PoolingLibrary(DnnKernels):
    """Maxima and means of windows, a thread for each; and their gradients."""

    def captures(self, spec: OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: indices that are checked are looked at on the host."""
        return not isinstance(spec, MaxPoolGradSpec) and super().captures(spec)

    def _plan_pool(self, spec: Any, device: LibraryDevice) -> str:
        self._load("pool", _POOL)
        return "pool"

    def _plan_means_grad(self, spec: AvgPoolGradSpec, device: LibraryDevice) -> str:
        self._load("mean_pool_grad", _POOL)
        return "mean_pool_grad"

    def _plan_spread(self, spec: MaxPoolGradSpec, device: LibraryDevice) -> str:
        self._load("max_pool_grad", _SPREAD)
        return "max_pool_grad"

    @kernel(MaxPoolSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_pool)
    def _max_pool(self, spec: MaxPoolSpec, call: KernelCall) -> None:
        if not spec.out.size:
            return
        indices = 0 if spec.indices is None else call.result(spec.indices)
        grid = grid_of(spec, spec.x, spec.out, spec.window)
        numbers = 0, 0, 0, 0, False, not spec.window[0], KINDS[spec.x.dtype], False
        addresses = call.packed(spec.x), call.result(spec.out), indices
        self.launch(call.plan, call, spec.out.size, *addresses, spec.out.size, *grid, *numbers)

    @kernel(AvgPoolSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_pool)
    def _avg_pool(self, spec: AvgPoolSpec, call: KernelCall) -> None:
        self._pool_means(spec, call, (spec.x, spec.out), (spec.x, spec.out))

    @kernel(AvgPoolGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_means_grad)
    def _avg_pool_grad(self, spec: AvgPoolGradSpec, call: KernelCall) -> None:
        self._pool_means(spec, call, (spec.out, spec.grad), (spec.grad, spec.out))

    def _pool_means(
        self, spec: AvgPoolSpec | AvgPoolGradSpec, call: KernelCall, shapes: Any, arrays: Any
    ) -> None:
        """Launch a kernel of means, or of their gradient.

        Args:
            spec: The specification.
            call: The call.
            shapes: The array of images, and that of windows.
            arrays: What is read, and what is written.
        """
        images, windows = shapes
        source, target = arrays
        if not target.size:
            return
        grid = grid_of(spec, images, windows, spec.window)
        behind = *(0,) * (3 - len(spec.behind)), *spec.behind
        flags = spec.count_include_pad, not spec.window[0], KINDS[source.dtype], True
        addresses = call.packed(source), call.result(target), 0
        values = *addresses, target.size, *grid, *behind, spec.divisor, *flags
        self.launch(call.plan, call, target.size, *values)

    @kernel(MaxPoolGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_spread)
    def _max_pool_grad(self, spec: MaxPoolGradSpec, call: KernelCall) -> None:
        if not spec.out.size:
            return
        size = math.prod(spec.out.shape[2:])

        def judge(words: StatusArray) -> None:
            index = first_wrong(words)
            if words[0]:
                raise OutOfRangeError(
                    f"indices: {index} is outside of the input, which has {size} elements in each channel",
                    library="dnn",
                    index=index,
                    axis=2,
                    length=size,
                )

        words = call.words(3, judge)
        is_wide = spec.indices.dtype is DType.int64
        with wide_result(call, spec.out) as out:
            call.fill(DeviceArray.packed(out, wide_of(spec.out.dtype), spec.out.shape), 0)
            values = (
                *(wide(call, spec.grad), call.packed(spec.indices), out, words, spec.grad.size),
                *(math.prod(spec.grad.shape[2:]), size, is_wide, spec.grad.dtype is DType.float64),
            )
            self.launch(call.plan, call, spec.grad.size, *values)


def first_wrong(words: StatusArray) -> int:
    """Return the number that a kernel has found wrong, out of its two halves."""
    return (int(words[2]) << 32) | (int(words[1]) & 0xFFFFFFFF)
