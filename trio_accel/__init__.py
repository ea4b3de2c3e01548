"""An actor-shaped face for compute acceleration, for Trio programs.

``import trio_accel as ta``: a device is a supervised actor, each library a typed actor under
it, and a reply arrives when the device has completed the operation.
"""

import logging as _logging
import typing as _typing
from importlib import import_module as _import_module

from . import arrays
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
from .arrays._namespace import PRODUCTS as _PRODUCTS
from .arrays._namespace import Namespace as _Namespace
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
from .backends.base.contract.foreign_names import elsewhere as _elsewhere
from .devices import (
    AccelRef,
    AdaptiveCompletion,
    Call,
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
    cancel_grace,
    measure_bandwidth,
    open_system,
    stream,
)
from .devices.operations._calls import have_operators as _have_operators

if _typing.TYPE_CHECKING:
    from . import (
        collectives,
        fft,
        graphs,
        interop,
        jit,
        linalg,
        nn,
        patterns,
        programs,
        random,
        sparse,
        telemetry,
        tensor,
        testing,
        weights,
    )
    from .collectives import open_world
    from .programs import open_program, run
    from .telemetry import open_dashboard

# Capabilities that only some programs need are imported at first use: they would be half of the import.
_LATER = frozenset(
    {
        "collectives",
        "fft",
        "graphs",
        "interop",
        "jit",
        "linalg",
        "nn",
        "patterns",
        "programs",
        "random",
        "sparse",
        "telemetry",
        "tensor",
        "testing",
        "weights",
    }
)
_NAMES_OF_LATER = {
    "open_dashboard": "telemetry",
    "open_program": "programs",
    "open_world": "collectives",
    "run": "programs",
}


if not _typing.TYPE_CHECKING:  # checkers would take every name for one that is there

    def __getattr__(name: str) -> object:
        """Import what is imported at its first use; tell where a name is that is not here."""
        if name in _LATER:
            return _import_module(f"{__name__}.{name}")
        if name in _NAMES_OF_LATER:
            return getattr(_import_module(f"{__name__}.{_NAMES_OF_LATER[name]}"), name)
        told = ""
        if not name.startswith("_"):
            told = _elsewhere(name)
            if not told:
                # The later part wins a name that two parts have: `elementwise` is that of `jit`.
                for part in ("tensor", *sorted(_LATER - {"tensor"})):
                    if name in _import_module(f"{__name__}.{part}").__all__:
                        told = f"; write ta.{part}.{name}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")


def _of_standard(name: str) -> _typing.Any:
    return getattr(_import_module(f"{__name__}.linalg") if name in _PRODUCTS else arrays, name)


fused.xp = _Namespace(_of_standard)
_have_operators(fused.xp)

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
    "Call",
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
    "nn",
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
    "tensor",
    "testing",
    "topology",
    "weights",
]
