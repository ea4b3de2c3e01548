"""The environment of a recording, which affects results: versions, processor, device."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from typing import TypeAlias

import numpy as np

from .._version import __version__
from ..devices import Device

Environment: TypeAlias = tuple[tuple[str, str], ...]

_DISTRIBUTIONS = ("numpy", "scipy", "cuda-bindings", "cuda-core", "nvmath-python", "torch")
# Settings that change how operations are computed.
_SETTINGS = ("TRIO_ACCEL_CPU_COMPILED", "OPENBLAS_CORETYPE", "NVIDIA_TF32_OVERRIDE")


def environment(device: Device) -> Environment:
    """Return the environment as names and values in plain text."""
    entries = {"trio_accel": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            entries[name] = metadata.version(name)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    entries["BLAS of NumPy"] = f"{blas['name']} {blas['version']}"
    entries["processor"] = platform.processor() or platform.machine()
    entries["device"] = f"{device.info.backend}: {device.info.description}"
    entries |= {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    return tuple(entries.items())
