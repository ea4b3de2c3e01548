"""The pool of host memory as the workers of a device, and the launcher, know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...host._host_pool import HostPool, Slab
from ._link import WorkerLink

if TYPE_CHECKING:
    from ..launcher._launcher import Launcher

__all__ = ["SlabTable"]


class SlabTable:
    """Tells of each slab, before anything in it is named, and of its end.

    Args:
        pool: The pool; None if the workers' device needs none.
        links: Gives the workers that there are.
    """

    def __init__(self, pool: HostPool | None, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._pool = pool
        self._links = links
        self._launcher: Launcher | None = None
        # What the launcher calls them.
        self._kept: dict[int, int] = {}

    def open(self, launcher: Launcher) -> None:
        """Begin; the launcher cuts the memory to nothing if this process dies."""
        self._launcher = launcher
        if self._pool is not None:
            self._pool.on_make = self._share
            self._pool.on_drop = self._unshare

    def tell(self, link: WorkerLink) -> None:
        """Have a new worker map what there is."""
        if self._pool is not None:
            for slab in self._pool.slabs.values():
                _send(link, slab)

    def close(self) -> None:
        """Give the pool up; arrays in it stay as they are."""
        if self._pool is not None:
            for slab in self._pool.slabs.values():
                self._forget(slab)
            self._pool.close()

    def _share(self, slab: Slab) -> None:
        assert slab.descriptor is not None
        if self._launcher is not None:
            self._kept[slab.number] = self._launcher.keep_chunk(slab.descriptor)
        for link in self._links():
            _send(link, slab)

    def _unshare(self, slab: Slab) -> None:
        self._forget(slab)
        for link in self._links():
            link.send(("unslab", slab.number))

    def _forget(self, slab: Slab) -> None:
        kept = self._kept.pop(slab.number, None)
        if kept is not None and self._launcher is not None:
            self._launcher.forget_chunk(kept)


def _send(link: WorkerLink, slab: Slab) -> None:
    assert slab.descriptor is not None
    link.send(("slab", slab.number, slab.nbytes), (slab.descriptor,))
