"""Plans of cuFFT."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from nvmath.bindings import cufft

from ...base.fft_layouts import PlanKey
from ...base.workspace import LastUses
from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream

__all__ = ["VendorPlan"]

_Execute: TypeAlias = Callable[..., None]

# By kind, and whether it is of double precision: the type and what executes it.
_TYPES: dict[tuple[str, bool], tuple[cufft.Type, _Execute]] = {
    ("c2c", False): (cufft.Type.C2C, cufft.exec_c2c),
    ("c2c", True): (cufft.Type.Z2Z, cufft.exec_z2z),
    ("r2c", False): (cufft.Type.R2C, cufft.exec_r2c),
    ("r2c", True): (cufft.Type.D2Z, cufft.exec_d2z),
    ("c2r", False): (cufft.Type.C2R, cufft.exec_c2r),
    ("c2r", True): (cufft.Type.Z2D, cufft.exec_z2d),
}
_FORWARD, _INVERSE = -1, 1


class VendorPlan:
    """One plan of cuFFT. To make one takes up to a second, and loads kernels. The context is current.

    Args:
        key: What it is made from.
        context: The device's context.

    Attributes:
        key: What it is made from.
        size: Bytes of the work area that it needs.
        users: How many plans of ours execute it.
    """

    __slots__ = ("_area", "_execute", "_handle", "_runs", "_signs", "_stream", "key", "size", "users")

    def __init__(self, key: PlanKey, context: CudaContext) -> None:
        self.key: PlanKey = key
        self.users: int = 0
        kind, self._execute = _TYPES[key.kind, key.is_double]
        self._signs: tuple[tuple[int, ...], tuple[int, ...]] = (
            ((_INVERSE,), (_FORWARD,)) if key.kind == "c2c" else ((), ())
        )
        self._area = 0
        self._stream: CudaStream | None = None
        self._runs = LastUses()
        self._handle = cufft.create()
        try:
            # The work area is one for all plans.
            cufft.set_auto_allocation(self._handle, 0)
            self.size: int = cufft.make_plan_many64(
                self._handle,
                len(key.lengths),
                key.lengths,
                *(key.inembed, key.istride, key.idist),
                *(key.onembed, key.ostride, key.odist),
                kind,
                key.batch,
            )
            # Else the tables are still on their way when they are used.
            context.settle()
        except BaseException:
            with suppress(cufft.cuFFTError):
                self.destroy()
            raise

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past it."""
        return self._runs.is_busy

    def run(self, stream: CudaStream, area: int, source: int, out: int, is_forward: bool) -> None:
        """Enqueue the transform once."""
        if stream is not self._stream:
            cufft.set_stream(self._handle, stream.handle)
            self._stream = stream
        if area != self._area and self.size:
            cufft.set_work_area(self._handle, area)
            self._area = area
        self._runs.note(stream)
        self._execute(self._handle, source, out, *self._signs[is_forward])

    def destroy(self) -> None:
        """Give it back to cuFFT, which may wait for the device: nothing of it runs any more."""
        cufft.destroy(self._handle)
