"""Functions of arrays by the Python array API standard: messages, functions, and the actor that serves them.

A function asks the device of its array. See `Device.ask` for cancellation and the errors that any operation
can end with.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._actor import ArraysActor as ArraysActor
from ._calculus import *
from ._creation import *
from ._elementwise import *
from ._indexing import *
from ._manipulation import *
from ._numeric import *
from ._reductions import *
from ._scans import *
from ._selection import *
from ._sorting import *
from ._views import *

_export_operations(__name__)
