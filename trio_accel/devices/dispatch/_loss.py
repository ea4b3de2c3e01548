"""The rules after the loss of a context: which operations fail, and which run again (D63, D136).

Workers and inline devices use the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..base._options import DeviceOptions
from ._request import OperationRequest

# The library that copies from and to the host.
_COPIES = "trio_accel.devices:MemoryActor"
_TO_BLAME = "; no other operation can have caused it"
_AT_ONCE = ", so it does not run again without DeviceOptions(retry_suspects=True)"


class LossPolicy:
    """Decides which operations may have caused a loss, which fail, and which run again.

    Args:
        options: The options of the device.

    Attributes:
        guilty: The number of device faults caused by operations, by library.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.guilty: Counter[str] = Counter()
        self._options = options

    def suspects(self, begun: Iterable[OperationRequest], done: Mapping[str, int]) -> list[OperationRequest]:
        """Return the operations that may have caused a device fault, the likeliest last.

        A stream runs in order, and the worker has reported all operations that ended before the fault (D136).
        So only the first begun operation of each library is suspect. Copies are suspect only if nothing else
        had begun.

        Args:
            begun: The operations in progress.
            done: The number of completed requests per library.
        """
        firsts: dict[str, OperationRequest] = {}
        for request in begun:
            firsts.setdefault(request.library, request)
        suspects = [first for library, first in firsts.items() if library != _COPIES] or list(firsts.values())
        # If all others run without a fault, the last suspect need not run again.
        return sorted(
            suspects, key=lambda suspect: (self.guilty[suspect.library], -done.get(suspect.library, 0))
        )

    def why_it_fails(self, losses: int, *, is_repeatable: bool, is_to_blame: bool = False) -> str | None:
        """Decide about an operation in flight at the loss.

        Args:
            losses: The number of losses that count, including this one.
            is_repeatable: Whether all data for another run exists unchanged.
            is_to_blame: Whether no other operation can have caused a device fault.

        Returns:
            The part of its error that blames it, empty if it is not to blame. None if it runs again.
        """
        may = is_repeatable and losses <= self._options.retry > 0
        if is_to_blame and not (may and self._options.retry_suspects):
            return _TO_BLAME + _AT_ONCE * may
        return None if may else ""

    def is_opened_too_often(self, openings: int) -> bool:
        """Return whether a request fails after this many losses while its library was being opened."""
        return openings > max(self._options.retry, 1)
