"""Programs that refuse requests: an error for the caller, and nothing for the others."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import trio
from refusing_programs import BadRowError, Careful, RefusesConstruction, TwoTextsError, invert

import trio_accel as ta
from trio_accel.patterns import Batcher, Submit
from trio_accel.programs import Refused, method

X = np.ones((2, 4))
BAD = np.full((2, 4), np.nan)
# An undeclared error would end the program at once.
NEVER = ta.Intensity(0, 60.0)


def incarnation(system: ta.System, device: ta.Device) -> int:
    (node,) = (node for node in system.tree().walk() if node.path == f"{device.path}/context/careful/program")
    return node.incarnation


async def test_a_declared_error_is_the_askers_own(system: ta.System, device: ta.Device) -> None:
    async with ta.open_program(device, Careful, np.zeros(2), name="careful", intensity=NEVER) as program:
        for number in range(5):
            with pytest.raises(ValueError, match="a row is not finite") as caught:
                await program.ask(Careful.rows, BAD)
            assert type(caught.value) is ValueError
            assert str(caught.value) == "a row is not finite"
            assert any("refusing_programs.Careful.rows" in note for note in caught.value.__notes__)
            np.testing.assert_array_equal(await (await program.ask(Careful.rows, X)).to_host(), [4, 4])
            # The instance is the same.
            assert await program.ask(Careful.served) == 2 * number + 2
        assert incarnation(system, device) == 0
    assert device.generation == 1


@pytest.mark.parametrize(
    ("kind", "cls", "text"),
    [
        ("BadRowError", BadRowError, "row 3"),
        ("UnicodeError", ValueError, "a subclass"),
        ("Refused", Refused, "not today"),
    ],
)
async def test_classes_of_refusals(
    system: ta.System, device: ta.Device, kind: str, cls: type[Exception], text: str
) -> None:
    async with ta.open_program(device, Careful, np.zeros(2), name="careful", intensity=NEVER) as program:
        with pytest.raises(cls, match=text):
            await program.ask(Careful.fails_with, kind)
        assert await program.ask(Careful.served) == 1
        assert incarnation(system, device) == 0


async def test_a_class_that_cannot_be_made_again(device: ta.Device) -> None:
    async with ta.open_program(device, Careful, np.zeros(2), intensity=NEVER) as program:
        wanted = TwoTextsError if device.options.isolation == "inline" else Refused
        with pytest.raises(wanted, match=r"one.*two"):
            await program.ask(Careful.fails_with, "TwoTextsError")
        assert await program.ask(Careful.served) == 1


async def test_an_undeclared_error_restarts_the_program(device: ta.Device) -> None:
    async with ta.open_program(device, Careful, np.zeros(2), backoff=ta.Backoff(base=0.0)) as program:
        with pytest.raises(ta.ActorFailedError, match="undeclared"):
            await program.ask(Careful.fails_with, "KeyError")
        assert await program.ask(Careful.served) == 0


async def test_a_function_may_refuse(device: ta.Device) -> None:
    async with ta.open_program(device, invert, intensity=NEVER) as program:
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            await program.ask(0.0)
        assert await program.ask(4.0) == 0.25


async def test_state_is_unchanged_if_the_refusal_says_so(system: ta.System, device: ta.Device) -> None:
    counts = await device.put(np.zeros(2))
    async with ta.open_program(device, Careful, counts, name="careful", intensity=NEVER) as program:
        await program.ask(Careful.add, np.array([1.0, 2.0]))
        # Later requests are served, and read the old contents.
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(Refused, match="a negative number"):
                    await program.ask(Careful.add, np.array([-1.0, 2.0]))

            for _ in range(4):
                nursery.start_soon(refused)
                nursery.start_soon(program.ask, Careful.add, np.array([1.0, 0.0]))
        np.testing.assert_array_equal(await counts.to_host(), [5, 2])
        assert incarnation(system, device) == 0


async def test_a_refusal_after_a_change_is_an_error_like_any(device: ta.Device) -> None:
    counts = await device.put(np.zeros(2))
    async with ta.open_program(device, Careful, counts, backoff=ta.Backoff(base=0.0)) as program:
        with pytest.raises(ta.ActorFailedError, match="added already"):
            await program.ask(Careful.add, np.array([101.0, 2.0]))
        with pytest.raises(ta.StaleRefError):
            await program.ask(Careful.add, np.array([1.0, 2.0]))


@pytest.mark.parametrize("unchanged", [True, False])
async def test_an_array_of_the_askers_for_the_result(device: ta.Device, *, unchanged: bool) -> None:
    out = await device.put(np.zeros(2))
    async with ta.open_program(device, Careful, np.zeros(2), intensity=NEVER) as program:
        with pytest.raises(Refused, match="half of it"):
            await program.ask(Careful.half, np.array([1.0, 1.0 if unchanged else -1.0]), out=out)
        if unchanged:
            assert (await out.to_host())[1] == 0
        else:
            with pytest.raises(ta.StaleRefError, match="spoiled"):
                await out.to_host()
        assert await program.ask(Careful.served) == 0


async def test_a_constructor_cannot_refuse(device: ta.Device) -> None:
    with pytest.raises(RuntimeError, match=r"RefusesConstruction\(\) raised Refused: never"):
        await ta.open_program(device, RefusesConstruction)


async def test_others_in_flight_lose_nothing(system: ta.System, device: ta.Device) -> None:
    answers, errors = 0, 0
    async with ta.open_program(device, Careful, np.zeros(2), name="careful", intensity=NEVER) as program:

        async def ask(number: int) -> None:
            nonlocal answers, errors
            try:
                await program.ask(Careful.rows, BAD if number % 4 == 0 else X)
                answers += 1
            except ValueError:
                errors += 1

        async with trio.open_nursery() as nursery:
            for number in range(80):
                nursery.start_soon(ask, number)
        assert (answers, errors) == (60, 20)
        assert incarnation(system, device) == 0


async def test_a_batcher_finds_the_bad_requests(system: ta.System, device: ta.Device) -> None:
    results: dict[int, object] = {}
    bad = {3, 17, 18, 40, 63}
    async with (
        ta.open_program(device, Careful, np.zeros(2), name="careful", intensity=NEVER) as program,
        trio.open_nursery() as nursery,
    ):

        async def model(rows: list[np.ndarray]) -> np.ndarray:
            return await (await program.ask(Careful.rows, np.stack(rows))).to_host()

        batcher = await system.spawn(
            Batcher[Any, Any], model, max_size=64, max_wait=0.1, adaptive=False, name="batcher"
        )

        async def ask(number: int) -> None:
            row = np.full(3, np.nan if number in bad else float(number))
            try:
                results[number] = await batcher.ask(Submit(row))
            except ValueError as error:
                results[number] = error

        for number in range(64):
            nursery.start_soon(ask, number)
    assert {number for number, result in results.items() if isinstance(result, ValueError)} == bad
    assert all(results[number] == 3 * number for number in range(64) if number not in bad)


def test_bad_declarations() -> None:
    given: list[Any] = ["ValueError", (KeyboardInterrupt,), (3,), (ta.StaleRefError,), (MemoryError,)]
    for refuses in given:
        with pytest.raises(TypeError, match="method: "):
            method(refuses=refuses)
    with pytest.raises(TypeError, match=re.escape('raise Refused("...", unchanged=True)')):
        method(updates=["x"], refuses=(ValueError,))
    method(updates=["x"], refuses=(Refused,))
