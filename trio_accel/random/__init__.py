"""Random numbers on a device: generators, their messages, Sobol points, and the actor that serves them."""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ._generator import *
from ._messages import *
from ._sobol import *

_export(__name__)

if not _typing.TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
