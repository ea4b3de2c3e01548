"""Libraries of the CUDA backend, and the sources of its own kernels."""
