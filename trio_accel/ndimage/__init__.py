"""Functions of images of any number of axes: filters, interpolation, labels and distances, of expressions."""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
from ._bilateral import *
from ._filters import *
from ._interpolation import *
from ._morphology import *
from ._ranks import *
from .windows import *

_export(__name__)

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
