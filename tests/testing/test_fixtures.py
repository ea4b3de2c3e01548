"""The fixtures for devices, in separate pytest runs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import trio_accel as ta
from trio_accel.backends.cpu.manifest import load_library

pytest_plugins = ["pytester"]
# A short outer limit would end a run in the middle, and nobody would report its findings.
pytestmark = pytest.mark.timeout(120)

IMPORTS = "import numpy as np\nimport pytest\nimport trio\nimport trio_accel as ta\n"

only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need Linux")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Modules that a run loads are forgotten after it, and SciPy's cannot be loaded twice."""
    for library in ("memory", "blas"):
        load_library(library)


@pytest.fixture
def run(
    pytester: pytest.Pytester, run_pytest: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """Run tests with the fixtures."""
    monkeypatch.syspath_prepend(Path(ta.__file__).parents[1])
    monkeypatch.delenv("TRIO_ACCEL_BACKEND", raising=False)
    monkeypatch.setattr("trio_accel.testing._leaks._SETTLE", 0.2)
    # Another test of this process may have imported the fixtures before.
    warnings = "error\n  ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    pytester.makeini(f"[pytest]\ntrio_mode = true\nfilterwarnings =\n  {warnings}\n")
    pytester.makeconftest('pytest_plugins = ["trio_accel.testing.fixtures"]')

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(IMPORTS + textwrap.dedent(source))
        return run_pytest("-ra", "--strict-markers", *arguments)

    return run


@pytest.mark.slow
@only_linux
def test_a_device_in_the_isolation_that_a_marker_names(run: Callable[..., pytest.RunResult]) -> None:
    result = run(
        """
        kept = []

        async def test_default(device, accel_system, nothing_leaked):
            assert (device.path, device.isolation) == ("test/cpu:0", "inline")
            assert device.system is accel_system
            await (await device.put(np.ones(3))).to_host()
            kept.append(device)

        def test_it_was_closed():
            assert kept[0].state.availability.is_ended

        @pytest.mark.parametrize("where", [
            pytest.param(where, marks=pytest.mark.isolation(where)) for where in ("inline", "process")
        ])
        async def test_marked(device, where, nothing_leaked):
            assert device.isolation == where
            x = await device.put(np.ones(3))
            ta.testing.inject_fault(device, ta.linalg.Nrm2, poison=True)
            with pytest.raises(ta.ContextPoisonedError):
                await ta.linalg.nrm2(x)
            await device.ask(ta.linalg.Nrm2(np.ones(3)))
        """
    )
    result.assert_outcomes(passed=4)


def test_options_of_the_device(run: Callable[..., pytest.RunResult]) -> None:
    result = run(
        """
        @pytest.fixture
        def manual():
            return ta.testing.ManualCompletion(is_holding=False)

        @pytest.fixture
        def device_options(manual):
            return ta.DeviceOptions(isolation="inline", completion=manual, in_flight=2)

        async def test_it(device, manual):
            assert device.options.in_flight == 2
            x = await device.put(np.ones(3))
            manual.hold()
            pending = device.submit(ta.linalg.Scal(2.0, x))
            with trio.fail_after(10):
                await manual.wait_held()
            manual.pass_all()
            await pending.wait()
        """
    )
    result.assert_outcomes(passed=1)


def test_the_backend_is_that_of_the_environment(
    run: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "async def test_it(device):\n    pass\n"
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "cpu:0")
    run(source).assert_outcomes(passed=1)
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "abacus")
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ValueError: *abacus*"])


def test_an_unavailable_isolation_skips_the_test(
    run: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_accel.backends.cpu._backend.has_shared_memory", lambda: False)
    result = run("@pytest.mark.isolation('process')\nasync def test_it(device):\n    pass\n")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*cpu has isolation inline here, not process"])


@pytest.mark.parametrize("arguments", ["", "'thread'", "'inline', 'process'", "where='inline'"])
def test_a_marker_without_a_name(run: Callable[..., pytest.RunResult], arguments: str) -> None:
    result = run(f"@pytest.mark.isolation({arguments})\nasync def test_it(device):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the marker isolation takes 'inline' or 'process', got *"])


def test_leftovers_fail_the_test(run: Callable[..., pytest.RunResult]) -> None:
    result = run(
        """
        import os
        import threading

        kept = []
        go_on = threading.Event()

        async def test_array(nothing_leaked, device):
            kept.append(await device.put(np.ones(3)))

        async def test_nothing(nothing_leaked, device):
            await device.put(np.ones(3))

        def test_thread(nothing_leaked):
            threading.Thread(target=go_on.wait, name="left alone").start()

        def test_others_leaks_are_its_own(nothing_leaked):
            pass

        def test_end():
            kept.clear()
            go_on.set()
        """
    )
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*LeakError: left behind:",
            "E * array <AccelRef float64 (3,) on cpu:0>, 24 bytes",
            "*LeakError: left behind:",
            "E * thread 'left alone'",
        ]
    )


def test_a_failed_test_is_not_blamed_for_the_arrays_of_its_frames(
    run: Callable[..., pytest.RunResult],
) -> None:
    result = run(
        """
        async def test_it(device, nothing_leaked):
            x = await device.put(np.ones(3))
            assert x is None
        """
    )
    result.assert_outcomes(failed=1)
