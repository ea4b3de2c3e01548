"""The libraries of the CUDA backend, one module each."""
