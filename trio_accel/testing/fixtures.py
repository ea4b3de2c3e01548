"""Fixtures for pytest with pytest-trio: ``pytest_plugins = ["trio_accel.testing.fixtures"]``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

import pytest
import pytest_trio  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import trio
import trio.testing

from ..actors import actor_path_of

__all__ = ["no_actors_left"]


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
