"""Neural networks on a device: activations, normalizations, losses, gradients, and steps of optimizers.

`ta.arrays` has `softmax`, `log_softmax`, `layer_norm`, `rms_norm` and `tanh`; their gradients are here. See
`Device.ask` for cancellation and the errors that any operation can end with.
"""

from . import _activations, _norms
from ._activations import *
from ._norms import *

__all__: list[str] = []
__all__ += _activations.__all__
__all__ += _norms.__all__
