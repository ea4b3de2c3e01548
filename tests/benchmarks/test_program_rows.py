"""The table of functions as programs."""

from __future__ import annotations

import re

import pytest

from benchmarks import programs, refusals


async def test_each_way_has_a_row() -> None:
    bare, *rows = await programs.main("cpu", 0.02)
    assert re.fullmatch(r"bare library +[0-9.]+ µs", bare)
    names = [re.match(r"(\w+): (\w+) +[0-9.]+ µs +[0-9]+ /s of 16 askers", row) for row in rows]
    assert {name.groups() for name in names if name is not None} == {
        (isolation, way)
        for isolation in ("inline", "process")
        for way in ("enqueuing", "enqueuing_undeclared", "declared", "not_declared")
    }


@pytest.mark.slow
async def test_each_isolation_has_a_share_next_to_refusals() -> None:
    rows = await refusals.main("cpu", pairs=2, seconds=0.25)
    found = [
        re.fullmatch(r"(\w+) +[0-9]+ /s, beside bad requests ([0-9.]+) of that \(.*\)", row) for row in rows
    ]
    assert [row and row[1] for row in found] == ["inline", "process"]
    assert all(row and float(row[2]) > 0.1 for row in found)
