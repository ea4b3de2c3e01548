"""Fixtures for pytest with pytest-trio: ``pytest_plugins = ["trio_accel.testing.fixtures"]``."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import cast

import attrs
import pytest
import pytest_trio  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import trio
import trio.testing

from ..actors import actor_path_of
from ..backends import resolve
from ..backends.base import Isolation
from ..devices import Device, DeviceOptions, System, open_system
from ._census import Census, everything
from ._leaks import raise_leaks

__all__ = ["accel_system", "device", "device_options", "no_actors_left", "nothing_leaked"]

_BACKEND = "TRIO_ACCEL_BACKEND"
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "isolation(where): where the context of the fixture `device` lives: 'inline' or 'process'"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether a test has failed: the frames of its error keep its arrays alive."""
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def accel_system() -> AsyncGenerator[System, None]:
    """An open system, named ``test``; with the test it ends, and all that lives in it."""
    async with open_system("test") as system:
        yield system  # noqa: ASYNC119  # pytest-trio ends it


@pytest.fixture
def device_options() -> DeviceOptions:
    """Options of the fixture `device`; to be overridden. The marker ``isolation`` outdoes them."""
    return DeviceOptions(isolation="inline")


@pytest.fixture
def _marked_options(request: pytest.FixtureRequest, device_options: DeviceOptions) -> DeviceOptions:
    # Not in `device`: pytest-trio loses the reason of a skip in an asynchronous fixture.
    marker = cast("pytest.Mark | None", request.node.get_closest_marker("isolation"))  # pyright: ignore[reportUnknownMemberType]
    if marker is None:
        return device_options
    isolation, isolations = _isolation_of(marker), resolve(_spec())[1].isolations
    if isolation not in isolations:
        pytest.skip(f"{_spec()} has isolation {' and '.join(isolations)} here, not {isolation}")
    return attrs.evolve(device_options, isolation=isolation)


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def device(accel_system: System, _marked_options: DeviceOptions) -> AsyncGenerator[Device, None]:
    """An open device of `accel_system`, closed at the end of the test.

    It is the one that the environment variable ``TRIO_ACCEL_BACKEND`` names, else the CPU's. Its
    context lives in the test's process, or where ``@pytest.mark.isolation("process")`` says; the
    test is skipped if the device cannot have it there.
    """
    async with accel_system.open_device(_spec(), options=_marked_options) as device:
        yield device  # noqa: ASYNC119  # the same


@pytest.fixture
def nothing_leaked(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fail a test that leaves something behind of what `leak_check` looks at, naming each thing.

    It looks when the test's Trio run is over, so that nothing of it has an excuse. After a test that
    has failed it looks at no arrays: the error's frames keep them.
    """
    before = Census.take(everything)
    yield
    node = cast("pytest.Item", request.node)
    has_failed = node.stash.get(_HAS_FAILED, False)

    def take() -> Census:
        now = Census.take(everything)
        return attrs.evolve(now, arrays={}) if has_failed else now

    raise_leaks(before, take)


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def no_actors_left() -> AsyncGenerator[None, None]:
    """Fail a test that leaves a live actor or another task behind, naming it.

    Tasks in pytest-trio's `nursery` are no leak: it ends them with the test.
    """
    before = set(_tasks())
    yield
    await trio.testing.wait_all_tasks_blocked()
    left = [_describe(task) for task in _tasks() if task not in before and not _is_of_the_test_runner(task)]
    if left:
        pytest.fail("left behind by the test: " + ", ".join(sorted(left)))


def _spec() -> str:
    return os.environ.get(_BACKEND) or "cpu"


def _isolation_of(marker: pytest.Mark) -> Isolation:
    if len(marker.args) != 1 or marker.kwargs or marker.args[0] not in ("inline", "process"):
        raise pytest.UsageError(
            f"the marker isolation takes 'inline' or 'process', got {marker.args} {marker.kwargs or ''}"
        )
    where: Isolation = marker.args[0]
    return where


def _tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    waiting = [] if root is None else [root]
    while waiting:
        task = waiting.pop()
        yield task
        for nursery in task.child_nurseries:
            waiting.extend(nursery.child_tasks)


def _describe(task: trio.lowlevel.Task) -> str:
    path = actor_path_of(task)
    return f"actor {path}" if path is not None else f"task {task.name}"


def _is_of_the_test_runner(task: trio.lowlevel.Task) -> bool:
    return task.name.startswith("pytest_trio.")
