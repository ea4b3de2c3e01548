"""Functions of arrays by the Python array API standard: messages, functions, and the actor that serves them.

A function asks the device of its array. See `Device.ask` for cancellation and the errors that any operation
can end with.
"""

import typing as _typing

from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
from . import (
    _calculus,
    _creation,
    _elementwise,
    _fused,
    _indexing,
    _manipulation,
    _numeric,
    _reductions,
    _scans,
    _selection,
    _sorting,
    _views,
)
from ._actor import ArraysActor
from ._calculus import *
from ._creation import *
from ._elementwise import *
from ._fused import *
from ._indexing import *
from ._manipulation import *
from ._numeric import *
from ._reductions import *
from ._scans import *
from ._selection import *
from ._sorting import *
from ._views import *

__all__: list[str] = ["ArraysActor"]
__all__ += _calculus.__all__
__all__ += _creation.__all__
__all__ += _elementwise.__all__
__all__ += _fused.__all__
__all__ += _indexing.__all__
__all__ += _manipulation.__all__
__all__ += _numeric.__all__
__all__ += _reductions.__all__
__all__ += _scans.__all__
__all__ += _selection.__all__
__all__ += _sorting.__all__
__all__ += _views.__all__

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
