"""What streams may still use, of plans and modules that are to make way."""

from __future__ import annotations

from ._stream import CudaStream

__all__ = ["LastUses"]


class LastUses(dict[CudaStream, int]):
    """By stream, the number of its event after the last use of something there."""

    __slots__ = ()

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past the last use."""
        for stream, number in tuple(self.items()):
            if stream.is_destroyed or stream.refresh() >= number:
                self.pop(stream, None)
        return bool(self)
