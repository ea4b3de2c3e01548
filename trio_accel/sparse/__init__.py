"""Sparse linear algebra on a device: matrices, messages, functions, and the actor that serves them.

See `Device.ask` for cancellation and the errors that any operation can end with. If one fails, the array that
it was to change is damaged, and its use is refused. All functions raise:

* `TypeError`: dtypes differ, a factor is complex and the arrays are real, or a matrix has another format.
* `ValueError`: shapes that do not fit, an unknown letter, or an `out` that shares memory with an operand.
* `LibraryError`: a structure that was assembled by hand is wrong.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._conversions import *
from ._eigen import *
from ._elements import *
from ._factors import *
from ._formats import *
from ._iterations import *
from ._krylov import *
from ._products import *
from ._steps import *
from ._structures import *
from ._systems import *

_export_operations(__name__)
