"""Sparse linear algebra on a device: matrices, messages, functions, and the actor that serves them.

See `Device.ask` for cancellation and the errors that any operation can end with. If one fails, the array that
it was to change is damaged, and its use is refused. All functions raise:

* `TypeError`: dtypes differ, or a factor is complex and the arrays are real.
* `ValueError`: shapes that do not fit, an unknown letter, or an `out` that shares memory with an operand.
* `LibraryError`: a structure that was put together by hand and is wrong.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..backends.base.foreign_names import tells_of_missing as _tells_of_missing
from . import _csr
from ._csr import *

__all__: list[str] = []
__all__ += _csr.__all__

if not _TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
