"""What the system has too few of for a while: descriptors, and memory of the kernel."""

from __future__ import annotations

import errno

from ...backends.base import OutOfMemoryError

__all__ = ["is_out_of_files", "is_shortage", "lost_descriptors", "out_of_descriptors"]

_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_SHORT = _FILES | frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, may be gone in a moment: nothing is wrong with a worker."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORT:
            return True
        error = error.__cause__
    return False


def is_out_of_files(error: OSError) -> bool:
    """Whether an error says that too many files are open."""
    return error.errno in _FILES


def lost_descriptors() -> OSError:
    """The error of descriptors that another process sent, and that this one had no room for."""
    return OSError(errno.EMFILE, "Too many open files: descriptors that the peer sent were lost")


def out_of_descriptors(nbytes: int, error: OSError) -> OutOfMemoryError:
    """The error of a request for memory that this process cannot hold or map.

    Args:
        nbytes: How much it is.
        error: What the system said.
    """
    failed = OutOfMemoryError(
        f"this process can take no descriptor or mapping of shared memory now ({error}); close files or "
        "raise the limit of open files (ulimit -n), then ask again",
        requested=nbytes,
        free=0,
        total=0,
    )
    failed.__cause__ = error
    return failed
