"""Kinds of failures: the one table of what an exception says; and what the system is short of for a while."""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterator

from ...actors import ActorStoppedError
from ...backends.base import (
    AccelError,
    ContextLostError,
    ContextPoisonedError,
    DeviceLostError,
    InputFailedError,
    LibraryError,
    NotSupportedError,
    OutOfMemoryError,
    Refused,
    StaleRefError,
)


class WithdrawnError(Exception):
    """An operation was taken back before its launch; the code that took it back expects this."""


class FailureClass(enum.Enum):
    """Effect of a failure while enqueueing or executing on the engine."""

    REFUSED = "refused"
    """The library did not do it: the asker's problem."""
    RESOURCE = "resource"
    """Something ran out: the asker's problem."""
    SUSPECT = "suspect"
    """The library's state cannot be trusted: its actor restarts."""
    CONTEXT_LOST = "context lost"
    """The context cannot be used any more: it is replaced."""


_TABLE: tuple[tuple[type[Exception], FailureClass], ...] = (
    (ContextLostError, FailureClass.CONTEXT_LOST),
    (DeviceLostError, FailureClass.CONTEXT_LOST),
    (OutOfMemoryError, FailureClass.RESOURCE),
    (LibraryError, FailureClass.REFUSED),
    (NotSupportedError, FailureClass.REFUSED),
    (StaleRefError, FailureClass.REFUSED),
    (InputFailedError, FailureClass.REFUSED),
    # The operation was not started: the asker sends it to the next actor.
    (ActorStoppedError, FailureClass.REFUSED),
    (WithdrawnError, FailureClass.REFUSED),
)


def classify(error: Exception) -> FailureClass:
    """Find the class of a failure; what is not in the table makes the library suspect."""
    for cls, failure in _TABLE:
        if isinstance(error, cls):
            return failure
    return FailureClass.SUSPECT


def leaves_unchanged(error: BaseException | None) -> bool:
    """Tell whether a failed operation has left alone all that it may change."""
    return isinstance(error, Refused) and error.is_unchanged


def damage_to_memory(error: BaseException | None) -> ContextLostError | None:
    """Find the hardware's report on its memory, among an error and its causes."""
    losses = (each for each in _with_causes(error) if isinstance(each, ContextLostError))
    return next((loss for loss in losses if loss.is_memory_damaged), None)


def lost(
    cause: BaseException | None, state: str, advice: str, *, is_closing: bool = False, why: str = ""
) -> ContextLostError | DeviceLostError:
    """Make the error of an operation, or of a lease, that ends with its context; see `locate`.

    It is poisoned where the device has said so, in the cause or one of its causes.

    Args:
        cause: Error of the loss.
        state: Where the operation was, as a part of a sentence.
        advice: What to do next.
        is_closing: Whether the device closes: then no context follows, and there is no advice.
        why: Text by which the operation is to blame for the loss; empty if it is not.
    """
    if is_closing:
        return DeviceLostError(f"the device was closed while this operation {state}")
    is_poisoned = any(isinstance(each, ContextPoisonedError) for each in _with_causes(cause))
    text = f"the device's context was lost while this operation {state}{why}; {advice}"
    error = (ContextPoisonedError if is_poisoned else ContextLostError)(text, is_to_blame=bool(why))
    error.__cause__ = cause
    return error


IN_FLIGHT = "was in flight"
OPENING = "waited for its library to be opened"
"""States of an operation that is lost; see `lost`."""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def locate(error: Exception, *, device: str, operation: str, generation: int) -> None:
    """Fill in where an error happened, unless it says so itself."""
    if isinstance(error, AccelError):
        error.device = error.device or device
        error.operation = error.operation or operation
        if error.generation is None:
            error.generation = generation


_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_EXHAUSTION_ERRNOS = _FILES | frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})


def is_shortage(error: BaseException | None) -> bool:
    """Tell whether an error, or what caused it, may be gone in a moment: nothing is wrong with a worker."""
    return any(isinstance(each, OSError) and each.errno in _EXHAUSTION_ERRNOS for each in _with_causes(error))


def is_out_of_files(error: OSError) -> bool:
    """Tell whether an error says that too many files are open."""
    return error.errno in _FILES


def lost_descriptors() -> OSError:
    """Make the error of descriptors that another process sent, and that this one had no room for."""
    return OSError(errno.EMFILE, "Too many open files: descriptors that the peer sent were lost")


def out_of_descriptors(nbytes: int, error: OSError) -> OutOfMemoryError:
    """Make the error of a request for memory that this process cannot hold or map.

    Args:
        nbytes: How much it is.
        error: Error of the system.
    """
    limit = "open files (ulimit -n)" if is_out_of_files(error) else "addresses (ulimit -v)"
    failed = OutOfMemoryError(
        f"this process can take no descriptor or mapping of shared memory now ({error}); raise "
        f"its limit of {limit}, or need fewer, then ask again",
        requested=nbytes,
        free=0,
        total=0,
    )
    failed.__cause__ = error
    return failed
