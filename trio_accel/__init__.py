"""An actor-shaped face for compute acceleration, for Trio programs.

``import trio_accel as ta``: a device is a supervised actor, each library a typed actor under
it, and a reply arrives when the device has completed the operation.
"""

import logging as _logging

from . import fft, linalg, sparse, testing
from ._version import __version__
from .actors import (
    Actor,
    ActorContext,
    ActorError,
    ActorFailedError,
    ActorSnapshot,
    ActorStoppedError,
    AskCycleError,
    Backoff,
    DeferredReply,
    Directive,
    Intensity,
    MailboxFullError,
    MailboxOptions,
    Message,
    Overflow,
    Policy,
    Ref,
    Request,
    Restart,
    RestartInfo,
    SystemOptions,
    Terminated,
    handles,
)
from .backends import list_devices
from .backends.base import (
    AccelError,
    CompletionTimeoutError,
    ContextPoisonedError,
    DeviceInfo,
    DeviceLostError,
    DriverError,
    DType,
    InputFailedError,
    LibraryError,
    NotSupportedError,
    OutOfMemoryError,
    QueueFullError,
    StaleRefError,
)
from .devices import (
    AccelRef,
    Device,
    DeviceOptions,
    DeviceStatistics,
    HostCallbackCompletion,
    System,
    open_system,
)

# A library must not print by itself: programs that want its log configure logging.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())

__all__ = [
    "AccelError",
    "AccelRef",
    "Actor",
    "ActorContext",
    "ActorError",
    "ActorFailedError",
    "ActorSnapshot",
    "ActorStoppedError",
    "AskCycleError",
    "Backoff",
    "CompletionTimeoutError",
    "ContextPoisonedError",
    "DType",
    "DeferredReply",
    "Device",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceOptions",
    "DeviceStatistics",
    "Directive",
    "DriverError",
    "HostCallbackCompletion",
    "InputFailedError",
    "Intensity",
    "LibraryError",
    "MailboxFullError",
    "MailboxOptions",
    "Message",
    "NotSupportedError",
    "OutOfMemoryError",
    "Overflow",
    "Policy",
    "QueueFullError",
    "Ref",
    "Request",
    "Restart",
    "RestartInfo",
    "StaleRefError",
    "System",
    "SystemOptions",
    "Terminated",
    "__version__",
    "fft",
    "handles",
    "linalg",
    "list_devices",
    "open_system",
    "sparse",
    "testing",
]
