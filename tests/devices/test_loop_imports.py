"""The Trio loop imports no library and no part of the package: a thread does, or it was done before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import BACKEND, SEARCHED

# The stand-in driver lacks functions of the vendors' libraries, which all public functions need.
pytestmark = pytest.mark.any_backend

TESTS = Path(__file__).parents[1]

# Statements count even if the module is loaded, unless the device has loaded it, because the tests load more
# than another program.
FUNCTIONS = """
import builtins, importlib, sys, threading, zlib
import numpy as np
import trio
import trio_accel as ta

OWN = {"attr", "attrs", "numpy", "outcome", "sniffio", "sortedcontainers", "trio", "trio_accel"}
OWN |= sys.stdlib_module_names
found, ahead, failed = {}, set(), []
real_import, real_import_module = builtins.__import__, importlib.import_module
step, loop = None, threading.main_thread()

def note(name):
    if step and threading.current_thread() is loop and name.partition(".")[0] not in OWN | ahead:
        frame = sys._getframe(2)
        while frame and "trio_accel" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame:
            found.setdefault(f"{name} by {frame.f_code.co_name}", step)

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    if not level:
        note(name)
    return real_import(name, globals, locals, fromlist, level)

def watched_module(name, package=None):
    note(name)
    return real_import_module(name, package)

builtins.__import__, importlib.import_module = watched, watched_module

async def main():
    global step
    options = ta.DeviceOptions(isolation=sys.argv[2])
    async with ta.open_system("first") as system, system.open_device(sys.argv[1], options=options) as device:
        ahead.update(sys.modules)
        from test_refusals import FUNCTIONS, Surroundings, call

        async def gradient(loss):
            try:
                await ta.grad(loss)(x)
            except ta.NotSupportedError as error:
                failed.append(f"{step}: {error!r}")

        there, x = Surroundings(device), await device.put(np.ones((8, 8)))
        cases = {name: lambda name=name: call(name, there) for name in FUNCTIONS}
        cases["signal.evaluate_spline"] = lambda: call("signal.cubic_spline", there)
        cases |= {
            "several operands": lambda: ta.linalg.einsum("ij,jk,kl->il", x, x, x),
            "a gradient": lambda: gradient(lambda x: ta.arrays.sum(ta.linalg.matmul(x, x))),
            "of a spectrum": lambda: gradient(lambda x: ta.arrays.sum(ta.signal.welch(x, nperseg=4)[1])),
            "of a filter": lambda: gradient(lambda x: ta.arrays.sum(ta.ndimage.gaussian_filter(x, 1.0))),
            "of a rotation": lambda: gradient(lambda x: ta.arrays.sum(ta.ndimage.rotate(x, 30.0))),
            "of a special function": lambda: gradient(lambda x: ta.arrays.sum(ta.arrays.gammaln(x))),
        }
        always = {"signal.stft", "ndimage.rotate", "ndimage.gaussian_filter", "random.Sobol.random"}
        for step, ask in cases.items():
            if "." in step and step not in always and zlib.crc32(step.encode()) % int(sys.argv[3]):
                continue
            try:
                result = ask()
                if hasattr(result, "__await__"):
                    await result
            except (ta.LinAlgError, ValueError) as error:  # by the sample
                failed.append(f"{step}: {error!r}")
        step = None

trio.run(main)
assert len(failed) < 8, failed
print(*[f"{step}: {name}" for name, step in found.items()], sep="\\n", end="")
"""

PARTS = """
import sys
from importlib.util import find_spec
import trio
import trio_accel as ta

async def main():
    async with ta.open_system("first") as system, system.open_device(sys.argv[1]):
        before = set(sys.modules)
        for name in ta.__all__:
            getattr(ta, name)
        if find_spec("prometheus_client") and find_spec("opentelemetry"):
            with ta.telemetry.record(system) as recorder, ta.telemetry.trace(system):
                ta.telemetry.prometheus(recorder)
        if find_spec("starlette"):
            # A service has imported it for its application.
            import starlette.applications
            before |= set(sys.modules)
            ta.http.errors()
        print(*sorted(set(sys.modules) - before), end="")

trio.run(main)
"""


def _run(program: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "public"), SEARCHED])}
    command = [sys.executable, "-c", program, BACKEND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "share", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(40, id="some")]
)
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_no_function_imports_another_library_in_the_loop(isolation: str, share: int) -> None:
    assert not _run(FUNCTIONS, isolation, str(share)).splitlines()


def test_an_open_device_has_imported_all_parts_and_their_extras() -> None:
    assert not _run(PARTS).split()
