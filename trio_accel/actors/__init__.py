"""Typed, supervised actors on Trio tasks. Usable alone: nothing here knows of devices."""

from ._actor import Actor
from ._cell import Terminated
from ._context import ActorContext, RestartInfo
from ._envelope import DeferredReply
from ._errors import ActorError, ActorFailedError, ActorStoppedError, AskCycleError, MailboxFullError
from ._handlers import handles
from ._messages import Message, Request
from ._options import (
    Backoff,
    Directive,
    Intensity,
    MailboxOptions,
    Overflow,
    Policy,
    Restart,
    SystemOptions,
)
from ._ref import Ref
from ._system import System, open_system
from ._tree import ActorSnapshot

__all__ = [
    "Actor",
    "ActorContext",
    "ActorError",
    "ActorFailedError",
    "ActorSnapshot",
    "ActorStoppedError",
    "AskCycleError",
    "Backoff",
    "DeferredReply",
    "Directive",
    "Intensity",
    "MailboxFullError",
    "MailboxOptions",
    "Message",
    "Overflow",
    "Policy",
    "Ref",
    "Request",
    "Restart",
    "RestartInfo",
    "System",
    "SystemOptions",
    "Terminated",
    "handles",
    "open_system",
]
