"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..backends.base.foreign_names import tells_of_missing as _tells_of_missing
from . import _functions
from ._functions import *

__all__: list[str] = []
__all__ += _functions.__all__

if not _TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
