"""Keeps chunks for tests, like the keeper process of devices."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from trio_accel.backends.base import AccelDevice


class Keeper:
    """Keeps a duplicate of every chunk's descriptor until it is dropped, or the block ends.

    Attributes:
        kept: Size and descriptor of each chunk, by id.
        dropped: Ids of the returned chunks, in order.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, int]] = {}
        self.dropped: list[int] = []

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        assert chunk not in self.kept
        assert chunk not in self.dropped
        self.kept[chunk] = nbytes, os.dup(descriptor)

    def drop(self, chunk: int) -> None:
        os.close(self.kept.pop(chunk)[1])
        self.dropped.append(chunk)

    def map_into(self, device: AccelDevice, *chunks: int) -> None:
        """Let a device map chunks, or all."""
        for chunk in chunks or self.kept:
            nbytes, descriptor = self.kept[chunk]
            device.map_chunk(chunk, nbytes, os.dup(descriptor))

    def host(self, backend: Any, chunk: int) -> Any:
        nbytes, descriptor = self.kept[chunk]
        return backend.map_host(descriptor, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, descriptor in self.kept.values():
            os.close(descriptor)
        self.kept.clear()
