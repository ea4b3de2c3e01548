"""Classes of failures: the only table of exceptions; and temporary shortages of the system."""

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
    """An operation was withdrawn before its launch. The code that withdrew it expects this."""


class FailureClass(enum.Enum):
    """The effect of a failure while the engine enqueues or executes."""

    REFUSED = "refused"
    """The library did not do it: the caller gets the error."""
    RESOURCE = "resource"
    """A resource ran out: the caller gets the error."""
    SUSPECT = "suspect"
    """The state of the library is unreliable, so its actor restarts."""
    CONTEXT_LOST = "context lost"
    """The context is unusable, so it is replaced."""


_TABLE: tuple[tuple[type[Exception], FailureClass], ...] = (
    (ContextLostError, FailureClass.CONTEXT_LOST),
    (DeviceLostError, FailureClass.CONTEXT_LOST),
    (OutOfMemoryError, FailureClass.RESOURCE),
    (LibraryError, FailureClass.REFUSED),
    (NotSupportedError, FailureClass.REFUSED),
    (StaleRefError, FailureClass.REFUSED),
    (InputFailedError, FailureClass.REFUSED),
    # The operation was not started, so the caller sends it to the next actor.
    (ActorStoppedError, FailureClass.REFUSED),
    (WithdrawnError, FailureClass.REFUSED),
)


def classify(error: Exception) -> FailureClass:
    """Return the class of a failure. Exceptions outside of the table make the library suspect."""
    for cls, failure in _TABLE:
        if isinstance(error, cls):
            return failure
    return FailureClass.SUSPECT


def leaves_unchanged(error: BaseException | None) -> bool:
    """Return whether a failed operation has left all its arrays unchanged."""
    return isinstance(error, Refused) and error.is_unchanged


def damage_to_memory(error: BaseException | None) -> ContextLostError | None:
    """Return the hardware's report on its memory, among an error and its causes."""
    losses = (exception for exception in _with_causes(error) if isinstance(exception, ContextLostError))
    return next((loss for loss in losses if loss.is_memory_damaged), None)


def lost(
    cause: BaseException | None, state: str, advice: str, *, is_closing: bool = False, blame: str = ""
) -> ContextLostError | DeviceLostError:
    """Make the error of an operation, or of a lease, that ends with its context; see `locate`.

    It is a `ContextPoisonedError` if the cause or one of its causes is.

    Args:
        cause: The error of the loss.
        state: The state of the operation, as a part of a sentence.
        advice: What to do next.
        is_closing: Whether the device is closing. Then no context follows, and there is no advice.
        blame: The text that blames the operation for the loss; empty if it is not to blame.
    """
    if is_closing:
        return DeviceLostError(f"the device was closed while this operation {state}")
    is_poisoned = any(isinstance(exception, ContextPoisonedError) for exception in _with_causes(cause))
    text = f"the device's context was lost while this operation {state}{blame}; {advice}"
    error = (ContextPoisonedError if is_poisoned else ContextLostError)(text, is_to_blame=bool(blame))
    error.__cause__ = cause
    return error


IN_FLIGHT = "was in flight"
OPENING = "waited for its library to be opened"
"""The states of a lost operation; see `lost`."""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def locate(error: Exception, *, device: str, operation: str, generation: int) -> None:
    """Add the place of an error, unless the error already contains it."""
    if isinstance(error, AccelError):
        error.device = error.device or device
        error.operation = error.operation or operation
        if error.generation is None:
            error.generation = generation


_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_EXHAUSTION_ERRNOS = _FILES | frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})


def is_shortage(error: BaseException | None) -> bool:
    """Return whether an error or a cause of it is temporary, so that nothing is wrong with a worker."""
    return any(
        isinstance(exception, OSError) and exception.errno in _EXHAUSTION_ERRNOS
        for exception in _with_causes(error)
    )


def is_out_of_files(error: OSError) -> bool:
    """Return whether an error means too many open files."""
    return error.errno in _FILES


def lost_descriptors() -> OSError:
    """Make the error for descriptors from another process that this process could not hold."""
    return OSError(errno.EMFILE, "Too many open files: descriptors that the peer sent were lost")


def out_of_descriptors(nbytes: int, error: OSError) -> OutOfMemoryError:
    """Make the error of a request for memory that this process cannot hold or map.

    Args:
        nbytes: The size of the memory.
        error: The error of the system.
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
