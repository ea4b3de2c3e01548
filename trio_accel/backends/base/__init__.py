"""Protocols, operation specifications, element types and errors that all backends share."""

from . import checks, ops
from .chunks import ChunkAllocator, Placement
from .device_info import DeviceInfo, Isolation
from .dtypes import DType, DTypeLike
from .errors import (
    AccelError,
    CompilationError,
    CompletionTimeoutError,
    ContextPoisonedError,
    DeviceLostError,
    DriverError,
    InputFailedError,
    LibraryError,
    LinAlgError,
    NotSupportedError,
    OutOfMemoryError,
    QueueFullError,
    StaleRefError,
)
from .findings import BackendReport, DeviceReport, Software
from .foreign import CopyFromForeignSpec, ForeignArray, SharesCudaMemory
from .kernels import Call, kernel
from .memory import BlockMemory, ChunkSource
from .protocols import (
    AccelBackend,
    AccelDevice,
    AccelEvent,
    AccelStream,
    CacheCounts,
    ChunkKeeper,
    Hold,
    InThread,
    KernelLibrary,
    Lease,
    LibraryUsage,
    MemoryStatistics,
    PlacedBlock,
    Poison,
    Waker,
)
from .scalars import as_bits, scalar

__all__ = [
    "AccelBackend",
    "AccelDevice",
    "AccelError",
    "AccelEvent",
    "AccelStream",
    "BackendReport",
    "BlockMemory",
    "CacheCounts",
    "Call",
    "ChunkAllocator",
    "ChunkKeeper",
    "ChunkSource",
    "CompilationError",
    "CompletionTimeoutError",
    "ContextPoisonedError",
    "CopyFromForeignSpec",
    "DType",
    "DTypeLike",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceReport",
    "DriverError",
    "ForeignArray",
    "Hold",
    "InThread",
    "InputFailedError",
    "Isolation",
    "KernelLibrary",
    "Lease",
    "LibraryError",
    "LibraryUsage",
    "LinAlgError",
    "MemoryStatistics",
    "NotSupportedError",
    "OutOfMemoryError",
    "PlacedBlock",
    "Placement",
    "Poison",
    "QueueFullError",
    "SharesCudaMemory",
    "Software",
    "StaleRefError",
    "Waker",
    "as_bits",
    "checks",
    "kernel",
    "ops",
    "scalar",
]
