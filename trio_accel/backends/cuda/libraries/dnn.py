"""Convolutions, pooling and attention: by cuDNN what it has, and all else by kernels of the backend's own."""

from __future__ import annotations

from ._convolutions import ConvolutionLibrary
from ._fused_attention import AttentionLibrary
from ._pooling import PoolingLibrary

__all__ = ["DnnLibrary"]


class DnnLibrary(ConvolutionLibrary, PoolingLibrary, AttentionLibrary):
    """Kernels of the source `dnn`, products of cuBLAS, and graphs of cuDNN."""
