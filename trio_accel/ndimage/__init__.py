"""Functions of images of any number of axes: filters, interpolation, labels and distances, of expressions."""

from ..devices.operations._named import export_operations as _export_operations
from ._bilateral import *
from ._filters import *
from ._interpolation import *
from ._morphology import *
from ._ranks import *
from .windows import *

_export_operations(__name__)
