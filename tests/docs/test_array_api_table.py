"""The tables of the array API standard match the results of its suite, and explain its failures."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Any

import array_api_table as table
import pytest
from pages import REFERENCE, read

pytestmark = pytest.mark.docs

PAGE = REFERENCE / "interop.md"
SUITE = list(table.records(table.SUITE).items())
CALLERS = list(table.records(table.CALLERS).items())
BACKENDS = pytest.mark.parametrize(("backend", "record"), SUITE, ids=[backend for backend, _ in SUITE])


@BACKENDS
def test_failures_have_a_reason(backend: str, record: dict[str, Any]) -> None:
    assert [name for name in record["failed"] if table.reason_of(name) is None] == [], backend
    assert table.totals(record)["failed"] == len(record["failed"]) < 30
    assert table.totals(record)["passed"] > 1300


@BACKENDS
def test_missing_functions_have_a_reason(backend: str, record: dict[str, Any]) -> None:
    assert len(record["missing"]) <= 15, backend
    assert set(record["missing"]) <= set(table.REASONS)
    # The suite tests a missing function by its name, its signature and more.
    assert bool(record["missing"]) == bool(table.totals(record)["missing"])


@BACKENDS
def test_the_page_shows_the_counts(backend: str, record: dict[str, Any]) -> None:
    part = read(PAGE).partition(f"### The suite on {backend.upper()}")[2].partition("\n##")[0]
    rows = {
        row[0]: [int(cell) for cell in row[1:]]
        for row in re.findall(r"\| ([a-z ]+) " + r"\| (\d+) " * 4, part)
    }
    totals = table.totals(record)
    assert rows["together"] == [totals[outcome] for outcome in table.OUTCOMES]
    assert [sum(column) for column in zip(*rows.values(), strict=True)] == [
        2 * count for count in totals.values()
    ]


@pytest.mark.parametrize("record", [record for _, record in SUITE + CALLERS])
def test_a_record_has_a_time(record: dict[str, Any]) -> None:
    assert date(2026, 1, 1) <= date.fromisoformat(record["date"]) <= datetime.now(UTC).date()
    assert "Python" in record["versions"]


def test_functions_of_scipy_and_scikit_learn_are_listed() -> None:
    outcomes = dict(CALLERS)["cpu"]["outcomes"]
    page = read(PAGE)
    assert all(re.search(rf"`{name.rpartition('.')[2]}`", page) for name in outcomes)
    on_device = [name for name, outcome in outcomes.items() if outcome == "device"]
    for module in (
        "scipy.special",
        "scipy.stats",
        "scipy.cluster",
        "sklearn.linear_model",
        "sklearn.metrics",
    ):
        assert any(name.startswith(module) for name in on_device)
