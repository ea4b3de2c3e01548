"""Ranges of NVIDIA's profilers around the launches of operations."""

from __future__ import annotations

from typing import Any

import attrs

from ...backends.base import AccelStream
from ...backends.base.modules import import_extra
from ...backends.base.ops import OperationSpec
from ..operations._operation import Launch
from ._enqueuer import Enqueuer, Kernels
from ._in_flight import InFlight
from ._stream_queues import StreamQueue

__all__ = ["RangedEnqueuer", "import_ranges"]

_DOMAIN = "trio_accel"


def import_ranges() -> None:
    """Import the package that the ranges are made with. Blocks.

    Raises:
        NotSupportedError: It is not installed.
    """
    import_extra("nvtx", "nvtx")


class RangedEnqueuer(Enqueuer):
    """Encloses each call of the backend for an operation in a range.

    Ranges nest by thread, so each begins and ends in the thread that calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One that does nothing, where no profiler is attached.
        self._domain: Any = import_extra("nvtx", "nvtx").get_domain(_DOMAIN)
        # By the names of operation and library; to register them takes longer than a range.
        self._attributes: dict[tuple[str, str], Any] = {}

    def enqueue(
        self, launch: Launch, library: Kernels, queue: StreamQueue, failure: Exception | None = None
    ) -> InFlight:
        """Give an operation to the backend; as `Enqueuer.enqueue`."""
        return super().enqueue(launch, self.kernels_for(launch, library), queue, failure)

    def kernels_for(self, launch: Launch, library: Kernels) -> Kernels:
        """The library, with a range around what it enqueues for this launch."""
        key = launch.name, library.name
        if key not in self._attributes:
            # One of a program's own has the digest of its code behind its name.
            category = library.name.partition("?")[0]
            self._attributes[key] = self._domain.get_event_attributes(message=launch.name, category=category)
        return _Ranged(library, self._domain, self._attributes[key])


@attrs.frozen(eq=False)
class _Ranged:
    """A library whose launch is enclosed in a range."""

    _library: Kernels
    _domain: Any
    _attributes: Any

    @property
    def name(self) -> str:
        return self._library.name

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        self._domain.push_range(self._attributes)
        try:
            self._library.enqueue(spec, stream)
        finally:
            self._domain.pop_range()
