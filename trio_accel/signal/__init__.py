"""Filters, spectra and splines on a device, by SciPy's names; convolutions are in `ta.fft`.

They are composed of transforms, expressions, and kernels of recursive filters. Filters, windows and knots are
host arrays; signals are arrays of a device.
"""

import typing as _typing

from .._names import export as _export
from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from ..devices.operations._named import named as _named
from ._filters import *
from ._spectra import *
from ._splines import *

_export(__name__)

if not _typing.TYPE_CHECKING:
    _named(__name__)
    __getattr__ = _tells_of_missing(__name__)
