"""The table of nondeterministic functions names public functions, each with its reason."""

from __future__ import annotations

import determinism_table as table
import pytest

import trio_accel as ta

pytestmark = [pytest.mark.docs, pytest.mark.no_device]


def test_the_record_has_functions_of_the_package() -> None:
    found = table.record()
    assert len(found["determined"]) > 400
    assert not found["varying"].keys() & set(found["determined"])
    for name in (*found["determined"], *found["varying"]):
        room, _, function = name.partition(".")
        assert callable(getattr(getattr(ta, room), function)), name


def test_each_function_that_varies_has_a_reason() -> None:
    assert table.REASONS.keys() == table.record()["varying"].keys()
    about, rows = table.tables()
    assert about.startswith(table.record()["date"])
    assert [row.split("`")[1] for row in rows.splitlines()[2:]] == list(table.record()["varying"])
