"""Functions of images with any number of axes, as expressions: filters, interpolation, labels, distances."""

from ..devices.operations._named import export_operations as _export_operations
from ._bilateral import *
from ._filters import *
from ._interpolation import *
from ._morphology import *
from ._ranks import *
from .windows import *

_export_operations(__name__)
