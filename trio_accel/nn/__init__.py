"""Neural networks on a device: messages, functions, and the actor that serves them."""

from . import _actor, _attention, _convolutions, _pooling
from ._actor import *
from ._attention import *
from ._convolutions import *
from ._pooling import *

__all__: list[str] = []
__all__ += _actor.__all__
__all__ += _attention.__all__
__all__ += _convolutions.__all__
__all__ += _pooling.__all__
