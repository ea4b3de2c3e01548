"""Typed, supervised actors on Trio tasks. Usable alone: nothing here knows of devices."""

from ._actor import Actor
from ._cell import Terminated
from ._context import ActorContext, RestartInfo
from ._direct import DirectReply, idle_actor
from ._envelope import Waiter
from ._errors import (
    ActorError,
    ActorFailedError,
    ActorRestartingError,
    ActorStoppedError,
    AskCycleError,
    MailboxFullError,
    NotExecutedError,
)
from ._events import (
    ActorEvent,
    ActorRestarted,
    ActorStarted,
    ActorTerminated,
    Event,
    Measuring,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    Observer,
    Subscription,
    SupervisorFailed,
)
from ._failures import describe
from ._handlers import NOT_NOW, handles, message_target, quick
from ._messages import Message, Request
from ._meters import Measured, Meter, note_end
from ._options import (
    Backoff,
    Directive,
    Intensity,
    MailboxOptions,
    Overflow,
    Policy,
    Restart,
    Strategy,
    SystemOptions,
    named_options,
)
from ._ref import Posted, Ref
from ._replies import DeferredReply
from ._system import SupervisorScope, System, around_each_system, check_name, open_system
from ._tasks import WOKEN, actor_path_of
from ._timers import Timer
from ._tree import ActorSnapshot

__all__ = [
    "NOT_NOW",
    "WOKEN",
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
    "AskCycleError",
    "Backoff",
    "DeferredReply",
    "DirectReply",
    "Directive",
    "Event",
    "Intensity",
    "MailboxFullError",
    "MailboxOptions",
    "Measured",
    "Measuring",
    "Message",
    "MessageCancelled",
    "MessageCompleted",
    "MessageDropped",
    "MessageEvent",
    "MessageFailed",
    "MessageStarted",
    "MessageWithdrawn",
    "Meter",
    "NotExecutedError",
    "Observer",
    "Overflow",
    "Policy",
    "Posted",
    "Ref",
    "Request",
    "Restart",
    "RestartInfo",
    "Strategy",
    "Subscription",
    "SupervisorFailed",
    "SupervisorScope",
    "System",
    "SystemOptions",
    "Terminated",
    "Timer",
    "Waiter",
    "actor_path_of",
    "around_each_system",
    "check_name",
    "describe",
    "handles",
    "idle_actor",
    "message_target",
    "named_options",
    "note_end",
    "open_system",
    "quick",
]
