"""Programs that update parts of an array: the damage of a loss, and the repeated calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
from undeclared_programs import Cache

import trio_accel as ta
from trio_accel.programs import Program
from trio_accel.testing import inject_fault

RECOVERS = ta.DeviceOptions(
    isolation="process", retry=1, intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)


@pytest.fixture
def options() -> ta.DeviceOptions:
    return RECOVERS


@pytest.fixture
async def rows(device: ta.Device) -> ta.AccelRef:
    return await device.zeros((4, 3))


@pytest.fixture
async def program(device: ta.Device, rows: ta.AccelRef) -> AsyncGenerator[Program[Cache], None]:
    async with ta.open_program(device, Cache, rows, rows[2]) as program:
        yield program


async def test_an_idempotent_update_runs_again(program: Program[Cache], rows: ta.AccelRef) -> None:
    for number, method in enumerate((Cache.put, Cache.put_and_tell)):
        inject_fault(program.device, program.operation(method), kill=True)
        await program.ask(method, number, 7.0)
    assert not program.is_damaged
    np.testing.assert_array_equal((await rows.to_host())[:, 0], [7.0, 7.0, 0.0, 0.0])
    assert program.device.generation == 3


async def test_only_the_updated_row_is_damaged(program: Program[Cache], rows: ta.AccelRef) -> None:
    await program.ask(Cache.put, 3, 5.0)
    for row in (0, 2):
        inject_fault(program.device, program.operation(Cache.put_in), kill=True)
        with pytest.raises(ta.ContextLostError):
            await program.ask(Cache.put_in, rows[row])
        np.testing.assert_array_equal(await rows[3].to_host(), [5.0] * 3)
        # All that the program was opened with must be right.
        assert program.is_damaged
        with pytest.raises(ta.StaleRefError):
            await program.ask(Cache.put, 1, 1.0)
        await rows[row].assign(np.full(3, 9.0))
        assert not program.is_damaged
        await program.ask(Cache.put, 1, 1.0)
    np.testing.assert_array_equal((await rows.to_host())[:, 1], [9.0, 1.0, 9.0, 5.0])
