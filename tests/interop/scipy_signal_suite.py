"""Runs test modules of SciPy in a worker thread of a Trio run, with `ta.signal` in SciPy's place.

    python scipy_signal_suite.py REPORT MODULE...

writes a JSON document to REPORT, as `scipy_fft_suite` does. The names that a test module has imported are
replaced there, and in its `signal`; SciPy itself stays as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.interpolate
import scipy.signal
import trio
from scipy_fft_suite import Recorder

import trio_accel as ta

OF_SIGNAL = ("lfilter", "sosfilt", "resample", "welch", "stft")
# Options that do not change the result.
DEFAULTS: dict[str, tuple[object, ...]] = {
    "average": ("mean",),
    "boundary": ("zeros",),
    "domain": ("time",),
    "padded": (True,),
    "return_onesided": (True,),
    "t": (None,),
    "window of resample": (None,),
    "extrapolate": (None, True),
}
SCALINGS = {"psd": "density", "density": "psd"}


class Shim:
    """Calls of SciPy's signatures, by functions of a device.

    Attributes:
        calls: How many were made.
    """

    def __init__(self, device: ta.Device) -> None:
        self._device = device
        self.calls = 0

    def function(self, name: str) -> Callable[..., Any]:
        """Make the function of a name."""
        own, arrays = getattr(ta.signal, name), ("x", "zi") if "filt" in name else ("x",)
        names = {"lfilter": ("b", "a", "x", "axis", "zi"), "sosfilt": ("sos", "x", "axis", "zi")}
        names["resample"] = ("x", "num", "t", "axis", "window", "domain")
        spectrum = ("x", "fs", "window", "nperseg", "noverlap", "nfft", "detrend", "return_onesided")
        names["welch"] = (*spectrum, "scaling", "axis", "average")
        names["stft"] = (*spectrum, "boundary", "padded", "axis", "scaling")

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names[name], args, strict=False)) | kwargs
            if np.iscomplexobj(given["x"]):
                given.pop("return_onesided", None)
            for key, allowed in DEFAULTS.items():
                of = key.partition(" of ")
                if of[2] in ("", name) and of[0] in given and given.pop(of[0]) not in allowed:
                    raise NotImplementedError(f"{name} has no {of[0]}")
            if name == "stft":
                if given.pop("detrend", False) is not False:
                    raise NotImplementedError("stft has no detrend")
                given["scaling"] = SCALINGS.get(given.get("scaling", "spectrum"), "spectrum")
            self.calls += 1
            return trio.from_thread.run(self._asked, own, given, arrays)

        return call

    async def _asked(self, function: Any, given: dict[str, Any], arrays: tuple[str, ...]) -> Any:
        for name in arrays:
            if given.get(name) is not None:
                given[name] = await self._device.put(np.asarray(given[name]))
        made = await function(**given)
        several = made if isinstance(made, tuple) else (made,)
        results = [await each.to_host() if isinstance(each, ta.AccelRef) else each for each in several]
        return tuple(results) if isinstance(made, tuple) else results[0]

    async def coefficients(self, x: Any, y: Any, axis: int, bc_type: Any) -> Any:
        """Compute the coefficients of a spline."""
        spline = await ta.signal.cubic_spline(x, await self._device.put(np.asarray(y)), axis, bc_type)
        return await spline.c.to_host()


def spline_of(shim: Shim) -> type[scipy.interpolate.CubicSpline]:
    """Make a class of splines with coefficients from a device."""

    class CubicSpline(scipy.interpolate.CubicSpline):
        def __init__(
            self, x: Any, y: Any, axis: int = 0, bc_type: Any = "not-a-knot", extrapolate: Any = None
        ) -> None:
            if bc_type == "periodic" or not isinstance(bc_type, str):
                raise NotImplementedError(f"cubic_spline has no bc_type={bc_type!r}")
            super().__init__(x, y, axis, bc_type, extrapolate)
            shim.calls += 1
            made = trio.from_thread.run(shim.coefficients, x, y, axis, bc_type)
            self.c = made.astype(self.c.dtype)

    return CubicSpline


class Names:
    """A module in which some names are others."""

    def __init__(self, module: Any, others: dict[str, Any]) -> None:
        self.__dict__.update({name: getattr(module, name) for name in dir(module)} | others)


class Replaced:
    """Puts the shim into the modules that pytest has collected."""

    def __init__(self, shim: Shim) -> None:
        self._others: dict[str, Any] = {name: shim.function(name) for name in OF_SIGNAL}
        self._others["CubicSpline"] = spline_of(shim)

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for module in {item.module for item in items}:
            for name, other in self._others.items():
                if hasattr(module, name):
                    setattr(module, name, other)
            if hasattr(module, "signal"):
                module.signal = Names(scipy.signal, self._others)


def run_tests(shim: Shim, arguments: list[str]) -> dict[str, dict[str, object]]:
    recorder = Recorder(shim)  # type: ignore[arg-type]  # it has calls, too
    pytest.main(arguments, plugins=[recorder, Replaced(shim)])
    return recorder.tests


async def main(report: str, *modules: str) -> None:
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:trio"]
    options += [f"--rootdir={Path(report).parent}", "--pyargs", *modules]
    async with ta.open_system("suite") as system, system.open_device("cpu") as device:
        tests = await trio.to_thread.run_sync(run_tests, Shim(device), options)
    await trio.Path(report).write_text(json.dumps(tests), encoding="utf-8")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
