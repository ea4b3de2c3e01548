"""The host: its memory, its processor, and memory that outlives the process that made it.

The latter are anonymous files, which live as long as a descriptor or a mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_GROUPS = Path("/sys/fs/cgroup")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
# An array is a buffer at run time, whatever NumPy declares for the Python versions before 3.12.
_first_of: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


ON_THE_SPOT = 256 << 10
"""Host arrays up to so many bytes are copied where they are launched, and where their end is seen.

A thread for that would take longer: `to_host` of so many bytes took 354 µs with one, and takes 118.
"""


def address_of(array: npt.NDArray[Any]) -> int:
    """Return an array's address, usually in a quarter of the time that ``array.ctypes.data`` takes."""
    try:
        return _address_of(_first_of(array))
    except (TypeError, ValueError):
        # The array is read-only, has gaps or no elements, or its dtype has no buffer.
        return array.ctypes.data


def has_shared_memory() -> bool:
    """Return whether the system has anonymous files."""
    return hasattr(os, "memfd_create")


def make_shared(nbytes: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Make memory of whole pages, all zero; none is taken from the machine before it is written to.

    A system that promises no more than it has (``vm.overcommit_memory=2``) gives all of it at once.

    Its size is sealed, for all who ever get its descriptor.

    Returns:
        An array over it, and its descriptor: the caller closes it.

    Raises:
        OSError: The system refuses.
    """
    descriptor = os.memfd_create("trio_accel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        os.ftruncate(descriptor, size)
        if _text(_OVERCOMMIT).strip() == "2":
            # Such a system counts these pages when they are touched, and a refusal is then SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _sealed_size())
        return map_shared(descriptor, size), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_shared(descriptor: int, nbytes: int, *, write: bool = True) -> npt.NDArray[np.uint8]:
    """Map memory that `make_shared` made, in this process or another.

    The mapping ends with the last array over it.

    Args:
        descriptor: The memory; use `read_only` for a descriptor that must not be written to.
        nbytes: The number of bytes to map.
        write: Whether it is written to; if not, a write ends the process, whoever tries it.

    Raises:
        ValueError: It is another kind of memory, or smaller.
        OSError: The system refuses.
    """
    check_shared(descriptor, nbytes, write=write)
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(descriptor, nbytes, access=access), np.uint8)


def read_only(descriptor: int) -> int:
    """Open shared memory of `make_shared` again for reading only; the caller closes the new descriptor.

    Its mappings cannot be made writable, and it cannot take pages away. This protects against mistakes only:
    a process of the same user can open the file for writing by other means.

    Raises:
        OSError: There are too many open files, or no ``/proc``.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def check_shared(descriptor: int, nbytes: int, *, write: bool = True) -> None:
    """See that a process that maps memory and touches it cannot be ended by that.

    A page after the end, or one that a file system cannot provide, raises SIGBUS, which nothing catches. So
    the size must be sealed. Punched pages are zero and are allocated again, except on `hugetlbfs`, which may
    have none left.

    Raises:
        ValueError: It is not such memory as `make_shared` makes, or there is less of it.
    """
    try:
        # Only anonymous files and files of tmpfs have seals, and the latter cannot be sealed.
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise ValueError(f"a chunk is not shared memory: {error}") from error
    is_paged = os.fstatvfs(descriptor).f_bsize == mmap.PAGESIZE
    expected = os.O_RDWR if write else os.O_RDONLY
    if seals != _sealed_size() or access != expected or not is_paged:
        use = "reading and writing" if write else "reading alone"
        raise ValueError(f"a chunk is not memory for {use} of sealed size: seals {seals:#x}")
    size = os.fstat(descriptor).st_size
    if not 0 < nbytes <= size:
        raise ValueError(f"nbytes: {nbytes} of a chunk whose memory has {size}")


# All seals that take something away from the holder of the memory. F_SEAL_EXEC is left out: a kernel may set
# it itself.
_SEALS = 0x1F


def _sealed_size() -> int:
    # Look the names up late, because other systems lack seals.
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def total_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the available physical memory; all memory if the system does not report it."""
    kibibytes = table_entry("/proc/meminfo", "MemAvailable").partition(" ")[0]
    return min([int(kibibytes) * 1024 if kibibytes else total_bytes(), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes left of each control group (version 2) of this process: a container's limit is one."""
    folder = _GROUPS / table_entry("/proc/self/cgroup", "0").lstrip(":/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_GROUPS):
            return
        limit = _text(group / "memory.max").strip()
        if limit.isdecimal():
            # The cache of files is counted, but makes room; shared memory is not on these lists.
            lines = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
            cache = sum(int(size) for name, _, size in lines if name in ("active_file", "inactive_file"))
            used = int(_text(group / "memory.current").strip() or 0)
            yield max(0, int(limit) - used + cache)


def table_entry(path: str, key: str) -> str:
    """Find the first entry of that name in one of Linux's tables; empty where there is none."""
    entries = (line.partition(":") for line in _text(Path(path)).splitlines())
    return next((value.strip() for name, _, value in entries if name.strip() == key and value.strip()), "")


def _text(path: Path) -> str:
    """Read a file of the system; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or no such group
        return ""


@functools.cache
def model_name() -> str:
    """Return the vendor's name of the processor, as far as the system reports it."""
    return table_entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Count the cores that this process may run on: fewer than there are, where it is bound to some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# From glibc's malloc.h. Other C libraries lack the function, or ignore it.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD_BYTES = 128 << 20
# The largest that glibc takes.
_ALWAYS_MAPPED = 32 << 20


def keep_freed_memory() -> None:
    """Let the process keep up to 128 MiB that its kernels have freed, for the next ones.

    By default glibc returns the temporary arrays of a thread to the system and allocates them again for each
    operation, with a page fault for every 4 KiB. Without it a transform of 2**20 real numbers took 8.6 ms in
    a worker, with it 5.0 ms (two cores of an AMD EPYC). The program may want another setting for its own
    process, so this is for worker processes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        mallopt(_MMAP_THRESHOLD, _ALWAYS_MAPPED)
