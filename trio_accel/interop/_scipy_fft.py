"""A backend of `scipy.fft` that runs on a device."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from numbers import Number
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..backends.base.ops import FftNorm
from ..backends.base.values import host_array
from ..devices import AccelRef, Device, Operation
from ..fft import (
    Fft,
    FftActor,
    Fftn,
    Hfft,
    Hfftn,
    Ifft,
    Ifftn,
    Ihfft,
    Ihfftn,
    Irfft,
    Irfftn,
    Rfft,
    Rfftn,
    dct,
    dctn,
    dst,
    dstn,
    idct,
    idctn,
    idst,
    idstn,
)  # fmt: skip
from ._blocking import Blocking

__all__ = ["ScipyFftBackend", "scipy_fft"]

_Message: TypeAlias = Operation[FftActor, AccelRef]
_Transform: TypeAlias = Callable[[Device], Awaitable[AccelRef]]
"""A transform with its arguments, to be asked of a device."""


class ScipyFftBackend:
    """Runs the transforms of `scipy.fft` on a device; made by `scipy_fft`."""

    # The two names are what SciPy's dispatch looks for in a backend (uarray's protocol).
    __ua_domain__ = "numpy.scipy.fft"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocking = Blocking(device, maker="scipy_fft", owner="backend", instead="await ta.fft.{}(...)")
        self._calls = 0

    def __repr__(self) -> str:
        return f"<ScipyFftBackend of {self._device.path}, {self._calls} calls>"

    @property
    def calls(self) -> int:
        """Transforms that were asked of the device so far."""
        return self._calls

    def __ua_function__(
        self, method: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run a function of `scipy.fft`, or say that it is not there (``NotImplemented``)."""
        lower = _FUNCTIONS.get(method.__name__)
        if lower is None:
            return NotImplemented
        transform = lower(*args, **kwargs)
        return self._blocking.call(f"scipy.fft.{method.__name__}", partial(self._transform, transform))

    async def _transform(self, transform: _Transform) -> npt.NDArray[Any]:
        self._calls += 1
        result = await transform(self._device)
        try:
            return await result.to_host()
        finally:
            result.release()


def scipy_fft(device: Device) -> ScipyFftBackend:
    """Make a backend for `scipy.fft.set_backend` that runs its transforms on a device.

    For code that calls `scipy.fft` itself, in worker threads: a call blocks its thread until the
    device has the result. All transforms of SciPy are there but the Hankel transforms (``fht``,
    ``ifht``): of these the backend says so, and SciPy uses the next one or, with ``only=True``,
    refuses. Input is what `scipy.fft` takes: float16 is transformed in float32, integers in float64,
    and results are NumPy arrays of SciPy's dtypes. ``workers=`` and ``overwrite_x=`` are
    accepted and change nothing: the device decides how it computes.

    Errors of a call, in the thread that makes it:

    * `RuntimeError`: it is made in Trio's thread, where it would block the loop; after the
      device was closed or lost (the cause is the `DeviceLostError`); in a forked process.
    * `TypeError`: longdouble input, which devices do not have.
    * `NotImplementedError`: ``plan=`` is given.
    * `ValueError`, `TypeError`: wrong arguments, as of `ta.fft.fft` and `ta.fft.fftn`.
    * `trio.Cancelled`: the task that waits for the worker thread is cancelled.

    Threads that the program starts itself may call it too; nothing cancels them.

    Args:
        device: An open device of the Trio run that this is called in, or of the run whose worker
            thread this is called in.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """
    return ScipyFftBackend(device)


def _one_axis(
    message: Callable[..., _Message],
    x: object,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    overwrite_x: bool = False,
    workers: int | None = None,
    *,
    plan: object = None,
) -> _Transform:
    _check_options(workers, plan)
    asked = message(_host_array(x), n, axis, norm)
    return lambda device: device.ask(asked)


def _several_axes(
    message: Callable[..., _Message],
    x: object,
    s: int | Iterable[int] | None = None,
    axes: int | Iterable[int] | None = None,
    norm: FftNorm | None = None,
    overwrite_x: bool = False,
    workers: int | None = None,
    *,
    plan: object = None,
) -> _Transform:
    _check_options(workers, plan)
    asked = message(_host_array(x), _sequence(s), _sequence(axes), norm)
    return lambda device: device.ask(asked)


def _two_axes(
    message: Callable[..., _Message],
    x: object,
    s: int | Iterable[int] | None = None,
    axes: int | Iterable[int] | None = (-2, -1),
    *rest: Any,
    **named: Any,
) -> _Transform:
    return _several_axes(message, x, s, axes, *rest, **named)


def _real_axis(
    function: Callable[..., Awaitable[AccelRef]],
    x: object,
    type: object = 2,  # noqa: A002  # SciPy's name
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    overwrite_x: bool = False,
    workers: int | None = None,
    *,
    orthogonalize: bool | None = None,
) -> _Transform:
    _check_options(workers, None)
    return _put(function, x, type, n, axis, norm, orthogonalize=orthogonalize)


def _real_axes(
    function: Callable[..., Awaitable[AccelRef]],
    x: object,
    type: object = 2,  # noqa: A002  # SciPy's name
    s: int | Iterable[int] | None = None,
    axes: int | Iterable[int] | None = None,
    norm: FftNorm | None = None,
    overwrite_x: bool = False,
    workers: int | None = None,
    *,
    orthogonalize: bool | None = None,
) -> _Transform:
    _check_options(workers, None)
    return _put(function, x, type, _sequence(s), _sequence(axes), norm, orthogonalize=orthogonalize)


def _put(
    function: Callable[..., Awaitable[AccelRef]], x: object, *options: object, orthogonalize: object
) -> _Transform:
    """Have a function of several steps take an array from the host."""
    array = _host_array(x)

    async def transform(device: Device) -> AccelRef:
        return await function(await device.put(array), *options, orthogonalize=orthogonalize)

    return transform


_FUNCTIONS: Mapping[str, Callable[..., _Transform]] = {
    "fft": partial(_one_axis, Fft),
    "ifft": partial(_one_axis, Ifft),
    "rfft": partial(_one_axis, Rfft),
    "irfft": partial(_one_axis, Irfft),
    "hfft": partial(_one_axis, Hfft),
    "ihfft": partial(_one_axis, Ihfft),
    "fft2": partial(_two_axes, Fftn),
    "ifft2": partial(_two_axes, Ifftn),
    "rfft2": partial(_two_axes, Rfftn),
    "irfft2": partial(_two_axes, Irfftn),
    "hfft2": partial(_two_axes, Hfftn),
    "ihfft2": partial(_two_axes, Ihfftn),
    "fftn": partial(_several_axes, Fftn),
    "ifftn": partial(_several_axes, Ifftn),
    "rfftn": partial(_several_axes, Rfftn),
    "irfftn": partial(_several_axes, Irfftn),
    "hfftn": partial(_several_axes, Hfftn),
    "ihfftn": partial(_several_axes, Ihfftn),
    "dct": partial(_real_axis, dct),
    "idct": partial(_real_axis, idct),
    "dst": partial(_real_axis, dst),
    "idst": partial(_real_axis, idst),
    "dctn": partial(_real_axes, dctn),
    "idctn": partial(_real_axes, idctn),
    "dstn": partial(_real_axes, dstn),
    "idstn": partial(_real_axes, idstn),
}


def _host_array(x: object) -> npt.NDArray[Any]:
    """Take what `scipy.fft` takes, in the precision that it would compute in."""
    array = host_array("x", x)
    dtype = array.dtype.newbyteorder("=")
    if dtype == np.float16:
        return array.astype(np.float32)
    if dtype.kind in "mMV":
        raise TypeError(f"x: {dtype} is no type of numbers; convert it first: x.astype(float)")
    if dtype.kind not in "fc":
        return array.astype(np.float64)
    if dtype.type in (np.longdouble, np.clongdouble):
        raise TypeError(
            f"x: {dtype} is no element type of a device; convert it to float64 or complex128, or keep its "
            "precision with SciPy's own transform (scipy.fft.set_backend('scipy'))"
        )
    return np.asarray(array, dtype)


def _sequence(numbers: int | Iterable[int] | None) -> tuple[int, ...] | None:
    # SciPy takes one number for a sequence of one.
    if numbers is None:
        return None
    if isinstance(numbers, Number):
        return (cast("int", numbers),)
    return tuple(cast("Iterable[int]", numbers))


def _check_options(workers: int | None, plan: object) -> None:
    if plan is not None:
        raise NotImplementedError("plan: transforms on a device take no plan of the caller's; leave it out")
    cores = os.cpu_count() or 1
    if workers == 0:
        raise ValueError("workers must not be zero")
    if workers is not None and workers < -cores:
        raise ValueError(f"workers value out of range: got {workers}, the least is {-cores}")
