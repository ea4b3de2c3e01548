"""Memory that outlives the process that made it: anonymous files, which live as long as a descriptor."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["has_shared_memory", "make_shared", "map_shared"]


def has_shared_memory() -> bool:
    """Whether the system has anonymous files."""
    return hasattr(os, "memfd_create")


def make_shared(nbytes: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Make memory of whole pages, all zero; none is taken from the machine before it is written to.

    Returns:
        An array over it, and its descriptor: the caller closes it.

    Raises:
        OSError: The system refuses.
    """
    descriptor = os.memfd_create("trio_accel", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return map_shared(descriptor, os.fstat(descriptor).st_size), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_shared(descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map memory that `make_shared` made, in this process or another.

    The mapping goes with the last array over it.

    Raises:
        ValueError: There is less than that.
        OSError: The system refuses.
    """
    size = os.fstat(descriptor).st_size
    # Whoever touches a page behind the end dies of SIGBUS.
    if not 0 < nbytes <= size:
        raise ValueError(f"nbytes: {nbytes} of a chunk whose memory has {size}")
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
