"""Protocols, operation specifications, element types and errors that all backends share."""

from . import checks, errors, ops, protocols
from .chunks import ChunkAllocator, Placement
from .device_array import DeviceArray
from .device_info import BackendReport, DeviceInfo, DeviceReport, Isolation, Software
from .dtypes import DType, DTypeLike
from .errors import *
from .foreign import CopyFromForeignSpec, ForeignArray, SharesCudaMemory
from .kernels import DeviceCall, HostCall, KernelCall, KernelDevice, kernel
from .memory import BlockMemory, ChunkSource
from .protocols import *
from .values import as_bits, scalar

__all__: list[str] = [
    "BackendReport",
    "BlockMemory",
    "ChunkAllocator",
    "ChunkSource",
    "CopyFromForeignSpec",
    "DType",
    "DTypeLike",
    "DeviceArray",
    "DeviceCall",
    "DeviceInfo",
    "DeviceReport",
    "ForeignArray",
    "HostCall",
    "Isolation",
    "KernelCall",
    "KernelDevice",
    "Placement",
    "SharesCudaMemory",
    "Software",
    "as_bits",
    "checks",
    "kernel",
    "ops",
    "scalar",
]
__all__ += errors.__all__
__all__ += protocols.__all__
