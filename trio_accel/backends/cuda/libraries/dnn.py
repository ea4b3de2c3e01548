"""Convolutions, pooling and attention: each is refused by name, as there is no kernel yet.

cuDNN's graphs are to run the specifications of `trio_accel.backends.base.ops.dnn`; see D156.
"""

from __future__ import annotations

from ..kit._library import CudaLibrary

__all__ = ["DnnLibrary"]


class DnnLibrary(CudaLibrary):
    """Has no kernels: every operation raises `NotSupportedError`."""

    name = "dnn"
