"""The parts that backends are made of: libraries, kernels, memory, programs, and the choice of routines."""
