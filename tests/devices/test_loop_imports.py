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
            seen = set(sys.modules)
            import starlette.applications
            before |= set(sys.modules) - seen
            ta.http.errors()
        print(*sorted(set(sys.modules) - before), end="")

trio.run(main)
"""


BEFORE_A_DEVICE = """
import sys, threading
import trio
import trio_accel as ta

class Watch:
    found, loop = [], threading.main_thread()

    def find_spec(self, name, path=None, target=None):
        # Only a module that is not loaded is sought.
        if threading.current_thread() is self.loop:
            self.found.append(name)

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        raise ValueError
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})

async def get(port, path):
    request = f"GET {path} HTTP/1.1\\r\\nHost: localhost:{port}\\r\\nConnection: close\\r\\n\\r\\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request.encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 "), path

async def main():
    sys.meta_path.insert(0, Watch())
    for room in ("telemetry", "http", "train", "agents", "cluster", "collectives", "programs", "weights"):
        Watch.found.append(f"> ta.{room}")
        getattr(ta, room)
    async with ta.open_system("first") as system, trio.open_nursery() as nursery:
        Watch.found.append("> serve")
        port = await nursery.start(lambda task_status: ta.http.serve(
            app, port=0, system=system, signals=(), task_status=task_status))
        await get(port, "/")
        await get(port, "/ready")
        Watch.found.append("> a dashboard")
        async with ta.open_dashboard(system, port=0) as shown:
            await get(int(shown.url.strip("/").rpartition(":")[2]), "/")
        nursery.cancel_scope.cancel()
    print(*Watch.found, sep="\\n", end="")

trio.run(main)
"""
# The parts with hundreds of functions take most of the time of an import.
LARGE = {
    "derivatives",
    "fft",
    "gradients",
    "linalg",
    "ndimage",
    "nn",
    "patterns",
    "signal",
    "sparse",
    "spatial",
}


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


def test_services_import_nothing_large_in_the_loop_before_a_device_is_open() -> None:
    pytest.importorskip("hypercorn", reason="pip install '.[http]'")
    step, large = "", set[str]()
    for name in _run(BEFORE_A_DEVICE).splitlines():
        top, _, part = name.partition(".")
        step = name[2:] if name.startswith("> ") else step
        if part.partition(".")[0] in LARGE or top in {"numpy", "scipy", "hypercorn", "h11", "starlette"}:
            large.add(f"{step}: {name}")
    assert not large


def test_an_open_device_has_imported_all_parts_and_their_extras() -> None:
    assert not _run(PARTS).split()
