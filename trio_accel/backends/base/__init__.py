"""Protocols, operation specifications, element types and errors that all backends share."""

from ..._names import export as _export
from .contract import ops as ops
from .contract.device_array import DeviceArray as DeviceArray
from .contract.device_info import *
from .contract.dtypes import *
from .contract.errors import *
from .contract.foreign import *
from .contract.ops import ArraySpec as ArraySpec
from .contract.ops import OperationSpec as OperationSpec
from .contract.protocols import *
from .contract.values import *
from .kit import checks as checks
from .kit.checks import *
from .kit.chunks import *
from .kit.kernels import *
from .kit.memory import *

_export(__name__)
