"""Tables on a device: hash maps of whole numbers, made of kernels and expressions.

See `Device.ask` for cancellation and the errors that any operation can end with.
"""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ._hash_map import *

_export(__name__)

if not _typing.TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
