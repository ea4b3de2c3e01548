"""The fixtures that look for leaks, in each order and combination: they see what is left, nothing else."""

from __future__ import annotations

import itertools
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

SOURCE = """
import numpy as np
import pytest
import trio
import trio_accel as ta

class Idle(ta.Actor):
    pass

kept = []
"""
CHECKS = ("nothing_leaked", "no_actors_left")
only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need Linux")


def orders(*fixtures: str) -> list[str]:
    """Each of the checks and both, with these fixtures, in each order."""
    chosen = [(*fixtures, *checks) for checks in ((CHECKS[0],), (CHECKS[1],), CHECKS)]
    return [", ".join(order) for names in chosen for order in itertools.permutations(names)]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Modules that a run loads are forgotten after it, and SciPy's cannot be loaded twice."""
    for library in ("memory", "blas"):
        load_library(library)


@pytest.fixture
def run(
    pytester: pytest.Pytester, run_pytest: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], pytest.RunResult]:
    """Run tests with the fixtures."""
    monkeypatch.syspath_prepend(Path(ta.__file__).parents[1])
    monkeypatch.delenv("TRIO_ACCEL_BACKEND", raising=False)
    monkeypatch.setattr("trio_accel.testing._leaks._SETTLE", 0.2)
    # Another test of this process may have imported the fixtures before.
    warnings = "error\n  ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    pytester.makeini(f"[pytest]\ntrio_mode = true\nfilterwarnings =\n  {warnings}\n")
    pytester.makeconftest('pytest_plugins = ["trio_accel.testing.fixtures"]')

    def run(source: str) -> pytest.RunResult:
        pytester.makepyfile(SOURCE + textwrap.dedent(source))
        return run_pytest("-ra")

    return run


def every(fixtures: list[str], body: str) -> str:
    """A test with each of these fixture combinations."""
    tests = [
        f"async def test_{number}({names}):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
        for number, names in enumerate(fixtures)
    ]
    return "\n\n".join(tests)


def said(result: pytest.RunResult) -> list[str]:
    """The findings of `no_actors_left`, test by test."""
    return [
        line.partition("Failed: left behind by the test: ")[2]
        for line in result.outlines
        if "Failed: " in line
    ]


@pytest.mark.slow
def test_a_system_and_no_leak(run: Callable[[str], pytest.RunResult]) -> None:
    fixtures = orders() + orders("accel_system")
    body = """
        async with ta.open_system("own") as system:
            await (await system.spawn(Idle)).stop()
            await system.spawn(Idle)
    """
    run(every(fixtures, body)).assert_outcomes(passed=len(fixtures))


@pytest.mark.slow
def test_a_device_and_no_leak(run: Callable[[str], pytest.RunResult]) -> None:
    fixtures = orders("device")
    # Libraries are opened, and the context is replaced, while the test runs.
    body = """
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Nrm2, poison=True)
        with pytest.raises(ta.ContextPoisonedError):
            await ta.linalg.nrm2(x)
        await device.ask(ta.linalg.Nrm2(np.ones(3)))
        async with device.system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as other:
            await other.put(np.ones(3))
    """
    ignore = "pytestmark = pytest.mark.filterwarnings('ignore:open_device')\n\n"
    run(ignore + every(fixtures, body)).assert_outcomes(passed=len(fixtures))


def test_the_combination_of_the_guide_with_all(run: Callable[[str], pytest.RunResult]) -> None:
    fixtures = [
        ", ".join(order) for order in itertools.permutations(("accel_system", "device", "nursery", *CHECKS))
    ]
    fixtures = ["device, nothing_leaked, no_actors_left", *fixtures[::7]]
    run(every(fixtures, "assert device.generation == 1")).assert_outcomes(passed=len(fixtures))


def test_an_actor_left_in_the_system(run: Callable[[str], pytest.RunResult]) -> None:
    with_check = [names for names in orders("accel_system") if "no_actors_left" in names]
    body = "await (await accel_system.spawn(Idle, name='idle')).stop()\n" * 2
    body += "await accel_system.spawn(Idle, name='forgotten')"
    result = run(every([*with_check, "accel_system, nothing_leaked"], body))
    # The system ends the actor with the test: only one of the checks minds.
    result.assert_outcomes(failed=len(with_check), passed=1)
    assert said(result) == ["actor test/forgotten"] * len(with_check)


@pytest.mark.slow
def test_a_device_left_in_the_system(run: Callable[[str], pytest.RunResult]) -> None:
    with_check = [names for names in orders("device", "accel_system") if "no_actors_left" in names][::3]
    body = """
        other = await accel_system.open_device("cpu", options=ta.DeviceOptions(isolation="inline"))
        await other.put(np.ones(3))
        del other
    """
    ignore = "pytestmark = pytest.mark.filterwarnings('ignore:open_device')\n\n"
    result = run(ignore + every(with_check, body))
    result.assert_outcomes(failed=len(with_check))
    assert said(result) == ["actor test/cpu:0#2"] * len(with_check)


@pytest.mark.slow
def test_an_array_left_in_the_test(run: Callable[[str], pytest.RunResult]) -> None:
    with_check = [names for names in orders("device") if "nothing_leaked" in names]
    result = run(every([*with_check, "device, no_actors_left"], "kept.append(await device.put(np.ones(3)))"))
    result.assert_outcomes(passed=len(with_check) + 1, errors=len(with_check))
    named = [
        line for line in result.outlines if line.startswith("E") and "array <AccelRef float64 (3,)" in line
    ]
    assert len(named) == len(with_check)


def test_an_actor_and_an_array_left_in_the_test(run: Callable[[str], pytest.RunResult]) -> None:
    body = """
        kept.append(await device.put(np.ones(3)))
        await device.system.spawn(Idle, name="forgotten")
    """
    result = run(every(["device, nothing_leaked, no_actors_left"], body))
    # Arrays are not looked at after a failure: an error's frames may keep them.
    result.assert_outcomes(failed=1)
    assert said(result) == ["actor test/forgotten"]


def test_objects_started_by_fixtures_are_no_leak(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
        @pytest.fixture
        async def service(accel_system, nursery):
            nursery.start_soon(trio.sleep_forever)
            return await accel_system.spawn(Idle, name="service")

        @pytest.fixture
        async def other_system():
            async with ta.open_system("other") as system:
                await system.spawn(Idle)
                yield system

        async def test_1(service, no_actors_left):
            assert not service.is_terminated

        async def test_2(no_actors_left, service, other_system):
            assert not service.is_terminated

        async def test_3(no_actors_left, other_system):
            await other_system.spawn(Idle, name="forgotten")

        async def test_4(nursery, no_actors_left, accel_system):
            nursery.start_soon(trio.sleep_forever)
            async with ta.open_system("own") as own:
                pass
        """
    )
    result.assert_outcomes(passed=3, failed=1)
    assert said(result) == ["actor other/forgotten"]


def test_an_actor_with_children_is_named_once(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
        import attrs

        @attrs.frozen
        class Grow(ta.Request["Parent", None]):
            pass

        class Parent(ta.Actor):
            @ta.handles(Grow)
            async def grow(self, message: Grow) -> None:
                for _ in range(3):
                    await self.context.spawn(Idle)

        @pytest.fixture
        async def parent(accel_system):
            return await accel_system.spawn(Parent, name="parent")

        async def test_a_new_one(accel_system, no_actors_left):
            parent = await accel_system.spawn(Parent, name="parent")
            await parent.ask(Grow())

        async def test_new_children(parent, no_actors_left):
            await parent.ask(Grow())
        """
    )
    result.assert_outcomes(failed=2)
    children = ", ".join(f"actor test/parent/idle-{number}" for number in (1, 2, 3))
    assert said(result) == ["actor test/parent", children]


def test_a_test_that_fails_on_its_own_gives_the_reason(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
        async def test_it(accel_system, nothing_leaked, no_actors_left):
            await accel_system.spawn(Idle)
            assert 1 == 2
        """
    )
    result.assert_outcomes(failed=1)
    assert "left behind" not in str(result.stdout)


def test_a_test_without_trio_cannot_have_the_check(run: Callable[[str], pytest.RunResult]) -> None:
    result = run("def test_it(no_actors_left):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Trio fixtures can only be used by Trio tests*"])


def test_methods_and_examples_of_hypothesis(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
        from hypothesis import HealthCheck, given, settings, strategies

        class TestIt:
            async def test_it(self, accel_system, no_actors_left):
                await accel_system.spawn(Idle, name="forgotten")

        @settings(
            max_examples=3, database=None, derandomize=True, deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(strategies.integers())
        async def test_examples(no_actors_left, number):
            async with ta.open_system("own") as system:
                await system.spawn(Idle)
        """
    )
    result.assert_outcomes(failed=1, passed=1)


@pytest.mark.slow
@only_linux
def test_a_device_in_a_worker_process(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
        @pytest.mark.isolation("process")
        async def test_the_fixtures(device, nothing_leaked, no_actors_left):
            await (await device.put(np.ones(3))).to_host()

        async def test_its_own(no_actors_left, accel_system, nothing_leaked):
            # The launcher of the workers stays with the system.
            options = ta.DeviceOptions(isolation="process")
            async with accel_system.open_device("cpu", options=options) as device:
                await (await device.put(np.ones(3))).to_host()
        """
    )
    result.assert_outcomes(passed=2)
