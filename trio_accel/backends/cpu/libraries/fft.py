"""Fourier transforms by pocketfft, in the precision of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import numpy as np
import scipy.fft
from scipy.fft._backend import _ScipyBackend  # pyright: ignore[reportPrivateUsage]

from ...base import NATIVE, HostArray, HostCall, kernel
from ...base.contract.ops import ArraySpec, FftSpec, FusedFftSpec
from ...base.kit.host import usable_cores
from . import arrays

_TRANSFORMS: dict[tuple[str, str], object] = {
    ("c2c", "forward"): scipy.fft.fftn,
    ("c2c", "inverse"): scipy.fft.ifftn,
    ("r2c", "forward"): scipy.fft.rfftn,
    ("r2c", "inverse"): scipy.fft.ihfftn,
    ("c2r", "forward"): scipy.fft.hfftn,
    ("c2r", "inverse"): scipy.fft.irfftn,
}

# SciPy's own implementation. `scipy.fft.fftn` itself calls the backend that the program has set for all
# threads, which may be this library; and `set_backend` in a thread crashes SciPy 1.14.
_scipy_transform = cast("Callable[..., HostArray]", _ScipyBackend.__ua_function__)


@kernel(FftSpec, backend="cpu", dtypes=NATIVE)
def fft(spec: FftSpec, call: HostCall) -> None:
    """Transform an array."""
    source, out = call.array(spec.source), call.array(spec.out)
    options = {"s": spec.lengths, "axes": spec.axes, "norm": spec.norm}
    run = _run_in_place if spec.kind == "c2c" else _run
    run(_TRANSFORMS[spec.kind, spec.direction], source, out, options)


@kernel(FusedFftSpec, backend="cpu")
def fused(spec: FusedFftSpec, call: HostCall) -> None:
    """Compute the prolog, the transform and the epilog, one after the other."""
    prolog, transform, epilog = spec.parts(spec.has_prolog, spec.has_epilog)
    temporaries = {
        array.block: np.empty(array.shape, array.dtype.dtype)
        for array in (transform.source, transform.out)
        if array.block < 0
    }
    within: Any = _Within(call, temporaries)
    if spec.has_prolog:
        arrays.loop(prolog, within)
    fft(transform, within)
    if spec.has_epilog:
        arrays.loop(epilog, within)


@attrs.frozen(eq=False)
class _Within:
    """The call, and the intermediate arrays by their blocks."""

    call: HostCall
    temporaries: dict[int, HostArray]

    def array(self, array: ArraySpec) -> HostArray:
        """Return an array."""
        return self.temporaries[array.block] if array.block in self.temporaries else self.call.array(array)

    def address_of(self, array: ArraySpec) -> int:
        """Return its address."""
        return int(self.array(array).ctypes.data)


def _run(transform: object, source: HostArray, out: HostArray, options: dict[str, Any]) -> None:
    if not out.size:
        return
    # pocketfft runs a transform in this thread if it is too small to be divided.
    result = _scipy_transform(transform, (source,), {**options, "workers": usable_cores()})
    if not np.may_share_memory(result, out):
        np.copyto(out, result)


def _run_in_place(transform: object, source: HostArray, out: HostArray, options: dict[str, Any]) -> None:
    """Copy the source to the result's memory and transform it there.

    Fresh memory for the result of SciPy costs more than the copy, because its pages have to be made.
    """
    if any(length > extent for length, extent in zip(out.shape, source.shape, strict=True)):
        np.copyto(out, 0)
    common = tuple(slice(min(pair)) for pair in zip(out.shape, source.shape, strict=True))
    np.copyto(out[common], source[common])
    _run(transform, out, out, {**options, "overwrite_x": True})
