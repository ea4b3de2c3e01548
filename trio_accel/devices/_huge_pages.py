"""Huge pages for what every request runs through.

A processor translates addresses page by page, and keeps the last translations. Whoever has waited for some
milliseconds beside busy neighbours finds few of its own left; in a virtual machine each takes up to 24 reads
to find again. The objects of a request lie in hundreds of small pages, but in about a dozen huge ones.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import trio

from ._nudge import Nudge

__all__ = ["HugePages", "gather"]

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
# On some machines they are of half a gigabyte: no memory is to be taken for what does not fill them.
_LARGEST = 4 << 20
# madvise(2), since Linux 6.1.
_COLLAPSE = 25
_SETTLED = 1.0
# What a request runs through, in the program and where the context is.
_PACKAGES = frozenset({"trio_accel", "trio", "outcome", "cuda", "nvmath"})


class HugePages:
    """Has memory gathered a while after something was loaded: who waits for its first result goes first."""

    def __init__(self) -> None:
        self._is_due = True
        self._news = Nudge()

    def loaded(self) -> None:
        """Modules were loaded, or have made objects that stay."""
        self._is_due = True
        self._news.wake()

    async def run(self) -> None:
        """Gather now and whenever something was loaded, each time a second later."""
        while True:
            while self._is_due:
                await trio.sleep(_SETTLED)
                self._is_due = False
                # Nothing depends on it.
                await trio.to_thread.run_sync(gather, abandon_on_cancel=True)
            await self._news.wait()


def gather() -> int:
    """Move the loaded modules of the packages that a request runs through to huge pages; blocks.

    Nothing happens where the system has none, or its administrator has forbidden them.

    Returns:
        How many huge pages hold them now.
    """
    size = _huge()
    if not size:
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    # What is no plain memory as a whole is refused, such as the objects in a library's file.
    return sum(libc.madvise(place * size, size, _COLLAPSE) == 0 for place in _places(size))


def _huge() -> int:
    """Bytes of a huge page; 0 where there are to be none."""
    if sys.platform != "linux":
        return 0
    try:
        if "[never]" in (_SYSTEM / "enabled").read_text(encoding="ascii"):
            return 0
        size = int((_SYSTEM / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def _places(size: int) -> list[int]:
    """Which parts of the memory hold them, in order."""
    found: set[int] = set()
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            found.update(id(item) // size for item in _items(module))
            # Another thread may want the interpreter's lock.
            time.sleep(0)
    return sorted(found)


def _items(module: ModuleType) -> Iterator[object]:
    for value in tuple(vars(module).values()):
        yield value
        for item in tuple(vars(value).values()) if isinstance(value, type) else (value,):
            yield item
            code = item.__code__ if isinstance(item, FunctionType) else None
            if isinstance(code, CodeType):
                yield code
                yield code.co_consts
