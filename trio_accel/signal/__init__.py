"""Filters, spectra and splines on a device, by SciPy's names; convolutions are in `ta.fft`.

They are composed of transforms, expressions, and kernels of recursive filters. Filters, windows and knots are
host arrays; signals are arrays of a device.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._filters import *
from ._spectra import *
from ._splines import *

_export_operations(__name__)
