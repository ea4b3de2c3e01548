"""Fourier transforms on a device, and functions composed of them: messages, functions, and the actor."""

from ..devices.operations._named import export_operations as _export_operations
from ._convolutions import *
from ._functions import *
from ._fused import *
from ._helpers import *
from ._real import *

_export_operations(__name__)
