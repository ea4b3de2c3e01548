"""Tensors on a device: contractions, reductions, permutations, by letters of their axes.

Axes are named by letters, as in Einstein's convention: ``"ik,kj->ij"``. A function asks the device of its
first operand that is on one. Other operands may be NumPy arrays, which are copied there. See `Device.ask` for
cancellation and the errors that any operation can end with. All functions raise:

* `TypeError`: no operand is on a device, dtypes differ, a factor is complex and the arrays are real, or the
  dtype is not one that the function takes.
* `ValueError`: subscripts that cannot be read or do not fit the operands, an unknown name, or an `out` of
  another shape or dtype, or one that shares memory with an operand.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._contractions import *
from ._elements import *

_export_operations(__name__)
