"""Devices as supervised actors: arrays, operations, completion."""

from ._cancel_grace import cancel_grace
from ._completion import (
    AdaptiveCompletion,
    CompletionPort,
    CompletionStrategy,
    HostCallbackCompletion,
    PolledCompletion,
    SyncCompletion,
)
from ._context import ContextActor
from ._device import Device, device_of
from ._device_actor import DeviceActor
from ._faults import Fault, FaultHow, FaultKind, FaultPlan, anew
from ._hooks import EngineHook, Phase
from ._library import LibraryActor
from ._memory import Copy, Empty, Fill, MemoryActor, Put, ToHost
from ._operation import Launch, Operand, Operation, Planned, Planner, operation_name
from ._options import DeviceOptions
from ._pending import Pending
from ._ref import AccelRef
from ._statistics import DeviceStatistics, QueueStatistics
from ._streams import (
    PerActorStreams,
    PerLibraryStreams,
    SingleStream,
    StreamPool,
    StreamSource,
    StreamStrategy,
)
from ._system import DeviceOpening, System, open_system
from ._values import in_range

__all__ = [
    "AccelRef",
    "AdaptiveCompletion",
    "CompletionPort",
    "CompletionStrategy",
    "ContextActor",
    "Copy",
    "Device",
    "DeviceActor",
    "DeviceOpening",
    "DeviceOptions",
    "DeviceStatistics",
    "Empty",
    "EngineHook",
    "Fault",
    "FaultHow",
    "FaultKind",
    "FaultPlan",
    "Fill",
    "HostCallbackCompletion",
    "Launch",
    "LibraryActor",
    "MemoryActor",
    "Operand",
    "Operation",
    "Pending",
    "PerActorStreams",
    "PerLibraryStreams",
    "Phase",
    "Planned",
    "Planner",
    "PolledCompletion",
    "Put",
    "QueueStatistics",
    "SingleStream",
    "StreamPool",
    "StreamSource",
    "StreamStrategy",
    "SyncCompletion",
    "System",
    "ToHost",
    "anew",
    "cancel_grace",
    "device_of",
    "in_range",
    "open_system",
    "operation_name",
]
