"""Sparse linear algebra on a device: matrices, messages, functions, and the actor that serves them.

See `Device.ask` for cancellation and the errors that any operation can end with. If one fails, the array that
it was to change is damaged, and its use is refused. All functions raise:

* `TypeError`: dtypes differ, a factor is complex and the arrays are real, or a matrix has another format.
* `ValueError`: shapes that do not fit, an unknown letter, or an `out` that shares memory with an operand.
* `LibraryError`: a structure that was put together by hand and is wrong.
"""

import typing as _typing

from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
from . import (
    _conversions,
    _eigen,
    _elements,
    _formats,
    _iterations,
    _krylov,
    _products,
    _structures,
    _systems,
)
from ._conversions import *
from ._eigen import *
from ._elements import *
from ._formats import *
from ._iterations import *
from ._krylov import *
from ._products import *
from ._structures import *
from ._systems import *

__all__: list[str] = []
__all__ += _conversions.__all__
__all__ += _eigen.__all__
__all__ += _elements.__all__
__all__ += _formats.__all__
__all__ += _iterations.__all__
__all__ += _krylov.__all__
__all__ += _products.__all__
__all__ += _structures.__all__
__all__ += _systems.__all__

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
