"""The program in JAX, with arrays that never change: it has no method that writes to one."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np
from library_programs import ReadingProgram

from trio_accel.programs import Array

# Else it takes three quarters of the GPU's memory with its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax: Any = import_module("jax")  # no dependency
jax.config.update("jax_enable_x64", True)


class JaxProgram(ReadingProgram):
    """On the CPU and on CUDA."""

    xp = jax.numpy

    def taken(self, array: Array) -> Any:
        # JAX asks for arrays by an older DLPack, in which NumPy exports no read-only array.
        is_numpy = isinstance(array, np.ndarray)
        return jax.numpy.asarray(array) if is_numpy else jax.dlpack.from_dlpack(array)
