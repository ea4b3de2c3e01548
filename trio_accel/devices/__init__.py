"""Devices as supervised actors: arrays, operations, completion."""

from ..backends.base.contract.values import in_range
from .base import _options
from .base._options import *
from .base._port import CompletionPort, CompletionStrategy
from .base._statistics import (
    CacheStatistics,
    DeviceStatistics,
    LaunchTimes,
    LibraryStatistics,
    ProgramCost,
    QueueStatistics,
    RecoveryCost,
)
from .base._views import overlaps
from .base._waits import run_together
from .engine import _library
from .engine._completer import cancel_grace
from .engine._context import ContextActor
from .engine._library import *
from .front import (
    _bandwidth,
    _device,
    _group,
    _recording,
    _stream,
    _system,
)
from .front._bandwidth import *
from .front._device import *
from .front._group import *
from .front._memory import (
    Assign,
    Copy,
    Empty,
    Fill,
    MemoryActor,
    PeerCopy,
    PeerCopyActor,
    Put,
    PutFirst,
    PutPart,
    Stack,
    ToHost,
)
from .front._recording import *
from .front._stream import *
from .front._system import *
from .launcher._launcher import describe_workers
from .operations import _declared, _pending
from .operations._calls import Call
from .operations._declared import *
from .operations._faults import Fault, FaultHow, FaultKind, FaultPlan, anew
from .operations._hooks import Around, Ask, EngineHook, Phase
from .operations._operation import (
    Launch,
    Operand,
    Operation,
    Planned,
    Planner,
    operation_name,
    refuse_recording,
)
from .operations._pending import *
from .operations._ref import AccelRef, Device, check_device, device_of

__all__: list[str] = [
    "AccelRef",
    "Around",
    "Ask",
    "Assign",
    "CacheStatistics",
    "Call",
    "CompletionPort",
    "CompletionStrategy",
    "ContextActor",
    "Copy",
    "Device",
    "DeviceStatistics",
    "Empty",
    "EngineHook",
    "Fault",
    "FaultHow",
    "FaultKind",
    "FaultPlan",
    "Fill",
    "Launch",
    "LaunchTimes",
    "LibraryStatistics",
    "MemoryActor",
    "Operand",
    "Operation",
    "PeerCopy",
    "PeerCopyActor",
    "Phase",
    "Planned",
    "Planner",
    "ProgramCost",
    "Put",
    "PutFirst",
    "PutPart",
    "QueueStatistics",
    "RecoveryCost",
    "Stack",
    "ToHost",
    "anew",
    "cancel_grace",
    "check_device",
    "describe_workers",
    "device_of",
    "in_range",
    "operation_name",
    "overlaps",
    "refuse_recording",
    "run_together",
]
__all__ += _options.__all__
__all__ += _pending.__all__
__all__ += _library.__all__
__all__ += _bandwidth.__all__
__all__ += _device.__all__
__all__ += _group.__all__
__all__ += _recording.__all__
__all__ += _stream.__all__
__all__ += _system.__all__
__all__ += _declared.__all__
