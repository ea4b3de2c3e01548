"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

from . import _functions
from ._functions import *

__all__: list[str] = []
__all__ += _functions.__all__
