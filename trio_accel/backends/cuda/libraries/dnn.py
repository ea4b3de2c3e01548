"""Convolutions, pooling and attention: by cuDNN what it has, and all else by kernels of the backend's own."""

from __future__ import annotations

from ...base.kernels import kernel
from ...base.ops import AttentionGradSpec, AttentionSpec
from ..kit._library import KernelCall, LibraryDevice
from ._attention import AttentionKernels
from ._convolutions import ConvolutionLibrary
from ._dnn_base import FLOATS
from ._pooling import PoolingLibrary

__all__ = ["DnnLibrary"]


class DnnLibrary(ConvolutionLibrary, PoolingLibrary, AttentionKernels):
    """Kernels of the source `dnn`, and graphs of cuDNN."""

    def _plan_attention(self, spec: AttentionSpec | AttentionGradSpec, device: LibraryDevice) -> str:
        self._load_products(spec.query.dtype)
        return "products"

    @kernel(AttentionSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention(self, spec: AttentionSpec, call: KernelCall) -> None:
        self._compute_attention(spec, call)

    @kernel(AttentionGradSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        self._compute_attention_grad(spec, call)
