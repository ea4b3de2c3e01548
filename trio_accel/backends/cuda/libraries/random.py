"""Random numbers: Philox-4x32-10 by a kernel of the backend's own, in cuRAND's order and with its arithmetic.

cuRAND's generator would have to be told for every array where it begins, and then its next draw waits for the
stream: that would hold up the loop.
"""

from __future__ import annotations

import struct

from ...base.kernels import kernel
from ...base.ops import RANDOM_DTYPES, PhiloxSpec
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice

__all__ = ["RandomLibrary"]

# As in philox.cu, with what fills the structure up; the kinds are in the same order there.
_ARGUMENTS = struct.Struct("<QQQqddiii4x")
_KINDS = [(distribution, dtype) for distribution, dtypes in RANDOM_DTYPES.items() for dtype in dtypes]
# Four numbers come from a counter, or from one in each of two rows; they are stored 16 bytes at a time.
_FOUR = 4
_ALIGNMENT = 16
_MASK = (1 << 64) - 1


class RandomLibrary(CudaLibrary):
    """One kernel, told for each array which part of which sequence it draws. Compiled when it is made."""

    name = "random"

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._fill = device.kernels.function("philox", "philox_fill", _ARGUMENTS.size)

    def _plan(self, spec: PhiloxSpec, device: LibraryDevice) -> int:
        """Find how numbers are made."""
        return _KINDS.index((spec.distribution, spec.out.dtype))

    @kernel(PhiloxSpec, backend="cuda", plan=_plan, is_quick=True)
    def _philox(self, spec: PhiloxSpec, call: KernelCall) -> None:
        out = call.array(spec.out)
        size = out.size
        if not size:
            return
        is_moved = (spec.low, spec.width) != (0.0, 1.0)
        is_aligned = not out.address % _ALIGNMENT
        with self._fill as arguments:
            _ARGUMENTS.pack_into(
                arguments, 0, out.address, spec.seed, spec.row & _MASK, size, spec.low, spec.width, call.plan,
                is_moved, is_aligned,
            )  # fmt: skip
            self._fill.launch(call.handle, -(-size // _FOUR))
