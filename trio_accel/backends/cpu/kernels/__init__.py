"""Kernels of the CPU backend, one module for each library."""
