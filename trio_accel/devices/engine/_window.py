"""How much may be submitted ahead."""

from __future__ import annotations

from typing import Any

from ...backends.base import QueueFullError
from ..arrays._pending import Pending
from ._submissions import OnDone

__all__ = ["SubmitWindow"]


class SubmitWindow:
    """The operations of each library that were submitted and are not done."""

    __slots__ = ("_device", "_limit", "_outstanding")

    def __init__(self, device: str, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._outstanding: dict[str, int] = {}

    def check_room(self, library: str) -> None:
        """Refuse more than the window of a library holds.

        Raises:
            QueueFullError: So many are submitted and not done.
        """
        if self._outstanding.get(library, 0) >= self._limit:
            raise QueueFullError(
                f"{self._limit} submitted operations of {library.rpartition(':')[2]} are not done, the most "
                "that in_flight allows; wait for one of them",
                device=self._device,
            )

    def enter(self, library: str, pending: Pending[Any]) -> OnDone:
        """Count an operation; returns what to call when it is done."""
        self._outstanding[library] = self._outstanding.get(library, 0) + 1

        def done(error: BaseException | None) -> None:
            self._outstanding[library] -= 1
            pending.settle(error)

        return done
