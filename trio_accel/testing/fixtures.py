"""Fixtures for pytest with pytest-trio: ``pytest_plugins = ["trio_accel.testing.fixtures"]``."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, cast

import attrs
import pytest
import pytest_trio  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import trio
import trio.testing

from ..actors._messages import Party, cells
from ..backends import resolve
from ..backends.base import Isolation
from ..devices import Device, DeviceActor, DeviceOptions, System, open_system
from ..devices.launcher._launcher import LauncherSupervisor
from ._leaks import Census, everything, raise_leaks

__all__ = ["accel_system", "device", "device_options", "no_actors_left", "nothing_leaked"]

_BACKEND = "TRIO_ACCEL_BACKEND"
_HAS_FAILED = pytest.StashKey[bool]()
_LEAVES_NO_ACTORS = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "isolation(where): where the context of the fixture `device` lives: 'inline' or 'process'"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record whether a test has failed, because the frames of its error keep its arrays alive."""
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Put the check of `no_actors_left` around the test, before pytest-trio adds the fixtures.

    As a separate fixture, it would be set up and ended concurrently with the others, in undefined order.
    """
    if isinstance(item, pytest.Function) and item.stash.get(_LEAVES_NO_ACTORS, False):
        hypothesis: Any = getattr(item.obj, "hypothesis", None)
        if hypothesis is None:
            item.obj = _leaving_no_actors(item.obj)
        else:
            hypothesis.inner_test = _leaving_no_actors(hypothesis.inner_test)
    return (yield)


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def accel_system() -> AsyncGenerator[System]:
    """An open system, named ``test``; it ends with the test, and so does everything in it."""
    async with open_system("test") as system:
        yield system  # noqa: ASYNC119  # pytest-trio ends it


@pytest.fixture
def device_options() -> DeviceOptions:
    """Options of the fixture `device`, to be overridden. The marker ``isolation`` takes precedence."""
    return DeviceOptions(isolation="inline")


@pytest.fixture
def _marked_options(request: pytest.FixtureRequest, device_options: DeviceOptions) -> DeviceOptions:
    # The skip is not in `device`: pytest-trio loses the reason of a skip in an asynchronous fixture.
    marker = cast("pytest.Mark | None", request.node.get_closest_marker("isolation"))  # pyright: ignore[reportUnknownMemberType]
    if marker is None:
        return device_options
    isolation, isolations = _isolation_of(marker), resolve(_spec())[1].isolations
    if isolation not in isolations:
        pytest.skip(f"{_spec()} has isolation {' and '.join(isolations)} here, not {isolation}")
    return attrs.evolve(device_options, isolation=isolation)


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def device(accel_system: System, _marked_options: DeviceOptions) -> AsyncGenerator[Device]:
    """An open device of `accel_system`, closed at the end of the test.

    The environment variable ``TRIO_ACCEL_BACKEND`` selects it; by default it is the CPU's. Its context lives
    in the test's process, or in the process selected by ``@pytest.mark.isolation("process")``; the test is
    skipped if the device does not support that.
    """
    async with accel_system.open_device(_spec(), options=_marked_options) as device:
        yield device  # noqa: ASYNC119  # the same


@pytest.fixture
def nothing_leaked(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail a test that leaks anything that `leak_check` counts, and name each thing.

    The check runs after the test's Trio run, so that everything should be released. After a failed test it
    ignores arrays, because the error's frames keep them.
    """
    baseline = Census.take(everything)
    yield
    has_failed = cast("pytest.Item", request.node).stash.get(_HAS_FAILED, False)

    def take() -> Census:
        now = Census.take(everything)
        return attrs.evolve(now, arrays={}) if has_failed else now

    raise_leaks(baseline, take)


@pytest.fixture
def _leaves_no_actors(request: pytest.FixtureRequest) -> None:
    cast("pytest.Item", request.node).stash[_LEAVES_NO_ACTORS] = True


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
async def no_actors_left(_leaves_no_actors: None) -> None:
    """Fail a test that leaves a live actor or another task, and name it.

    The check runs when the test function has returned, before any fixture ends. Actors that the test has
    started in `accel_system` count; actors started earlier by fixtures do not. A device that the test has
    opened and not closed counts, but not the actors that a device starts for itself. Tasks in pytest-trio's
    `nursery` do not count, because it ends them with the test. There is no check after a failed test.
    """
    await trio.lowlevel.checkpoint()


def _spec() -> str:
    return os.environ.get(_BACKEND) or "cpu"


def _isolation_of(marker: pytest.Mark) -> Isolation:
    if len(marker.args) != 1 or marker.kwargs or marker.args[0] not in ("inline", "process"):
        raise pytest.UsageError(
            f"the marker isolation takes 'inline' or 'process', got {marker.args} {marker.kwargs or ''}"
        )
    isolation: Isolation = marker.args[0]
    return isolation


def _leaving_no_actors(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Make a test fail that leaves an actor or a task."""
    if not iscoroutinefunction(test):
        # It ran before, and pytest-trio has wrapped it.
        return test

    @wraps(test)
    async def checked(**arguments: object) -> None:
        baseline = _Alive.now()
        await test(**arguments)
        await trio.testing.wait_all_tasks_blocked()
        leftovers = _Alive.now().names_since(baseline)
        if leftovers:
            pytest.fail("left behind by the test: " + ", ".join(leftovers), pytrace=False)

    return checked


@attrs.frozen
class _Alive:
    """The live actors, and the tasks outside of actors."""

    actors: frozenset[Party]
    tasks: frozenset[trio.lowlevel.Task]

    @classmethod
    def now(cls) -> _Alive:
        """Find all tasks of the run, except the test's own; called in the test's task."""
        root, test = trio.lowlevel.current_root_task(), trio.lowlevel.current_task()
        actors: set[Party] = set()
        tasks: set[trio.lowlevel.Task] = set()
        # Each task, and whether it is an actor's.
        waiting: list[tuple[trio.lowlevel.Task, bool]] = [] if root is None else [(root, False)]
        while waiting:
            task, is_of_an_actor = waiting.pop()
            if task is test:
                continue
            cell = cells.get(task)
            if cell is not None:
                is_of_an_actor = True
                if cell.actor_class is not LauncherSupervisor:
                    actors.add(cell)
                if cell.actor_class in _WITH_ACTORS_OF_THEIR_OWN:
                    continue
            elif not is_of_an_actor:
                tasks.add(task)
            for nursery in _nurseries(task, test):
                waiting.extend((child, is_of_an_actor) for child in nursery.child_tasks)
        return cls(frozenset(actors), frozenset(tasks))

    def names_since(self, baseline: _Alive) -> list[str]:
        """Return the names of new actors and tasks; of nested actors only the topmost."""
        paths = {cell.path for cell in self.actors - baseline.actors}
        topmost = {path for path in paths if path.rpartition("/")[0] not in paths}
        tasks = {f"task {task.name}" for task in self.tasks - baseline.tasks}
        return sorted({f"actor {path}" for path in topmost} | tasks)


# They start and end actors as they are used, and end them all with themselves.
_WITH_ACTORS_OF_THEIR_OWN = (DeviceActor, LauncherSupervisor)


def _nurseries(task: trio.lowlevel.Task, test: trio.lowlevel.Task) -> list[trio.Nursery]:
    """Return a task's nurseries, without the nursery that pytest-trio makes and ends for each fixture."""
    nurseries = list(task.child_nurseries)
    return nurseries[1:] if task.parent_nursery is test.parent_nursery else nurseries
