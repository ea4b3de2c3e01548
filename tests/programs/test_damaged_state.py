"""The lines of the page on failures that make damaged state again: each update counts once."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
import trio
from chosen import ROOT
from pages import blocks

import trio_accel as ta

PAGE = ROOT / "docs" / "guide" / "failures.md"
MANY = 60


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The definitions of the page's block with the class."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names: dict[str, Any] = {}
    (block,) = (block for block in blocks(PAGE) if "class Ledger" in block.text)
    exec(block.text, names)
    return names


@pytest.fixture
def options(isolation: ta.Isolation) -> ta.DeviceOptions:
    return ta.DeviceOptions(isolation=isolation, stuck_after=10.0, intensity=ta.Intensity(1000))


@pytest.fixture
async def ledger(names: dict[str, Any], device: ta.Device) -> AsyncGenerator[Any, None]:
    totals = await device.zeros(MANY, "int64")
    async with ta.open_program(device, names["Sums"], totals) as program:
        yield names["Ledger"](program, totals, np.zeros(MANY, np.int64))


async def test_each_update_counts_once_under_losses_and_deadlines(
    ledger: Any, names: dict[str, Any], device: ta.Device
) -> None:
    """Each update is a one of its own place."""
    chance, done, ones = random.Random(3), set[int](), np.eye(MANY, dtype=np.int64)
    operation = ledger.program.operation(names["Sums"].add)
    fault = {"poison": True} if device.options.isolation == "inline" else {"kill": True}

    async def client(mine: range) -> None:
        for number in mine:
            if chance.random() < 0.15:
                ta.testing.inject_fault(device, operation, **fault)
            seconds = chance.choice([0.001, 0.01, 20.0, 20.0])
            with trio.move_on_after(seconds) as scope:
                try:
                    await ledger.add(ones[number])
                    done.add(number)
                except ta.ContextLostError:
                    # Two faults met one update: it does not count.
                    lost.add(number)
            assert number in done or number in lost or scope.cancelled_caught

    lost = set[int]()
    async with trio.open_nursery() as nursery:
        for first in range(3):
            nursery.start_soon(client, range(first, MANY, 3))
    totals = await ledger.read()
    assert device.generation > 3
    assert len(done) > MANY // 3
    assert {number for number in range(MANY) if totals[number] != 1} <= set(range(MANY)) - done
    assert set(totals.tolist()) <= {0, 1}
    assert not totals[list(lost)].any()
    np.testing.assert_array_equal(totals, ledger.copy + np.sum(ledger.since, axis=0))


@pytest.mark.slow
async def test_an_interrupted_repair_is_repeated(
    ledger: Any, names: dict[str, Any], device: ta.Device
) -> None:
    ones = np.eye(MANY, dtype=np.int64)
    for number in range(5):
        await ledger.add(ones[number])
    ledger.is_whole = False
    put = ledger.program.ask

    async def cut(*arguments: Any) -> None:
        if not np.array_equal(arguments[1], ones[3]):
            return await put(*arguments)
        raise ta.CompletionTimeoutError("cut")

    ledger.program.ask = cut
    with pytest.raises(ta.CompletionTimeoutError, match="cut"):
        await ledger.read()
    ledger.program.ask = put
    np.testing.assert_array_equal(await ledger.read(), ones[:5].sum(axis=0))
