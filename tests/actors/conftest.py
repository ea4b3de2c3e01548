"""Shared fixtures of the actor runtime's tests: a system without devices, and a tight time limit."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from trio_accel.actors import ActorSystem, open_system

_FOLDER = Path(__file__).parent
# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(_FOLDER))

from sample_actors import Events, Puppet  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang is a failure of these tests, and none of them needs long."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(20))


@pytest.fixture
async def system() -> AsyncGenerator[ActorSystem, None]:
    """An open system."""
    async with open_system("s") as system:
        yield system


@pytest.fixture
async def puppet(system: ActorSystem):
    """An actor that follows its orders."""
    return await system.spawn(Puppet, name="puppet")


@pytest.fixture
def events(system: ActorSystem) -> Events:
    """The system's reports to an observer."""
    events = Events()
    system.subscribe(events.append)
    return events
