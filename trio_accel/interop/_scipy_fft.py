"""A backend of `scipy.fft` that runs on a device."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from numbers import Number
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..backends.base.contract.values import host_array
from ..devices import AccelRef, Device
from ._blocking import DeviceCalls

_Transform: TypeAlias = Callable[[Device], Awaitable[AccelRef]]
"""A transform with its arguments, to be asked of a device."""


class ScipyFftBackend:
    """Runs the transforms of `scipy.fft` on a device; made by `scipy_fft`."""

    # SciPy's dispatch looks for these two names in a backend (uarray's protocol).
    __ua_domain__ = "numpy.scipy.fft"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocking = DeviceCalls(
            device, maker="scipy_fft", owner="backend", instead="await ta.fft.{}(...)"
        )
        self._calls = 0

    def __repr__(self) -> str:
        return f"<ScipyFftBackend of {self._device.path}, {self._calls} calls>"

    @property
    def calls(self) -> int:
        """The number of transforms on the device so far."""
        return self._calls

    def __ua_function__(
        self, method: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run a function of `scipy.fft`, or return ``NotImplemented`` if it is missing."""
        from .. import fft

        function = getattr(fft, method.__name__, None)
        if function is None:
            return NotImplemented
        bound = _signature(method).bind(*args, **kwargs)
        bound.apply_defaults()
        transform = _lowered(function, bound.arguments)
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

    It is for code that calls `scipy.fft` itself, in worker threads: a call blocks its thread until the device
    has the result. All transforms of SciPy are supported except the Hankel transforms (``fht``, ``ifht``):
    for these, SciPy uses the next backend or, with ``only=True``, refuses. The input is as for `scipy.fft`:
    float16 is transformed in float32, integers in float64, and results are NumPy arrays of SciPy's dtypes.
    ``workers=`` and ``overwrite_x=`` are accepted and change nothing, because the device decides how it
    computes.

    Errors of a call, in the thread that makes it:

    * `RuntimeError`: it is made in Trio's thread, where it would block the loop; after the
      device was closed or lost (the cause is the `DeviceLostError`); in a forked process.
    * `TypeError`: longdouble input, which devices do not have.
    * `NotImplementedError`: ``plan=`` is given.
    * `ValueError`, `TypeError`: wrong arguments, as of `ta.fft.fft` and `ta.fft.fftn`.
    * `trio.Cancelled`: the task that waits for the worker thread is cancelled.

    Threads that the program starts itself may call it too; nothing cancels them.

    Args:
        device: An open device of the current Trio run, or of the worker thread's run.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """
    return ScipyFftBackend(device)


def _lowered(function: Any, arguments: Mapping[str, Any]) -> _Transform:
    """Convert the arguments of a `scipy.fft` function for the `ta.fft` function with its name."""
    _check_options(arguments["workers"], arguments.get("plan"))
    array, norm = _host_array(arguments["x"]), arguments["norm"]
    lengths_and_axes = (
        (arguments["n"], arguments["axis"])
        if "n" in arguments
        else (_sequence(arguments["s"]), _sequence(arguments["axes"]))
    )
    if "type" not in arguments:
        asked = function.message(array, *lengths_and_axes, norm)
        return lambda device: device.ask(asked)
    kind, options = arguments["type"], {"orthogonalize": arguments["orthogonalize"]}

    async def transform(device: Device) -> AccelRef:
        """Have a function of several steps take an array from the host."""
        result: AccelRef = await function(await device.put(array), kind, *lengths_and_axes, norm, **options)
        return result

    return transform


_signature = functools.cache(inspect.signature)


def _host_array(x: object) -> npt.NDArray[Any]:
    """Take what `scipy.fft` takes, in the precision that it would compute in."""
    array = host_array("x", x)
    dtype = array.dtype.newbyteorder("=")
    if dtype == np.float16:
        return array.astype(np.float32)
    if dtype.kind in "mMV":
        raise TypeError(f"x: {dtype} is not a type of numbers; convert it first: x.astype(float)")
    if dtype.kind not in "fc":
        return array.astype(np.float64)
    if dtype.type in (np.longdouble, np.clongdouble):
        raise TypeError(
            f"x: {dtype} is not an element type of a device; convert it to float64 or complex128, or keep "
            "its precision with SciPy's own transform (scipy.fft.set_backend('scipy'))"
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
