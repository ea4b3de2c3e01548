"""The rules after a loss of the context: who failed by it, and who runs again (D63, D136).

They are the same in a worker and inline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..base._options import DeviceOptions
from ._request import OperationRequest

# The library of copies from the host and to it.
_COPIES = "trio_accel.devices:MemoryActor"
_TO_BLAME = "; no other operation can have caused it"
_AT_ONCE = ", so it does not run again without DeviceOptions(retry_suspects=True)"


class LossPolicy:
    """Says which operations may have caused a loss, which fail by it, and which run again.

    Args:
        options: Of the device.

    Attributes:
        guilty: Faults of the device that were found to be an operation's, by its library.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.guilty: Counter[str] = Counter()
        self._options = options

    def suspects(self, begun: Iterable[OperationRequest], done: Mapping[str, int]) -> list[OperationRequest]:
        """Find the operations that may have caused a fault of the device, the likeliest last.

        A stream runs in order, and the worker has told of all that ended before the fault (D136). So of each
        library only the first that was begun can be to blame; copies only where nothing else was begun.

        Args:
            begun: What was begun, and had not ended.
            done: How many requests each library has completed there.
        """
        firsts: dict[str, OperationRequest] = {}
        for request in begun:
            firsts.setdefault(request.library, request)
        found = [first for library, first in firsts.items() if library != _COPIES] or list(firsts.values())
        # If all others run without a fault, the last one need not run again.
        return sorted(found, key=lambda one: (self.guilty[one.library], -done.get(one.library, 0)))

    def why_it_fails(self, losses: int, *, is_repeatable: bool, is_to_blame: bool = False) -> str | None:
        """Decide about an operation that was in flight.

        Args:
            losses: How many of its losses count, with this one.
            is_repeatable: Whether all that another run needs is there, as it was.
            is_to_blame: Whether no other operation can have caused a fault of the device.

        Returns:
            What its error says of its guilt, which is empty without any. None if it runs again.
        """
        may = is_repeatable and losses <= self._options.retry > 0
        if is_to_blame and not (may and self._options.retry_suspects):
            return _TO_BLAME + _AT_ONCE * may
        return None if may else ""

    def is_opened_too_often(self, openings: int) -> bool:
        """Tell whether a request fails whose library was being opened at so many losses."""
        return openings > max(self._options.retry, 1)
