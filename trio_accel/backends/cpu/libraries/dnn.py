"""Convolutions, pooling and attention by NumPy: windows of strides, and the BLAS.

All work in pieces, so that temporary arrays have some megabytes; one thread adds in one order.
"""

from __future__ import annotations

from ._attention import attention, attention_grad
from ._convolutions import convolution, convolution_input_grad, convolution_weight_grad
from ._pooling import avg_pool, avg_pool_grad, max_pool, max_pool_grad

__all__ = [
    "attention", "attention_grad", "avg_pool", "avg_pool_grad", "convolution", "convolution_input_grad",
    "convolution_weight_grad", "max_pool", "max_pool_grad",
]  # fmt: skip
