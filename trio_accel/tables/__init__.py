"""Tables on a device: hash maps of integers, made of kernels and expressions.

See `Device.ask` for cancellation and the errors that any operation can end with.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._hash_map import *

_export_operations(__name__)
