"""The table of functions by dtype and backend shows what a recorded run has passed, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import operations_table as table
import pytest
from chosen import BACKEND, IS_STAND_IN, SEARCHED
from pages import REFERENCE, ROOT, read

from trio_accel import DType
from trio_accel.devices import DECLARED

pytestmark = pytest.mark.docs

PAGE = REFERENCE / "operations.md"
TABLE = r"^### (.+) on (\w+)\n\n((?:\|.*\n?)+)"
DTYPES = {str(dtype) for dtype in DType}
RECORDS = list(table.records().items())
# Each in its own way: the second asks and does not look, the third fails, the fourth looks at its input.
WRITTEN = """
import numpy as np
import pytest
import trio_accel as ta
X = np.arange(4.0)

async def total(device, dtype):
    return await (await ta.arrays.sum(await device.put(X.astype(dtype)))).to_host()

async def test_it_compares(device):
    assert await total(device, "f4") == 6

async def test_it_looks_at_no_result(device):
    await ta.arrays.sum(await device.put(X.astype("i4")))
    with pytest.raises(TypeError):
        await ta.arrays.sum("x")

@pytest.mark.parametrize("wrong", [0, 1])
async def test_it_fails_once(device, wrong):
    assert await total(device, "f8") == 6 + wrong

async def test_it_looks_at_the_operand(device):
    x = await device.put(X.astype("i2"))
    await ta.arrays.sum(x)
    assert (await x.to_host()).tolist() == X.tolist()
"""


def marked() -> dict[str, set[tuple[str, str]]]:
    """The functions and dtypes that the page shows as passed, by the titles of the backends."""
    titles = {title: capability for capability, title in table.CAPABILITIES.items()}
    found: dict[str, set[tuple[str, str]]] = {}
    for title, backend, text in re.findall(TABLE, read(PAGE), re.MULTILINE):
        head, _, *rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        for name, *cells in rows:
            passed = [dtype for dtype, cell in zip(head[1:], cells, strict=True) if cell == table.PASSED]
            cells_of = found.setdefault(backend, set())
            cells_of |= {(f"{titles[title]}.{name}", dtype) for dtype in passed}
    return found


def test_the_page_shows_the_passed_tests_and_no_more() -> None:
    recorded = {
        backend.upper(): {
            (name, dtype) for name, one in record["operations"].items() for dtype in one["passed"].split()
        }
        for backend, record in RECORDS
    }
    assert marked() == recorded
    assert ("linalg.matmul", "float32") in recorded["CPU"]


def test_without_a_record_nothing_has_passed() -> None:
    for capability in table.CAPABILITIES:
        rows = table.rows_of(capability, {"operations": {}})
        assert rows
        assert not any(cell == table.PASSED for cells in rows.values() for cell in cells.values())


def test_every_declared_function_has_a_row() -> None:
    # Other tests of this process may have declared operations of their own.
    declared = {name for name, one in DECLARED.items() if one.__module__.startswith("trio_accel.")}
    page = read(PAGE)
    public = {
        name for name in declared if re.search(rf"^\| `{name.partition('.')[2]}` \|", page, re.MULTILINE)
    }
    messages_alone = {
        "linalg.check_diagonal",
        # Medians ask it.
        "arrays.sort_at",
        *(f"sparse.{one}" for one in ("bsr_to_csr", "check_structure", "coo_to_csr", "csr_to_bsr")),
        *(f"sparse.{one}" for one in ("csr_to_csc", "extend_basis", "find_rows", "least_residual")),
        *(f"sparse.{one}" for one in ("cg_steps", "solve_factored", "sum_of_two")),
        # Generators ask them.
        *(f"random.{one}" for one in ("multiply", "order", "rejected", "search", "sequence_bits")),
        "random.sobol_points",
    }
    assert declared - public - messages_alone == set()
    assert {name for name, _ in marked()["CPU"]} <= set(table.public_functions())


@pytest.mark.parametrize(("backend", "record"), RECORDS, ids=[backend for backend, _ in RECORDS])
def test_a_record_has_a_time_and_a_device(backend: str, record: dict[str, Any]) -> None:
    for run in record["runs"]:
        assert date(2026, 1, 1) <= date.fromisoformat(run["date"]) <= datetime.now(UTC).date()
        assert run["hardware"]
        assert run["tests"] > 100
        assert {"Python", "trio", "numpy"} <= set(run["versions"])
    assert f"## {backend.upper()}\n\n{table.run_of(record)}" in read(PAGE)


@pytest.mark.parametrize(("backend", "record"), RECORDS, ids=[backend for backend, _ in RECORDS])
def test_a_record_agrees_with_the_declarations(backend: str, record: dict[str, Any]) -> None:
    """One that does not is older than they are: the functions were renamed, or have other dtypes now."""
    assert set(record["operations"]) <= set(table.public_functions()), backend
    for name, found in record["operations"].items():
        passed, refused = set(found["passed"].split()), set(found["refused"].split())
        assert passed <= DTYPES
        assert refused <= DTYPES
        assert not passed & refused, name
        if name in DECLARED and DECLARED[name].declaration.dtypes:
            assert passed <= {str(dtype) for dtype in DECLARED[name].declaration.dtypes}, name


@pytest.mark.slow
@pytest.mark.skipif(IS_STAND_IN, reason="a record is refused there")
def test_a_run_records_the_comparisons_of_passed_tests(tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "test_written.py").write_text(WRITTEN)
    (tmp_path / "pages.json").write_text('{"other": {"tests": 3}}')
    command = f"-p conftest -p no:cacheprovider -c {ROOT / 'pyproject.toml'} --rootdir {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command.split(), "--record-operations", "pages.json", "arrays"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'docs'}:{SEARCHED}", "TRIO_ACCEL_BACKEND": BACKEND},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    records = json.loads((tmp_path / "pages.json").read_text())
    assert records["other"] == {"tests": 3}
    assert records[BACKEND]["operations"] == {"arrays.sum": {"passed": "float32", "refused": ""}}
    assert (records[BACKEND]["tests"], records[BACKEND]["date"]) == (2, datetime.now(UTC).date().isoformat())
