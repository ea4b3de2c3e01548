"""Runs tests that another project has of itself, in a process of their own, by functions of a device."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import scipy

__all__ = ["Refused", "Tests", "check_counts", "check_refused", "failures", "refused", "run_suite"]

HERE = Path(__file__).parent
Tests = dict[str, dict[str, Any]]


@attrs.frozen
class Refused:
    """Tests that a device does not pass: their names, their number, the reason, and the text."""

    tests: str
    count: int
    reason: str
    error: str


def run_suite(script: str, folder: Path, names: Sequence[str], deadline: float) -> Tests:
    """Run tests by a script next to this file, and return its report of each."""
    for name in names:
        package = name.partition("::")[0].rpartition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip("this SciPy was installed without its tests")
    report = folder / "report.json"
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(report), *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
        # Unset, SciPy's tests use NumPy arrays, and not the other array libraries.
        env={key: value for key, value in os.environ.items() if key != "SCIPY_ARRAY_API"}
        | {"PYTHONPATH": os.pathsep.join([*paths, str(HERE.parents[1])])},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: Tests = json.loads(report.read_text(encoding="utf-8"))
    return result


def refused(name: str, entries: Iterable[Refused]) -> Refused | None:
    """Return the entry of a listed test."""
    return next((entry for entry in entries if re.fullmatch(entry.tests, name)), None)


def failures(
    tests: Tests, entries: Iterable[Refused], allowed: Sequence[str] = ("passed",)
) -> dict[str, str]:
    """Return the errors of the unlisted tests with another outcome."""
    return {
        name: test["error"]
        for name, test in tests.items()
        if test["outcome"] not in allowed and refused(name, entries) is None
    }


def check_refused(tests: Tests, entry: Refused) -> None:
    """Check that all tests of an entry exist, and fail as described."""
    listed = {name: test for name, test in tests.items() if re.fullmatch(entry.tests, name)}
    assert len(listed) == entry.count
    assert {name for name, test in listed.items() if test["outcome"] != "failed"} == set()
    assert [test["error"] for test in listed.values() if not re.search(entry.error, test["error"])] == []


def check_counts(tests: Tests, entries: Sequence[Refused], area: str) -> None:
    """Check the row of an area in the guide's table: tests passed by a device, and listed tests."""
    page = (HERE.parents[1] / "docs" / "guide" / "transforms.md").read_text(encoding="utf-8")
    of_version = re.search(r"SciPy (\S+)'s own tests", page)
    assert of_version is not None
    if of_version[1] != scipy.__version__:
        pytest.skip(f"the page counts tests of SciPy {of_version[1]}, and this is {scipy.__version__}")
    listed = sum(entry.count for entry in entries)
    passed = sum(
        test["outcome"] == "passed" and bool(test["calls"]) and refused(name, entries) is None
        for name, test in tests.items()
    )
    assert f"| `ta.{area}` | {passed} | {listed} | 0 |" in page
