"""Lists, tuples and dicts of many values as arguments: as they were given, and at the price of one look."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from sample_programs import Layer

import trio_accel as ta

NUMBERS = [float(number) / 7 for number in range(2000)]
ROWS = [[number + 0.5, -number] for number in range(1000)]
# Each of many values, of all types that an argument may have.
GIVEN: dict[str, Any] = {
    "numbers": NUMBERS,
    "rows": ROWS,
    "rows of a tuple": tuple(map(tuple, ROWS)),
    "integers": [*range(-30, 30), 2**63, -(2**200)],
    "special numbers": [math.inf, -0.0, 5e-324, 1e308, *NUMBERS[:20]],
    "truth values": [True, False, None] * 20,
    "complex numbers": [1 + 2j, -0.0j] * 20,
    "texts": ["", 'ä\0\n"', "x" * 5000] * 20,
    "bytes": [b"", b"\x00\xff" * 50] * 20,
    "dicts": [{"a": number, "b": [number, {"c": ()}]} for number in range(50)],
    "a dict of lists": {"x": NUMBERS, "y": {"z": tuple(NUMBERS)}, "n": None},
    "levels of all kinds": [1, "a", [2.0, (3j, {"k": [b"4"]})], *range(50)],
    "nothing": [[], (), {}] * 20,
}


def _layer(device: ta.Device) -> Any:
    return ta.open_program(device, Layer, {"weights": np.eye(2), "bias": np.zeros(2)})


async def test_values_arrive_as_they_were_given(device: ta.Device) -> None:
    async with await _layer(device) as program:
        for name, value in GIVEN.items():
            assert await program.ask(Layer.types, value) == repr(value), name
            several = await program.ask(Layer.echo, *([value] * 2), *range(40), k=value, l=1)
            assert several["args"] == (value, value, *range(40)), name
            assert several["kwargs"] == {"k": value, "l": 1}, name


async def test_they_are_sent_next_to_arrays(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    async with await _layer(device) as program:
        echo = await program.ask(Layer.echo, {"x": x, "rows": ROWS, "both": [NUMBERS, x, *NUMBERS]})
        back = echo["args"][0]
        assert back["rows"] == ROWS
        assert back["both"][0] == NUMBERS == back["both"][2:]
        for array in (back["x"], back["both"][1]):
            np.testing.assert_array_equal(await array.to_host(), np.arange(3.0))


async def test_a_program_gets_a_list_of_its_own(device: ta.Device) -> None:
    rows = [row.copy() for row in ROWS]
    async with await _layer(device) as program:
        for _ in range(3):
            assert await program.ask(Layer.emptied, rows) == len(ROWS)
        assert rows == ROWS
        del rows[1:]
        assert await program.ask(Layer.emptied, rows) == 1


async def test_the_asker_takes_no_step_for_each_value(device: ta.Device) -> None:
    async with await _layer(device) as program:
        counts: list[int] = []
        for length in (100, 100, 20_000):
            steps = 0

            def note(frame: object, event: str, _: object) -> None:
                nonlocal steps
                steps += event == "call"

            value = {
                "rows": [[0.5] * length, (1,) * length],
                "texts": ["a"] * length,
                "thin": [[1.5]] * length,
            }
            sys.setprofile(note)
            try:
                assert await program.ask(Layer.size, value) == 3
            finally:
                sys.setprofile(None)
            counts.append(steps)
        # The loop may take another turn.
        assert counts[-1] < counts[1] + 500


async def test_too_many_values_are_refused(device: ta.Device) -> None:
    again: list[Any] = [1]
    for _ in range(30):
        again = [again, again]
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = []
    wide += [wide] * 100
    async with await _layer(device) as program:
        for value, told in (
            (again, "values; hand large values over as arrays"),
            ([0.5] * (1 << 20), "the lists among its arguments take .* bytes, at most 8388608 are allowed"),
            (endless, "nested more than 32 deep"),
            (wide, "values; hand large values over as arrays"),
            ([[1, {2: 3}]] * 50, None),
            ([1, {1, 2}] * 50, None),
            ([np.float64, 1] * 50, None),
        ):
            with pytest.raises(TypeError if told is None else ValueError, match=told):
                await program.ask(Layer.types, value)
