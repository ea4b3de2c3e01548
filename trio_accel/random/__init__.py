"""Random numbers on a device: a generator, its messages, and the actor that serves them."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..backends.base.foreign_names import tells_of_missing as _tells_of_missing
from . import _generator
from ._generator import *

__all__: list[str] = []
__all__ += _generator.__all__

if not _TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
