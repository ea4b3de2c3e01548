"""Functions of arrays by the Python array API standard: messages, functions, and the actor that serves them.

A function asks the device of its array. See `Device.ask` for cancellation and the errors that any operation
can end with.
"""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
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

_export(__name__)

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
