"""Fourier transforms on a device, and functions that are made of them: messages, functions, and the actor."""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
from ._convolutions import *
from ._functions import *
from ._fused import *
from ._helpers import *
from ._real import *

_export(__name__)

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
