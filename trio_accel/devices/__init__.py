"""Devices as supervised actors: arrays, operations, completion."""

from ..backends.base.values import in_range
from ._options import DeviceOptions, Preload
from .arrays._pending import Pending
from .arrays._ref import AccelRef, Device, check_device, device_of
from .base._statistics import (
    CacheStatistics,
    DeviceStatistics,
    LibraryStatistics,
    ProgramCost,
    QueueStatistics,
    RecoveryCost,
)
from .base._streams import (
    PerActorStreams,
    PerLibraryStreams,
    SingleStream,
    StreamPool,
    StreamSource,
    StreamStrategy,
)
from .base._views import overlaps
from .completion._port import CompletionPort, CompletionStrategy
from .completion._strategies import (
    AdaptiveCompletion,
    HostCallbackCompletion,
    PolledCompletion,
    SyncCompletion,
)
from .engine._completer import cancel_grace
from .engine._context import ContextActor
from .engine._library import LibraryActor, OwnSupervision
from .front._across import MultiDeviceOperation, PartPlanner, PlannedParts, ask_across
from .front._device import DeviceActor, OpenDevice, opened
from .front._memory import Copy, Empty, Fill, MemoryActor, Put, PutFirst, PutPart, Stack, ToHost
from .front._recording import Recorded, record
from .front._system import DeviceOpening, System, open_system
from .operations._declared import DECLARED, Declaration, Declared, DeclaredSpec, message_of, operation
from .operations._faults import Fault, FaultHow, FaultKind, FaultPlan, anew
from .operations._hooks import Around, Ask, EngineHook, Phase
from .operations._operation import (
    Launch,
    LaunchTimes,
    Operand,
    Operation,
    Planned,
    Planner,
    operation_name,
    refuse_recording,
)
from .worker.launcher._launcher import describe_workers

__all__ = [
    "DECLARED",
    "AccelRef",
    "AdaptiveCompletion",
    "Around",
    "Ask",
    "CacheStatistics",
    "CompletionPort",
    "CompletionStrategy",
    "ContextActor",
    "Copy",
    "Declaration",
    "Declared",
    "DeclaredSpec",
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
    "LaunchTimes",
    "LibraryActor",
    "LibraryStatistics",
    "MemoryActor",
    "MultiDeviceOperation",
    "OpenDevice",
    "Operand",
    "Operation",
    "OwnSupervision",
    "PartPlanner",
    "Pending",
    "PerActorStreams",
    "PerLibraryStreams",
    "Phase",
    "Planned",
    "PlannedParts",
    "Planner",
    "PolledCompletion",
    "Preload",
    "ProgramCost",
    "Put",
    "PutFirst",
    "PutPart",
    "QueueStatistics",
    "Recorded",
    "RecoveryCost",
    "SingleStream",
    "Stack",
    "StreamPool",
    "StreamSource",
    "StreamStrategy",
    "SyncCompletion",
    "System",
    "ToHost",
    "anew",
    "ask_across",
    "cancel_grace",
    "check_device",
    "describe_workers",
    "device_of",
    "in_range",
    "message_of",
    "open_system",
    "opened",
    "operation",
    "operation_name",
    "overlaps",
    "record",
    "refuse_recording",
]
