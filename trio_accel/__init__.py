"""An actor-shaped face for compute acceleration, for Trio programs.

``import trio_accel as ta``: a device is a supervised actor, each library a typed actor under
it, and a reply arrives when the device has completed the operation.
"""

import logging as _logging
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import (
    arrays,
    fft,
    graphs,
    interop,
    jit,
    linalg,
    programs,
    random,
    sparse,
    testing,
    weights,
)
from ._version import __version__
from .actors import (
    Actor,
    ActorContext,
    ActorError,
    ActorEvent,
    ActorFailedError,
    ActorRestarted,
    ActorRestartingError,
    ActorSnapshot,
    ActorStarted,
    ActorStoppedError,
    ActorTerminated,
    AskCycleError,
    Backoff,
    DeferredReply,
    Directive,
    Event,
    Intensity,
    MailboxFullError,
    MailboxOptions,
    Message,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    NotExecutedError,
    Observer,
    Overflow,
    Policy,
    Ref,
    Request,
    Restart,
    RestartInfo,
    Strategy,
    Subscription,
    SupervisorFailed,
    SupervisorScope,
    SystemOptions,
    Terminated,
    Timer,
    handles,
)
from .actors._errors import StderrUnlessConfigured as _StderrUnlessConfigured
from .arrays import fused
from .backends import list_devices, topology
from .backends.base import (
    AccelError,
    CompilationError,
    CompletionTimeoutError,
    ContextLostError,
    ContextPoisonedError,
    DeviceInfo,
    DeviceLink,
    DeviceLostError,
    DriverError,
    DType,
    InputFailedError,
    Isolation,
    LibraryError,
    LinAlgError,
    NotSupportedError,
    OutOfMemoryError,
    OutOfRangeError,
    QueueFullError,
    StaleRefError,
    Topology,
)
from .backends.base.foreign_names import instead_of as _instead_of
from .devices import (
    AccelRef,
    AdaptiveCompletion,
    Device,
    DeviceGroup,
    DeviceLoad,
    DeviceOptions,
    DeviceStatistics,
    HostCallbackCompletion,
    Pending,
    PerActorStreams,
    PerLibraryStreams,
    PlacementError,
    PolledCompletion,
    Preload,
    SingleStream,
    StreamPool,
    SyncCompletion,
    System,
    ask_across,
    cancel_grace,
    measure_bandwidth,
    open_system,
    stream,
)
from .programs import open_program, run

if _TYPE_CHECKING:
    from . import collectives, patterns, telemetry
    from .collectives import open_world
    from .telemetry import open_dashboard


def __getattr__(name: str) -> object:
    """Import at its first use what only some programs need: it would be a tenth of the import."""
    if name in {"collectives", "patterns", "telemetry"}:
        return _import_module(f"{__name__}.{name}")
    if name == "open_world":
        return _import_module(f"{__name__}.collectives").open_world
    if name == "open_dashboard":
        return _import_module(f"{__name__}.telemetry").open_dashboard
    told = _instead_of(name)
    if not name.startswith("_"):
        patterns = _import_module(f"{__name__}.patterns")
        for part in (arrays, fft, graphs, jit, linalg, patterns, programs, random, sparse, weights):
            if name in part.__all__:
                told = f"; write ta.{part.__name__.rpartition('.')[2]}.{name}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")


# Without this, `logging` would print warnings too where a program has configured nothing.
_logging.getLogger(__name__).addHandler(_StderrUnlessConfigured())

__all__ = [
    "AccelError",
    "AccelRef",
    "Actor",
    "ActorContext",
    "ActorError",
    "ActorEvent",
    "ActorFailedError",
    "ActorRestarted",
    "ActorRestartingError",
    "ActorSnapshot",
    "ActorStarted",
    "ActorStoppedError",
    "ActorTerminated",
    "AdaptiveCompletion",
    "AskCycleError",
    "Backoff",
    "CompilationError",
    "CompletionTimeoutError",
    "ContextLostError",
    "ContextPoisonedError",
    "DType",
    "DeferredReply",
    "Device",
    "DeviceGroup",
    "DeviceInfo",
    "DeviceLink",
    "DeviceLoad",
    "DeviceLostError",
    "DeviceOptions",
    "DeviceStatistics",
    "Directive",
    "DriverError",
    "Event",
    "HostCallbackCompletion",
    "InputFailedError",
    "Intensity",
    "Isolation",
    "LibraryError",
    "LinAlgError",
    "MailboxFullError",
    "MailboxOptions",
    "Message",
    "MessageCancelled",
    "MessageCompleted",
    "MessageDropped",
    "MessageEvent",
    "MessageFailed",
    "MessageStarted",
    "MessageWithdrawn",
    "NotExecutedError",
    "NotSupportedError",
    "Observer",
    "OutOfMemoryError",
    "OutOfRangeError",
    "Overflow",
    "Pending",
    "PerActorStreams",
    "PerLibraryStreams",
    "PlacementError",
    "Policy",
    "PolledCompletion",
    "Preload",
    "QueueFullError",
    "Ref",
    "Request",
    "Restart",
    "RestartInfo",
    "SingleStream",
    "StaleRefError",
    "Strategy",
    "StreamPool",
    "Subscription",
    "SupervisorFailed",
    "SupervisorScope",
    "SyncCompletion",
    "System",
    "SystemOptions",
    "Terminated",
    "Timer",
    "Topology",
    "__version__",
    "arrays",
    "ask_across",
    "cancel_grace",
    "collectives",
    "fft",
    "fused",
    "graphs",
    "handles",
    "interop",
    "jit",
    "linalg",
    "list_devices",
    "measure_bandwidth",
    "open_dashboard",
    "open_program",
    "open_system",
    "open_world",
    "patterns",
    "programs",
    "random",
    "run",
    "sparse",
    "stream",
    "telemetry",
    "testing",
    "topology",
    "weights",
]
