"""Runs SciPy's own tests of `scipy.ndimage` with the functions of a device in place of SciPy's.

    python scipy_ndimage_suite.py REPORT [TESTS]...

writes a JSON document to REPORT: for each test its outcome, its error, and how many functions of the device
it called. A function takes NumPy's arrays and blocks, as SciPy's does: the `output` of a test is filled. A
refusal is all of the exceptions that SciPy raises in such cases. Without TESTS all are run.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import trio
from scipy._lib._array_api import xp_capabilities_table
from scipy_fft_suite import Recorder

import trio_accel as ta
from trio_accel import ndimage

MODULES = ("filters", "interpolation", "measurements", "morphology", "datatypes", "splines")
ARRAYS = ("input", "mask")


class RefusedError(ValueError, TypeError, RuntimeError):
    """SciPy's error as one of these."""


def _native(given: Any) -> Any:
    """Return an array as a device takes one: in this machine's byte order, and writable."""
    array = np.asarray(given)
    return np.array(array, array.dtype.newbyteorder("="))


class Suite:
    """The functions in place of SciPy's.

    Attributes:
        calls: How many were called.
    """

    def __init__(self, device: ta.Device) -> None:
        self.calls = 0
        self._device = device
        self._loop = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()

    def replace(self) -> None:
        """Put the functions in place of SciPy's, by their names."""
        for name in dir(ndimage):
            original = getattr(scipy.ndimage, name, None)
            if callable(original) and name[0] != "_":
                call = self._blocking(name, original)
                setattr(scipy.ndimage, name, call)
                # SciPy's tests look up there with which libraries of arrays a function is tested.
                if original in xp_capabilities_table:
                    xp_capabilities_table[call] = xp_capabilities_table[original]

    def _blocking(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._loop:
                # The package itself asks SciPy for the weights of a Gaussian.
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            for variable in ("extra_arguments", "extra_keywords"):
                given.pop(variable, None)
            given |= given.pop("kwargs", {})
            self.calls += 1
            return trio.from_thread.run(self._asked, name, given, trio_token=self._token)

        call.__name__ = name
        return call

    async def _asked(self, name: str, given: dict[str, Any]) -> Any:
        filled = {key: given.pop(key) for key in ("output", "distances", "indices") if key in given}
        output = filled.pop("output", None)
        try:
            for key in ARRAYS:
                if given.get(key) is not None:
                    given[key] = await self._device.put(_native(given[key]))
            if isinstance(output, np.ndarray):
                filled["output"], output = output, await self._device.put(_native(output))
            elif output is not None:
                output = np.dtype(output).newbyteorder("=")
            made = await getattr(ndimage, name)(**given, **({} if output is None else {"output": output}))
            several: Any = made if type(made) in (tuple, ndimage.LabelResult) else (made,)
            results = [await one.to_host() if isinstance(one, ta.AccelRef) else one for one in several]
        except (ValueError, TypeError, ta.AccelError) as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        names: list[str]
        names = ["output", "count"] if name == "label" else ["output"]
        if name == "distance_transform_edt":
            wanted = given.get("return_distances", True), given.get("return_indices", False)
            names = ["distances"] * wanted[0] + ["indices"] * wanted[1]
        return self._filled(filled, dict(zip(names, results, strict=True)))

    @staticmethod
    def _filled(filled: dict[str, Any], results: dict[str, Any]) -> Any:
        """Write results to the given arrays, and return the others."""
        for key, target in filled.items():
            made = results.pop(key)
            if target.shape != made.shape or (key != "output" and target.dtype != made.dtype):
                raise RefusedError(f"{key} must be of {made.dtype} and have shape {made.shape}")
            target[...] = made
        left = list(results.values())
        return filled.get("output") if not left else left[0] if len(left) == 1 else tuple(left)


def run_tests(suite: Suite, report: str, names: list[str]) -> dict[str, dict[str, object]]:
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:trio", "-p", "no:randomly"]
    recorder = Recorder(suite)  # type: ignore[arg-type]  # it has calls, too
    pytest.main([*options, f"--rootdir={Path(report).parent}", "--pyargs", *names], plugins=[recorder])
    return recorder.tests


async def main(report: str, *names: str) -> None:
    chosen = list(names) or [f"scipy.ndimage.tests.test_{name}" for name in MODULES]
    async with ta.open_system("suite") as system, system.open_device("cpu") as device:
        suite = Suite(device)
        suite.replace()
        tests = await trio.to_thread.run_sync(run_tests, suite, report, chosen)
    await trio.Path(report).write_text(json.dumps(tests), encoding="utf-8")


if __name__ == "__main__":
    trio.run(main, sys.argv[1], *sys.argv[2:])
