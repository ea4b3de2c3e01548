"""A test that reaches its time limit fails alone, and later tests in its process pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timeouts

pytestmark = pytest.mark.no_device

TESTS = """
import time
import pytest
import trio


@pytest.fixture
async def closed():
    try:
        yield
    finally:
        print("the fixture was closed")


async def test_waits(closed):
    await trio.sleep_forever()


async def test_waits_in_a_child():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        with trio.move_on_after(60):
            await trio.sleep_forever()


async def test_holds_the_loop():
    while True:
        pass


def test_has_no_loop():
    while True:
        pass


async def test_ends():
    await trio.sleep(0)


def test_ends_without_a_loop():
    pass
"""
STUBBORN = """
import trio


async def test_cannot_be_interrupted():
    with trio.CancelScope(shield=True):
        while True:
            try:
                await trio.sleep_forever()
            except BaseException:
                pass


async def test_ends():
    await trio.sleep(0)
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("test_limits.py").write_text(text)
    folder.joinpath("pytest.ini").write_text("[pytest]\ntrio_mode = true\n")
    command = [sys.executable, "-m", "pytest", "-p", "timeouts", "-p", "no:cacheprovider", *options]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[1]), "TRIO_ACCEL_TEST_GRACE": "1"}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250, check=False
    )


def test_the_tests_after_it_pass(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS, "--timeout", "1.5")
    assert re.search(r"4 failed, 2 passed in", done.stdout), done.stdout
    assert "from inside a run" not in done.stdout
    assert "the fixture was closed" in done.stdout
    # The report names the line at which the main task waited.
    assert re.search(r"test_waits\S* *\n( +\| \S+\n)* +\| \S+test_limits\.py:16\n", done.stdout), done.stdout


def test_an_uninterruptible_test_ends_its_process(tmp_path: Path) -> None:
    done = run(tmp_path, STUBBORN, "--timeout", "1.5", "-n", "1")
    assert re.search(r"1 failed, 1 passed in", done.stdout), done.stdout
    assert re.search(r"worker 'gw0' crashed while running '.*test_cannot_be_interrupted'", done.stdout)


def test_the_hooks_of_time_limits_belong_to_this_run(request: pytest.FixtureRequest) -> None:
    hooks = request.config.pluginmanager.hook
    for name in timeouts.__all__:
        functions = [found.function for found in getattr(hooks, name).get_hookimpls()]
        assert getattr(timeouts, name) in functions, name
