"""Neural networks on a device: layers' functions, losses, gradients, and steps of optimizers.

`ta.arrays` has `softmax`, `log_softmax`, `layer_norm`, `rms_norm` and `tanh`; their gradients are here. See
`Device.ask` for cancellation and the errors that any operation can end with.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._activations import *
from ._attention import *
from ._convolutions import *
from ._layers import *
from ._library import *
from ._losses import *
from ._margins import *
from ._norms import *
from ._optimizers import *
from ._pooling import *

_export_operations(__name__)
