"""Protocols, operation specifications, element types and errors that all backends share."""

from .contract import device_info, dtypes, errors, foreign, ops, protocols
from .contract.device_array import DeviceArray
from .contract.device_info import *
from .contract.dtypes import *
from .contract.errors import *
from .contract.foreign import *
from .contract.protocols import *
from .contract.values import as_bits, scalar
from .kit import checks
from .kit.chunks import ChunkAllocator, Placement
from .kit.kernels import DeviceCall, HostCall, KernelCall, KernelDevice, kernel
from .kit.memory import BlockMemory, ChunkSource

__all__: list[str] = [
    "BlockMemory",
    "ChunkAllocator",
    "ChunkSource",
    "DeviceArray",
    "DeviceCall",
    "HostCall",
    "KernelCall",
    "KernelDevice",
    "Placement",
    "as_bits",
    "checks",
    "kernel",
    "ops",
    "scalar",
]
__all__ += device_info.__all__
__all__ += dtypes.__all__
__all__ += errors.__all__
__all__ += foreign.__all__
__all__ += protocols.__all__
