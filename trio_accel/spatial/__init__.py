"""Points in space on a device: lists of grid cells, and neighbours by them.

See `Device.ask` for cancellation and the errors that any operation can end with.
"""

from ..devices.operations._named import export_operations as _export_operations
from ._points import *

_export_operations(__name__)
