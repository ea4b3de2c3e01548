"""PyTorch's devices as a backend of trio_accel. The entry point imports this, and not PyTorch."""

from ._backend import TorchBackend as TorchBackend
