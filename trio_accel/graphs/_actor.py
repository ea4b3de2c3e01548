"""The actor that serves graphs."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["GraphsActor"]


class GraphsActor(LibraryActor):
    """Replays graphs, on a stream of its own, with libraries of its own.

    CPU backend: one piece of work of the stream's thread. CUDA: graphs of the driver.
    """

    library = "graphs"
