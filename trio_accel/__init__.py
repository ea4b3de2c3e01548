"""An actor-shaped face for compute acceleration, for Trio programs.

``import trio_accel as ta``: a device is a supervised actor, each library a typed actor under
it, and a reply arrives when the device has completed the operation.
"""

import logging as _logging
import typing as _typing
from importlib import import_module as _import_module

from trio.lowlevel import enable_ki_protection as _enable_ki_protection

from . import arrays as arrays
from ._names import LAZY_PARTS as _LAZY_PARTS
from ._names import export as _export
from ._version import __version__ as __version__
from .actors import (
    Actor as Actor,
    ActorContext as ActorContext,
    ActorError as ActorError,
    ActorEvent as ActorEvent,
    ActorFailedError as ActorFailedError,
    ActorRestarted as ActorRestarted,
    ActorRestartingError as ActorRestartingError,
    ActorSnapshot as ActorSnapshot,
    ActorStarted as ActorStarted,
    ActorStoppedError as ActorStoppedError,
    ActorTerminated as ActorTerminated,
    AskCycleError as AskCycleError,
    Backoff as Backoff,
    DeferredReply as DeferredReply,
    Directive as Directive,
    Event as Event,
    Intensity as Intensity,
    MailboxFullError as MailboxFullError,
    MailboxOptions as MailboxOptions,
    Message as Message,
    MessageCancelled as MessageCancelled,
    MessageCompleted as MessageCompleted,
    MessageDropped as MessageDropped,
    MessageEvent as MessageEvent,
    MessageFailed as MessageFailed,
    MessageStarted as MessageStarted,
    MessageWithdrawn as MessageWithdrawn,
    NotExecutedError as NotExecutedError,
    Observer as Observer,
    Overflow as Overflow,
    Policy as Policy,
    Ref as Ref,
    Request as Request,
    Restart as Restart,
    RestartInfo as RestartInfo,
    Strategy as Strategy,
    Subscription as Subscription,
    SupervisorFailed as SupervisorFailed,
    SupervisorScope as SupervisorScope,
    SystemOptions as SystemOptions,
    Terminated as Terminated,
    Timer as Timer,
    handles as handles,
)
from .actors._errors import StderrUnlessConfigured as _StderrUnlessConfigured
from .arrays._namespace import PRODUCTS as _PRODUCTS
from .arrays._namespace import Namespace as _Namespace
from .backends import (
    list_devices as list_devices,
    topology as topology,
)
from .backends.base import (
    AccelError as AccelError,
    CompilationError as CompilationError,
    CompletionTimeoutError as CompletionTimeoutError,
    ContextLostError as ContextLostError,
    ContextPoisonedError as ContextPoisonedError,
    DeviceInfo as DeviceInfo,
    DeviceLink as DeviceLink,
    DeviceLostError as DeviceLostError,
    DriverError as DriverError,
    DType as DType,
    InputFailedError as InputFailedError,
    Isolation as Isolation,
    LibraryError as LibraryError,
    LinAlgError as LinAlgError,
    NotSupportedError as NotSupportedError,
    OutOfMemoryError as OutOfMemoryError,
    OutOfRangeError as OutOfRangeError,
    QueueFullError as QueueFullError,
    StaleRefError as StaleRefError,
    Topology as Topology,
)
from .backends.base.contract.foreign_names import elsewhere_than_here as _elsewhere
from .devices import (
    AccelRef as AccelRef,
    AdaptiveCompletion as AdaptiveCompletion,
    Call as Call,
    Device as Device,
    DeviceGroup as DeviceGroup,
    DeviceLoad as DeviceLoad,
    DeviceOptions as DeviceOptions,
    DeviceStatistics as DeviceStatistics,
    HostCallbackCompletion as HostCallbackCompletion,
    Pending as Pending,
    PerActorStreams as PerActorStreams,
    PerLibraryStreams as PerLibraryStreams,
    PlacementError as PlacementError,
    PolledCompletion as PolledCompletion,
    Preload as Preload,
    ProgressEvent as ProgressEvent,
    SingleStream as SingleStream,
    StreamPool as StreamPool,
    SyncCompletion as SyncCompletion,
    System as System,
    cancel_grace as cancel_grace,
    gather as gather,
    measure_bandwidth as measure_bandwidth,
    open_system as open_system,
    show_progress as show_progress,
    step as step,
    stream as stream,
    track_progress as track_progress,
    watch_progress as watch_progress,
)
from .devices.operations._calls import have_operators as _have_operators

if _typing.TYPE_CHECKING:
    from . import (
        agents as agents,
        cluster as cluster,
        collectives as collectives,
        fft as fft,
        gradients as gradients,
        graphs as graphs,
        http as http,
        interop as interop,
        jit as jit,
        linalg as linalg,
        ndimage as ndimage,
        nn as nn,
        patterns as patterns,
        programs as programs,
        random as random,
        replay as replay,
        signal as signal,
        sparse as sparse,
        spatial as spatial,
        tables as tables,
        telemetry as telemetry,
        tensor as tensor,
        testing as testing,
        train as train,
        weights as weights,
    )
    from .collectives import open_world as open_world
    from .gradients import (
        checkpoint as checkpoint,
        custom_gradient as custom_gradient,
        grad as grad,
        stop_gradient as stop_gradient,
        value_and_grad as value_and_grad,
        vjp as vjp,
        vmap as vmap,
    )
    from .interop import blocking as blocking
    from .programs import (
        open_program as open_program,
        run as run,
    )
    from .telemetry import open_dashboard as open_dashboard

# Names of the parts that are imported at first use. Ctrl-C waits for the end of such an import, because in a
# callback of the import system it would be printed and lost.
_NAMES_OF_LATER = {
    "blocking": "interop",
    "checkpoint": "gradients",
    "custom_gradient": "gradients",
    "grad": "gradients",
    "open_dashboard": "telemetry",
    "open_program": "programs",
    "open_world": "collectives",
    "run": "programs",
    "stop_gradient": "gradients",
    "value_and_grad": "gradients",
    "vjp": "gradients",
    "vmap": "gradients",
}


if not _typing.TYPE_CHECKING:  # otherwise, checkers would assume that every name exists

    @_enable_ki_protection
    def __getattr__(name: str) -> object:
        """Import a lazy name at its first use; for an unknown name, suggest where it is."""
        if name in _LAZY_PARTS:
            return _import_module(f"{__name__}.{name}")
        if name in _NAMES_OF_LATER:
            return getattr(_import_module(f"{__name__}.{_NAMES_OF_LATER[name]}"), name)
        hint = ""
        if not name.startswith("_"):
            hint = _elsewhere(name)
            if not hint:
                # If two parts share a name, the later part takes precedence: `elementwise` is `jit`'s.
                for part in ("tensor", *sorted({*_LAZY_PARTS} - {"tensor"})):
                    if name in _import_module(f"{__name__}.{part}").__all__:
                        hint = f"; write ta.{part}.{name}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


@_enable_ki_protection
def _of_standard(name: str) -> _typing.Any:
    return getattr(_import_module(f"{__name__}.linalg") if name in _PRODUCTS else arrays, name)


_have_operators(_Namespace(_of_standard))

# Without this, `logging` would print warnings too where a program has configured nothing.
_logging.getLogger(__name__).addHandler(_StderrUnlessConfigured())

_export(__name__, "__version__", "arrays", *_LAZY_PARTS, *_NAMES_OF_LATER)
