"""Fourier transforms."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from trio_accel.backends.base import NATIVE, kernel
from trio_accel.backends.base.contract.ops import FftSpec, FusedFftSpec

from .._views import TYPES, View, read, write
from ..manifest import BACKEND
from .arrays import compute

_TRANSFORMS = {
    ("c2c", "forward"): torch.fft.fftn,
    ("c2c", "inverse"): torch.fft.ifftn,
    ("r2c", "forward"): torch.fft.rfftn,
    ("r2c", "inverse"): torch.fft.ihfftn,
    ("c2r", "forward"): torch.fft.hfftn,
    ("c2r", "inverse"): torch.fft.irfftn,
}


@kernel(FftSpec, backend=BACKEND, dtypes=NATIVE)
def fft(spec: FftSpec, call: Any) -> None:
    """Transform an array."""
    if 0 in spec.out.shape:
        return
    transform = _TRANSFORMS[spec.kind, spec.direction]
    write(call, spec.out, transform(read(call, spec.source), s=spec.lengths, dim=spec.axes, norm=spec.norm))


@kernel(FusedFftSpec, backend=BACKEND)
def fused(spec: FusedFftSpec, call: Any) -> None:
    """Compute the prolog, the transform and the epilog, one after another."""
    ahead, transform, behind = spec.parts(spec.has_prolog, spec.has_epilog)
    made = {
        array.block: torch.empty(array.shape, dtype=TYPES[array.dtype], device=call.device.where)
        for array in (transform.source, transform.out)
        if array.block < 0
    }
    within = _Within(_DeviceWithin(call.device, made))
    if spec.has_prolog:
        compute(ahead, within)
    fft(transform, within)
    if spec.has_epilog:
        compute(behind, within)


@attrs.frozen(eq=False)
class _Within:
    """The call, with arrays that are made on the way."""

    device: Any


@attrs.frozen(eq=False)
class _DeviceWithin:
    """The device, with these arrays by their blocks."""

    device: Any
    made: dict[int, torch.Tensor]

    @property
    def where(self) -> torch.device:
        """The device in PyTorch."""
        found: torch.device = self.device.where
        return found

    def view(self, array: Any, dtype: Any = None) -> View:
        """Return an array in memory, or one of those."""
        found: View = (
            View(self.made[array.block], ()) if array.block in self.made else self.device.view(array, dtype)
        )
        return found
