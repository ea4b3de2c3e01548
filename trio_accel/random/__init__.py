"""Random numbers on a device: a generator, its messages, and the actor that serves them."""

from . import _generator
from ._generator import *

__all__: list[str] = []
__all__ += _generator.__all__
