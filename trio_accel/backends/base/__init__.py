"""Protocols, operation specifications, element types and errors that all backends share."""

from . import checks, dtypes, errors, foreign, ops, protocols
from .chunks import ChunkAllocator, Placement
from .device_array import DeviceArray
from .device_info import BackendReport, DeviceInfo, DeviceReport, Isolation, Software
from .dtypes import *
from .errors import *
from .foreign import *
from .kernels import DeviceCall, HostCall, KernelCall, KernelDevice, kernel
from .memory import BlockMemory, ChunkSource
from .protocols import *
from .topology import DeviceLink, LinkKind, Topology
from .values import as_bits, scalar

__all__: list[str] = [
    "BackendReport",
    "BlockMemory",
    "ChunkAllocator",
    "ChunkSource",
    "DeviceArray",
    "DeviceCall",
    "DeviceInfo",
    "DeviceLink",
    "DeviceReport",
    "HostCall",
    "Isolation",
    "KernelCall",
    "KernelDevice",
    "LinkKind",
    "Placement",
    "Software",
    "Topology",
    "as_bits",
    "checks",
    "kernel",
    "ops",
    "scalar",
]
__all__ += dtypes.__all__
__all__ += errors.__all__
__all__ += foreign.__all__
__all__ += protocols.__all__
