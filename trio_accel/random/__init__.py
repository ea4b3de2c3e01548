"""Random numbers on a device: generators, their messages, Sobol points, and the actor that serves them."""

from ..devices.operations._named import export_operations as _export_operations
from ._generator import *
from ._messages import *
from ._sobol import *

_export_operations(__name__)
