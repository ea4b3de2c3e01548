"""The public names of packages: each is written once, where it is imported."""

from __future__ import annotations

import sys
from types import ModuleType

# Parts of the package that programs import at first use, because they would be half of `import trio_accel`.
# While a device opens, a thread imports them all, so that no first use holds the loop.
LAZY_PARTS = (
    "linalg", "fft", "random", "graphs", "sparse", "jit", "nn", "signal", "ndimage", "spatial", "tables",
    "tensor", "gradients", "programs", "patterns", "weights", "collectives", "interop", "train", "telemetry",
    "http", "replay", "cluster", "agents", "testing",
)  # fmt: skip


def export(package: str, *extra_names: str) -> None:
    """Make all names that a package has imported so far its public names, except modules.

    Type checkers know them as they are: imported by ``*``, or by ``as`` the same name.

    Args:
        package: Name of the package.
        *extra_names: Other public names.
    """
    names = sys.modules[package].__dict__
    imported = [name for name, value in names.items() if name[0] != "_" and not isinstance(value, ModuleType)]
    names["__all__"] = sorted([*imported, *extra_names])
