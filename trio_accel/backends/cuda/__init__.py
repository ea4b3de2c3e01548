"""The CUDA backend: NVIDIA's GPUs."""

from ._backend import CudaBackend

__all__ = ["CudaBackend"]
