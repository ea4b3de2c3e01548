"""Host arrays of the program that an operation in flight uses."""

from __future__ import annotations

from ...backends.base.ops import CopyFromHostSpec, CopyToHostSpec, HostUse
from ..arrays._blocks import Block
from ..host._copying import SMALL
from ..operations._operation import Launch

__all__ = ["leave_hosts"]


def leave_hosts(launch: Launch) -> bool | None:
    """Have an operation in flight use no host array of the program any more, as far as that is possible.

    A copy that is not begun is withdrawn if nobody gets to see what it would have written. What an operation
    changes in place is seen: for that a small host array is replaced by a private copy.

    Returns:
        Whether none is used any more. False if that is so soon, None if it may take as long as the operation.
    """
    made = {block for block, _ in launch.allocations}
    is_seen = not launch.writes <= made
    copies = [
        spec for spec in (launch.spec, *launch.staged) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))
    ]
    is_free = True
    for kept in launch.keep:
        if isinstance(kept, Block):
            continue
        by = [spec for spec in copies if spec.host is kept]
        if not by:
            # The operation itself uses it, as long as it runs.
            return None
        for spec in by:
            if spec.host.size:
                if spec.use is None:
                    return None
                is_free = _leave(spec.use, is_seen=is_seen) and is_free
    return is_free


def _leave(use: HostUse, *, is_seen: bool) -> bool:
    if not is_seen:
        return use.withdraw()
    return use.make_private(SMALL)
