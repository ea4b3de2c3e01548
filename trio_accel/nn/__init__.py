"""Neural networks on a device: messages, functions, and the actor that serves them."""

from . import _actor, _adaptive_pooling, _attention, _convolutions, _pooling
from ._actor import *
from ._adaptive_pooling import *
from ._attention import *
from ._convolutions import *
from ._pooling import *

__all__: list[str] = []
__all__ += _actor.__all__
__all__ += _adaptive_pooling.__all__
__all__ += _attention.__all__
__all__ += _convolutions.__all__
__all__ += _pooling.__all__
