"""Runs test modules of SciPy in a worker thread of a Trio run, with a device as the backend of `scipy.fft`.

    python scipy_fft_suite.py REPORT MODULE...

writes a JSON document to REPORT: for each test its outcome, its error, and how many transforms it asked of
the device.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import scipy.fft
import trio

import trio_accel as ta


class Recorder:
    """Pytest's report of each test, and the backend's calls during it."""

    def __init__(self, backend: ta.interop.ScipyFftBackend) -> None:
        self.tests: dict[str, dict[str, object]] = {}
        self._backend = backend

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._backend.calls
        result = yield
        self.tests[_name(item)]["calls"] = self._backend.calls - before
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(_name(report), {"outcome": "passed", "error": ""})
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            test.update(outcome=report.outcome, error=crash.message if crash else str(report.longrepr))


def _name(test: pytest.Item | pytest.TestReport) -> str:
    name = test.nodeid.partition("::")[2]
    # The library of the arrays is the first parameter, the last, or none, depending on SciPy's release.
    name = name.replace("[numpy-", "[").replace("-numpy]", "]").replace("[numpy]", "")
    return f"{Path(test.location[0]).stem}::{name}"


def run_tests(backend: ta.interop.ScipyFftBackend, arguments: list[str]) -> dict[str, dict[str, object]]:
    recorder = Recorder(backend)
    # The backend of `set_backend` is this thread's; threads that a test starts see the global one.
    scipy.fft.set_global_backend(backend, only=True)
    with scipy.fft.set_backend(backend, only=True):
        pytest.main(arguments, plugins=[recorder])
    return recorder.tests


async def main(report: str, *modules: str) -> None:
    options = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:trio",
        f"--rootdir={Path(report).parent}",
    ]
    async with ta.open_system("suite") as system, system.open_device("cpu") as device:
        backend = ta.interop.scipy_fft(device)
        tests = await trio.to_thread.run_sync(run_tests, backend, [*options, "--pyargs", *modules])
    await trio.Path(report).write_text(json.dumps(tests), encoding="utf-8")


if __name__ == "__main__":
    # A test starts a fresh interpreter with SciPy's own backend, as SciPy's tests require from 1.17 on: a
    # device is of no use to a forked process, and its backend says so.
    multiprocessing.set_start_method("forkserver")
    trio.run(main, *sys.argv[1:])
