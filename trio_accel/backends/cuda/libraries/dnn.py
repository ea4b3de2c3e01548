"""Convolutions, pooling and attention: by cuDNN what it has, and all else by kernels of the backend's own."""

from __future__ import annotations

from struct import Struct
from typing import Any

from ...base import DType
from ...base.kernels import kernel
from ...base.ops import (
    ArraySpec,
    AttentionGradSpec,
    AttentionSpec,
    ConvolutionInputGradSpec,
    ConvolutionSpec,
    ConvolutionWeightGradSpec,
)
from ..kit._library import KernelCall, LibraryDevice
from ._attention import AttentionKernels
from ._dnn_base import FLOATS, GRID, LANES, grid_of, images_of, wide, wide_result
from ._pooling import PoolingLibrary

__all__ = ["DnnLibrary"]

# As in dnn.cu.
_CONVOLUTION = Struct(f"<4Q5q{GRID}q")


class DnnLibrary(PoolingLibrary, AttentionKernels):
    """Kernels of the source `dnn`."""

    def _plan_convolution(self, spec: ConvolutionSpec, device: LibraryDevice) -> str:
        return self._plan_direct("convolution")

    def _plan_input_grad(self, spec: ConvolutionInputGradSpec, device: LibraryDevice) -> str:
        return self._plan_direct("convolution_input_grad")

    def _plan_weight_grad(self, spec: ConvolutionWeightGradSpec, device: LibraryDevice) -> str:
        return self._plan_direct("convolution_weight_grad")

    def _plan_direct(self, name: str) -> str:
        self._load(name, _CONVOLUTION)
        return name

    @kernel(ConvolutionSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_convolution)
    def _convolution(self, spec: ConvolutionSpec, call: KernelCall) -> None:
        self._convolve(spec, call, (spec.x, spec.weight, spec.out), (spec.x, spec.weight, spec.bias), spec.out)

    @kernel(ConvolutionInputGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_input_grad)
    def _input_grad(self, spec: ConvolutionInputGradSpec, call: KernelCall) -> None:
        arrays = spec.out, spec.weight, spec.grad
        self._convolve(spec, call, arrays, (spec.grad, spec.weight, spec.bias), spec.out)

    @kernel(ConvolutionWeightGradSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_weight_grad)
    def _weight_grad(self, spec: ConvolutionWeightGradSpec, call: KernelCall) -> None:
        self._convolve(spec, call, (spec.x, spec.out, spec.grad), (spec.x, spec.grad, None), spec.out)

    def _convolve(
        self,
        spec: Any,
        call: KernelCall,
        shapes: tuple[ArraySpec, ArraySpec, ArraySpec],
        read: tuple[ArraySpec, ArraySpec, ArraySpec | None],
        target: ArraySpec,
    ) -> None:
        """Launch a convolution by definition.

        Args:
            spec: The specification.
            call: The call.
            shapes: Images, weights and windows.
            read: Two operands, and a bias.
            target: The result.
        """
        images, weight, windows = shapes
        if not target.size:
            return
        count = target.size * (LANES if target is weight else 1)
        numbers = (
            *(target.size, images_of(images, len(spec.stride)), spec.groups, weight.shape[1]),
            *(weight.shape[0] // spec.groups, *grid_of(spec, images, windows, weight.shape[2:])),
        )
        addresses = [0 if array is None else wide(call, array) for array in read]
        with wide_result(call, target) as out:
            self._launch(call.plan, call, count, *addresses, out, *numbers, target.dtype is DType.float64)

    def _plan_attention(self, spec: AttentionSpec | AttentionGradSpec, device: LibraryDevice) -> str:
        self._load_products(spec.query.dtype)
        return "products"

    @kernel(AttentionSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention(self, spec: AttentionSpec, call: KernelCall) -> None:
        self._compute_attention(spec, call)

    @kernel(AttentionGradSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        self._compute_attention_grad(spec, call)
