"""The libraries of the CPU backend, one module each."""
