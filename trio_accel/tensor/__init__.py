"""Tensors on a device: contractions, reductions, permutations, by letters of their axes.

Axes are named by letters, as in Einstein's convention: ``"ik,kj->ij"``. A function runs on the device of its
first operand in device memory. Other operands may be NumPy arrays, which are copied there. See `Device.ask`
for cancellation and the errors that any operation can end with. All functions raise:

* `TypeError`: no operand is on a device, dtypes differ, a factor is complex and the arrays are real, or the
  function does not take the dtype.
* `ValueError`: subscripts are not valid or do not fit the operands, a name is unknown, or `out` has another
  shape or dtype, or shares memory with an operand.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._contractions import *
from ._elements import *

_export_operations(__name__, instead="write await device.put(array) to make an array on a device")
