"""The class of a lost context: poisoned only if the device has reported so."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from chosen import BACKEND
from isolated import options, outcome

import trio_accel as ta

KINDS: dict[str, tuple[dict[str, Any], type[ta.AccelError]]] = {
    "poison": ({"poison": True}, ta.ContextPoisonedError),
    "kill": ({"kill": True}, ta.ContextLostError),
    "segfault": ({"segfault": True}, ta.ContextLostError),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_work_in_flight(system: ta.System, kind: str) -> None:
    fault, cls = KINDS[kind]
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.zeros((8,))
        ta.testing.inject_fault(device, ta.linalg.Scal, **fault)
        error = await outcome(ta.linalg.scal, 2.0, x)
        assert type(error) is cls
        assert isinstance(error.__cause__, cls)
        # Arrays damaged by it report the same.
        damaged = await outcome(x.to_host)
        assert isinstance(damaged, ta.StaleRefError)


async def test_work_in_flight_next_to_a_hanging_operation(system: ta.System) -> None:
    found: dict[str, object] = {}

    async def scale(name: str, x: ta.AccelRef) -> None:
        found[name] = await outcome(ta.linalg.scal, 2.0, x)

    async with system.open_device(BACKEND, options=options(stuck_after=0.3)) as device:
        x, y = await device.zeros((8,)), await device.zeros((8,))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scale, "hangs", x)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(scale, "behind", y)
    assert type(found["hangs"]) is ta.CompletionTimeoutError
    assert type(found["behind"]) is ta.ContextLostError


def test_a_handler_of_losses_takes_both_and_has_the_same_attributes() -> None:
    assert issubclass(ta.ContextPoisonedError, ta.ContextLostError)
    lost, poisoned = ta.ContextLostError("gone"), ta.ContextPoisonedError("a fault", is_to_blame=True)
    assert (lost.is_to_blame, lost.is_memory_damaged) == (False, False)
    assert (poisoned.is_to_blame, poisoned.is_memory_damaged) == (True, False)
