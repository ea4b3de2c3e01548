"""The actor that serves kernels of the user's own."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["JitActor"]


class JitActor(LibraryActor):
    """Serves launches of kernels, on a stream of its own.

    CPU backend: functions that are named by import path. CUDA: NVRTC, nvJitLink and the driver.
    """

    library = "jit"
