"""Packages that are not always there."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import NotSupportedError

__all__ = ["import_extra"]


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of a package that an extra brings.

    Raises:
        NotSupportedError: It is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise NotSupportedError(
            f"the package {package} cannot be imported ({error}); pip install 'trio-accel[{extra}]'"
        ) from error
