"""Dense linear algebra on a device: messages, functions, and the actors that serve them.

A function runs on the device of its first operand in device memory. Other operands may be NumPy arrays, which
are copied there. See `Device.ask` for cancellation and the errors that any operation can end with. If a
function fails, the arrays that it had to change are damaged, and their use is refused.

Refusals of all functions, before anything is launched:

* `TypeError`: no operand is on a device, dtypes differ, or a factor is complex and the arrays are real.
* `ValueError`: shapes do not fit, letters are unknown, factors are outside the range of the dtype; or an
  array to write to has another shape or dtype than the result, or shares memory with an operand, unless that
  is allowed.
* `numpy.linalg.LinAlgError`, which is a `ValueError`: an operand of a solver is not a stack of matrices, or
  of square ones if required.
* `NotSupportedError`: the backend lacks the function, or the dtype; solvers raise a `TypeError` for the
  latter.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._actor import *
from ._blas import *
from ._composed import *
from ._contractions import *
from ._fused import *
from ._norms import *
from ._spectra import *
from ._systems import *
from ._views import *

_export_operations(__name__)
