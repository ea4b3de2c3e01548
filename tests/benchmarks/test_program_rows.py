"""The table of functions as programs."""

from __future__ import annotations

import re

from benchmarks import programs


async def test_each_way_has_a_row() -> None:
    bare, *rows = await programs.main("cpu", 0.02)
    assert re.fullmatch(r"bare library +[0-9.]+ µs", bare)
    names = [re.match(r"(\w+): (\w+) +[0-9.]+ µs +[0-9]+ /s of 16 askers", row) for row in rows]
    assert {name.groups() for name in names if name is not None} == {
        (isolation, way)
        for isolation in ("inline", "process")
        for way in ("enqueuing", "declared", "not_declared")
    }
