"""Neural networks on a device: layers' functions, losses, gradients, and steps of optimizers.

`ta.arrays` has `softmax`, `log_softmax`, `layer_norm`, `rms_norm` and `tanh`; their gradients are here. See
`Device.ask` for cancellation and the errors that any operation can end with.
"""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
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

_export(__name__)

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
